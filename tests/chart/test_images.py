"""The Dockerfiles: checked by hadolint, and in step with the project."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chart.rendering import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not there")
    done = subprocess.run([program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_and_run_as_nobody(path: Path) -> None:
    text = path.read_text()
    for image in re.findall(r"^ARG \w+=(python:.*)$", text, re.MULTILINE):
        assert re.search(r":\d+\.\d+\.\d+-", image), image
    final = text.rpartition("\nFROM ")[2]
    assert "USER 10001:10001" in final
    assert re.search(r'^ENTRYPOINT \["moebius-\w+"\]$', text, re.MULTILINE)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docker" / "requirements").glob("*.txt")), ids=lambda path: path.name
)
def test_requirements_are_pinned_exactly(path: Path) -> None:
    lines = path.read_text().split()
    assert lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
