"""A test that loses the GPU fails, by its name; what comes after it is run elsewhere, or not at all."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A PyTorch whose GPU is lost in the tests LOST, which notice if they are LOUD, or their process is KILLED.
# Each that runs leaves a line.
TESTS = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace

import pytest

class Cuda:
    lost = False

    def is_initialized(self):
        return True

    def synchronize(self):
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered\\nFor debugging consider")

CUDA = Cuda()

@pytest.fixture(autouse=True)
def torch():
    sys.modules["torch"] = SimpleNamespace(cuda=CUDA, get_num_threads=lambda: 1)

GROWN = "GROWS" in os.environ and Path(os.environ["RAN"]).exists()

@pytest.mark.parametrize("number", range(6 + GROWN))
def test_one(number, request):
    with open(os.environ["RAN"], "a") as ran:
        print(request.node.nodeid, file=ran)
    CUDA.synchronize()
    if request.node.nodeid in os.environ["LOST"]:
        if "KILLED" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        CUDA.lost = True
        if "LOUD" in os.environ:
            CUDA.synchronize()
"""


def run(
    folder: Path, names: str, lost: tuple[str, ...], *flags: str, status: int = 1, **env: str
) -> tuple[str, list[str]]:
    """What pytest prints of files with these names, and which tests ran."""
    for name in names:
        (folder / f"test_{name}.py").write_text(TESTS)
    env |= {"RAN": str(folder / "ran"), "LOST": " ".join(lost), "COLUMNS": "200"}
    own = ("-p", "tests.conftest", "-c", os.devnull, "--rootdir", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", *own, *flags, str(folder)],
        cwd=ROOT,
        env=os.environ | env,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, (folder / "ran").read_text().split()


@pytest.mark.parametrize("loud", [{"LOUD": "1"}, {}], ids=["it notices", "it does not"])
def test_what_comes_after_it_in_its_process_is_not_run(loud: dict[str, str], tmp_path: Path) -> None:
    lost = "test_a.py::test_one[2]"
    printed, ran = run(tmp_path, "a", (lost,), "-p", "no:xdist", **loud)
    assert ran == [f"test_a.py::test_one[{number}]" for number in range(3)]
    assert f"{lost} lost the GPU, 3 tests were not run: CUDA error: device-side assert triggered !" in printed
    assert len(re.findall(r"^FAILED .*\[2\] - RuntimeError: CUDA error", printed, re.MULTILINE)) == len(loud)
    assert len(re.findall(r"^ERROR .*\[2\] - the GPU is lost to this process", printed, re.MULTILINE)) == 1


@pytest.mark.parametrize(("names", "losing"), [("ab", "a"), ("abcd", "ab")])
def test_a_process_takes_the_place_of_one_that_lost_it(names: str, losing: str, tmp_path: Path) -> None:
    """One, and two at the same time, each with one test left to run of a file; none is run twice."""
    lost = tuple(f"test_{name}.py::test_one[4]" for name in losing)
    printed, ran = run(tmp_path, names, lost, "--numprocesses", str(len(losing)), LOUD="1")
    assert Counter(ran) == {f"test_{name}.py::test_one[{number}]": 1 for name in names for number in range(6)}
    told = re.findall(r"^(?:FAILED|ERROR) \S*/(test_\w\.py::\S+\]) - ", printed, re.MULTILINE)
    assert set(told) == set(lost)
    said = "the GPU is lost to this process, in which nothing more is run: CUDA error"
    assert len(re.findall(f"^ERROR .*{said}", printed, re.MULTILINE)) == len(lost)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_process_that_is_killed_costs_one_test(processes: str, tmp_path: Path) -> None:
    """In the first of a file, which is told and not run again, and in the last of another."""
    lost = {"test_a.py::test_one[0]", "test_b.py::test_one[5]"}
    printed, ran = run(tmp_path, "ab", tuple(lost), "--numprocesses", processes, KILLED="1")
    assert Counter(ran) == {f"test_{name}.py::test_one[{number}]": 1 for name in "ab" for number in range(6)}
    told = re.findall(r"^FAILED \S*/(test_\w\.py::\S+\]) - ?", printed, re.MULTILINE)
    assert sorted(told) == sorted(lost)


def test_a_process_that_finds_other_tests_ends_the_run(tmp_path: Path) -> None:
    """As where files are changed meanwhile."""
    flags = ("--numprocesses", "1")
    printed, _ = run(tmp_path, "a", ("test_a.py::test_one[2]",), *flags, status=3, KILLED="1", GROWS="1")
    assert "tests were changed while they ran" in printed
