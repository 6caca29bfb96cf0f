"""The file of `--out`: what is read is what was written, and what is no result is refused by its fault."""

import json
from pathlib import Path

import jsonschema
import pytest

from moebius_cli.bench.result import RESULT, read_result, write_result
from moebius_cli.errors import CliError
from tests.cli.bench.results import FAILED, level, result


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    empty = level(2, completed=0, errors=FAILED, ttft=None, itl=None, token_source=None, input_tokens=None)
    whole = result(level(1), empty, level(0.5, "rate"))
    write_result(tmp_path / "a.json", whole)
    assert read_result(tmp_path / "a.json") == whole
    written = json.loads((tmp_path / "a.json").read_text())
    jsonschema.validate(written, RESULT.json_schema())
    assert written["levels"][0]["ttft"] == {"mean": 0.11, "p50": 0.1, "p95": 0.2, "p99": 0.3}
    assert written["levels"][1]["errors"][0]["kind"] == "HTTP 429 (overloaded)"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "no result"),
        ("[]", "no result"),
        ('{"version": 2}', "version"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CliError, match=fault) as error:
        read_result(tmp_path / "a.json")
    assert str(tmp_path / "a.json") in str(error.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot be read: No such file"):
        read_result(tmp_path / "a.json")
    with pytest.raises(CliError, match="cannot be written: No such file"):
        write_result(tmp_path / "no" / "a.json", result(level()))
