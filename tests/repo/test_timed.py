"""Tests marked `timed` have three tries, each with its limit of time, and each is told."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import os, time
from pathlib import Path

import pytest

from tests.timed import same

pytestmark = pytest.mark.timed

@pytest.fixture(autouse=True)
def tries(request):
    with Path(os.environ["RAN"]).open("a+") as ran:
        ran.seek(0)
        before = ran.read().split().count(request.node.name)
        print(request.node.name, file=ran)
    return before + 1

def test_breaks_twice(tries):
    assert tries == 3

def test_breaks(tries):
    assert not tries

@pytest.mark.timeout(1)
def test_breaks_and_hangs(tries):
    assert tries > 1
    time.sleep(100)

def test_has_found_what_is_told_once(tries):
    assert tries > 1, "Task exception was never retrieved"

def test_is_wrong(tries):
    same(tries, 2)

@pytest.fixture
def torn():
    yield
    raise ValueError

@pytest.fixture
def finds():
    yield
    raise RuntimeError("Task exception was never retrieved")

def test_finds_it_among_others(torn, finds):
    pass
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_breaks_is_tried_again_and_told(processes: str, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    own = ("-p", "tests.timed", "-c", os.devnull, "-o", "markers=timed", "--rootdir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rR", *own, "--numprocesses", processes, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"RAN": str(tmp_path / "ran")},
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    told = Counter(re.findall(r"^(RERUN|FAILED) \S+::test_(\w+)$", done.stdout, re.MULTILINE))
    assert told == {
        ("RERUN", "breaks_twice"): 2,
        ("RERUN", "breaks"): 2,
        ("FAILED", "breaks"): 1,
        ("RERUN", "breaks_and_hangs"): 1,
        ("FAILED", "breaks_and_hangs"): 1,
        # And nothing of what is final, which fails at once.
    }, done.stdout + done.stderr
    assert "4 failed, 2 passed, 1 error, 5 rerun" in done.stdout
    # Why, of those too that pass in the end.
    assert "assert 1 == 3" in done.stdout
