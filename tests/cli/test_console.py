"""The steps that `moebius up` shows."""

import io
import re

import pytest
from rich.console import Console

from moebius_cli import console as module
from moebius_cli.console import step


def shown(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=60)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_step_is_one_line_with_its_result_and_time() -> None:
    console = shown(terminal=False)
    with step(console, "model") as current:
        current.update("reading")
        current.result = "tiny [moe] at /models/" + "long/" * 20
    assert re.fullmatch(r"✓ model        tiny \[moe\] at /models/(long/){20} \d+\.\d s\n", text(console))


def test_a_step_that_takes_long_says_so_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    console = shown(terminal=False)
    with step(console, "workers") as current:
        for passed in range(25):
            now = 100.0 + passed
            current.update(f"[{passed}%]")
    lines = text(console).splitlines()
    assert lines == ["  ... workers [10%]", "  ... workers [20%]", "✓ workers       24.0 s"]


def test_a_step_that_fails_is_not_ticked_off() -> None:
    console = shown(terminal=False)
    with pytest.raises(ValueError), step(console, "workers"):
        raise ValueError
    assert text(console) == ""


def test_a_terminal_shows_what_is_being_done() -> None:
    console = shown(terminal=True)
    with step(console, "model") as current:
        current.update("making [experts]")
        console.print("")
    assert "model" in text(console)
    assert "✓" in text(console)
