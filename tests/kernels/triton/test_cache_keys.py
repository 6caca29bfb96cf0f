"""A kernel that has been compiled is found again by the next process."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_no_kernel_knows_two_constants_by_one_name():
    """The next process would compile it again, or not, as chance has it: seconds of a start."""
    settings = {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.kernels.triton.cache_keys"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["functions"] > 100
    assert found["conflicts"] == {}
