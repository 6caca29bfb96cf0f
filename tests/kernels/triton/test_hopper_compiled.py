"""What the compiler makes of the products that divide their labour, for sm_90, without a GPU."""

import pytest

from tests.without_interpreter import told

pytest.importorskip("triton")

# Rows come in the experts' order.
IN_ORDER = ("up fp8_block", "down fp8_block")
OTHERS = ("up bf16", "down bf16", "up nvfp4_words", "down mxfp4_words")
NAMES = (*OTHERS, *IN_ORDER)
# What a block may have of H100 and H200, CUDA programming guide, compute capability 9.0.
_SHARED = 227 * 1024


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return told("tests.kernels.triton.compiled_hopper", *NAMES, cache=tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_stay_in_registers(found, name):
    """A group of warps has 128 sums a thread, and beside them what it multiplies."""
    assert found[name]["stack"] == 0
    assert found[name]["shared"] <= _SHARED


@pytest.mark.parametrize("name", NAMES)
def test_products_run_while_the_program_goes_on(found, name):
    """Where the assembler cannot be sure of registers, it waits for each product by itself."""
    one = found[name]
    assert one["instructions"] == one["products"] > 0
    assert one["waited"] == one["waits"]


@pytest.mark.parametrize("name", OTHERS)
def test_tiles_are_fetched_by_the_copy_engine_and_tokens_gathered(found, name):
    assert found[name]["tiles"] >= 2
    assert (found[name]["gathers"] > 0) is name.startswith("up")
