"""The picture, where matplotlib is; and the line that says so where it is not."""

import sys
from pathlib import Path

import pytest

from moebius_cli.bench.plot import plot
from moebius_cli.errors import CliError
from tests.cli.bench.results import level, result
from tests.cli.refusal import refused

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_picture_of_two_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a = result(level(8), level(1), level(2, ttft=None, itl=None, stream_rate=None))
    b = result(level(1), level(0.5, "rate"))
    sizes = []
    for name, results in (("one", [("A", a)]), ("both", [("A", a), ("B", b)])):
        plot(tmp_path / name, results)
        data = (tmp_path / name).read_bytes()
        assert data.startswith(PNG)
        width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        sizes.append((width, height))
    # Rates have a row of their own.
    assert sizes[1] == (sizes[0][0], 2 * sizes[0][1])


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(CliError, match="cannot be written"):
        plot(tmp_path / "no" / "a.png", [("A", result(level(8)))])


def test_without_matplotlib_a_line_says_so_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # Nobody listens there: that would be the complaint if it were asked.
    line = refused("bench", "serve", "--url", "http://127.0.0.1:9", "--plot", tmp_path / "a.png")
    assert "pip install 'moebius[bench]'" in line
