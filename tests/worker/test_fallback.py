"""What a fallback level makes of settings, and how the level that is asked for is read."""

import json
from pathlib import Path

import pytest

from moebius_worker.fallback import DEFAULT_LEVELS, FRONT_SETTINGS, FallbackLevel
from moebius_worker.front.level_file import read_level
from moebius_worker.settings import WorkerSettings


def at(level: int, levels: list[dict[str, object]] | None = None, **settings: object) -> WorkerSettings:
    given = {} if levels is None else {"fallback_levels": [FallbackLevel(**one) for one in levels]}
    return WorkerSettings(engine="sim", **settings, **given).at_level(level)  # type: ignore[arg-type]


def test_each_level_is_on_top_of_those_before() -> None:
    plain = WorkerSettings(engine="sim", max_running=32)
    steps = [plain.at_level(level) for level in range(len(DEFAULT_LEVELS) + 1)]
    assert [one.cuda_graphs for one in steps] == [True, False, False, False]
    assert [one.kernels for one in steps] == ["auto", "auto", "reference", "reference"]
    assert [one.max_running for one in steps] == [32, 32, 32, 4]
    assert plain.model_copy(update={"fallback_levels": ()}) == steps[0]


def test_limits_are_only_lowered() -> None:
    levels = [{"name": "small", "settings": {"max_running": 4, "max_step_tokens": 64}}]
    assert at(1, levels, max_running=2).max_running == 2
    assert at(1, levels, max_running=8).max_running == 4
    assert at(1, levels).max_step_tokens == 64
    assert at(1, levels, max_step_tokens=16).max_step_tokens == 16


def test_exclusions_add_up_and_groups_change_in_part() -> None:
    levels = [
        {"name": "one", "settings": {"exclude_backends": ["experts:triton"], "sim": {"itl": 0.5}}},
        {"name": "two", "settings": {"exclude_backends": ["linear:triton", "experts:triton"]}},
    ]
    found = at(2, levels, exclude_backends=("norm:triton",), sim={"ttft": 0.25})
    assert found.exclude_backends == ("norm:triton", "experts:triton", "linear:triton")
    assert (found.sim.ttft, found.sim.itl) == (0.25, 0.5)


def test_the_environment_changes_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(engine="sim", max_running=32)
    monkeypatch.setenv("MOEBIUS_WORKER_MAX_RUNNING", "99")
    monkeypatch.setenv("MOEBIUS_WORKER_CUDA_GRAPHS", "true")
    assert (settings.at_level(1).max_running, settings.at_level(1).cuda_graphs) == (32, False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_runing": 1}, "'bad' cannot change 'max_runing'"),
        ({"listen": "0.0.0.0:1"}, "'bad' cannot change 'listen'"),
        ({"fallback_levels": []}, "'bad' cannot change 'fallback_levels'"),
        ({"max_running": 0}, "up to 'bad': max_running: Input should be greater than 0"),
        ({"kernels": "none"}, "up to 'bad': kernels"),
        ({"sim": {"speed": 1}}, "up to 'bad': sim.speed"),
    ],
)
def test_a_wrong_level_is_refused_at_the_start(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        at(0, [{"name": "bad", "settings": settings}])


def test_what_a_level_cannot_change_exists() -> None:
    assert set(WorkerSettings.model_fields) > FRONT_SETTINGS


# As kubelets write it.
ANNOTATIONS = (
    'kubernetes.io/config.seen="2026-11-29T10:00:00.1Z"\n'
    'moebius.dev/fallback-level="2"\n'
    'moebius.dev/fallback-reason="died:\\nmoebius.dev/fallback-level=\\"1\\" did not \\u003chelp\\u003e"\n'
)


@pytest.mark.parametrize(
    ("content", "level"),
    [
        (ANNOTATIONS, 2),
        (ANNOTATIONS.strip(), 2),
        ("", 0),
        ('other="1"\n', 0),
        ('x.moebius.dev/fallback-level="1"\n', 0),
        ('moebius.dev/fallback-level="0"', 0),
        ('moebius.dev/fallback-level="10"', 10),
        ('moebius.dev/fallback-level=""', None),
        ('moebius.dev/fallback-level="-1"', None),
        ('moebius.dev/fallback-level="1.5"', None),
        ('moebius.dev/fallback-level="²"', None),
        ('moebius.dev/fallback-level="99999999999"', None),
    ],
)
def test_the_level_in_the_file(tmp_path: Path, content: str, level: int | None) -> None:
    path = tmp_path / "annotations"
    path.write_text(content)
    assert read_level(path) == level


def test_files_that_do_not_tell(tmp_path: Path) -> None:
    assert read_level(tmp_path / "none") == 0
    assert read_level(tmp_path) is None
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert read_level(tmp_path / "binary") is None


def test_levels_are_a_flag() -> None:
    levels = [{"name": "calm", "settings": {"sim": {"faults": []}}}]
    found = WorkerSettings(engine="sim", fallback_levels=json.loads(json.dumps(levels)))  # type: ignore[arg-type]
    assert found.fallback_levels == (FallbackLevel(name="calm", settings={"sim": {"faults": []}}),)
