"""The controller's memory on disk."""

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_controller.events import Event, What
from moebius_controller.state_file import (
    ControllerState,
    ProcessView,
    StateFileError,
    load_state,
    save_state,
)
from moebius_controller.types import DeviceFault, Past

STATE = ControllerState(
    pid=17,
    history={"worker-0": Past(1.5, 2.25, 1, started=2, ready=1, dead=1, replaced=1, level=2)},
    processes={
        "worker-0": ProcessView(2, pid=99),
        "worker-1": ProcessView(1, None, "it exited with status 1"),
    },
    events=(Event(1.5, "worker-0", 1, What.GAVE_UP, "no such file: 🙂"),),
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "controller.json"
    save_state(file, STATE)
    assert load_state(file) == STATE
    assert [path.name for path in tmp_path.iterdir()] == ["controller.json"]


numbers, times = st.integers(0, 2**60), st.floats(0, 1e11)
faults = st.builds(DeviceFault, st.text(), numbers, times, st.booleans(), st.text())
# All fields, so that one that is added is kept as well.
pasts = st.builds(
    Past,
    **{
        one.name: {float: times, int: numbers, str: st.text()}.get(one.type, st.lists(faults).map(tuple))
        for one in fields(Past)
    },
)


@settings(deadline=None)
@given(history=st.dictionaries(st.text(), pasts, max_size=4))
def test_a_history_is_kept_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, history: dict[str, Past]
) -> None:
    file = tmp_path_factory.getbasetemp() / "history.json"
    save_state(file, ControllerState(1, history))
    loaded = load_state(file)
    assert loaded is not None
    assert loaded.history == history


def test_none_was_saved(tmp_path: Path) -> None:
    assert load_state(tmp_path / "controller.json") is None


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"pid": "x"}', b"\xff", b'{"pid": 1, "history": {"w": 3}}'])
def test_damage_is_told_with_the_files_name(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "controller.json"
    file.write_bytes(damage)
    with pytest.raises(StateFileError, match=r"controller\.json"):
        load_state(file)


def test_a_state_that_is_cut_anywhere_is_told(tmp_path: Path) -> None:
    file = tmp_path / "controller.json"
    save_state(file, STATE)
    whole = file.read_bytes()
    for length in range(len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(StateFileError):
            load_state(file)
