"""A kernel that has been compiled is found again by the next process."""

import pytest

from tests.without_interpreter import told

pytest.importorskip("triton")


def test_no_kernel_knows_two_constants_by_one_name(tmp_path):
    """The next process would compile it again, or not, as chance has it: seconds of a start."""
    found = told("tests.kernels.triton.cache_keys", cache=tmp_path)
    assert found["functions"] > 100
    assert found["conflicts"] == {}
