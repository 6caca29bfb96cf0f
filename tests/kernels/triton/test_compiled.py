"""What the compiler makes of the experts' product for sm_90, without a GPU."""

import pytest

pytest.importorskip("triton")
from moebius_kernels.formats.words import CODED, SCALED
from moebius_kernels.triton import decode_asm
from tests.without_interpreter import told

# One of each way to expand codes.
NAMES = (
    "bf16",
    "nvfp4_words",
    "mxfp4_words",
    "int4_words",
    "int4_zero",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_xs",
    "fp8_block",
)
# A warp's 16 rows by 128 columns, 16 at a time.
STEP = 8


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return told("tests.kernels.triton.compiled", *NAMES, cache=tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def products(found):
    return found["products"]


@pytest.mark.parametrize("name", NAMES)
def test_eight_tokens_fill_the_tensor_cores_and_codes_stay_in_registers(products, name):
    assert products[name]["mma"] == STEP
    # Expanded numbers that go through shared memory would halve the speed.
    assert products[name]["copies"] == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bf16"])
def test_expanded_numbers_stay_until_products_have_read_them(products, name):
    """The loop's next step writes the registers that they are in."""
    assert products[name]["products"] > 0
    assert products[name]["under_way"] == 0


@pytest.mark.parametrize("name", ["nvfp4_words", "mxfp4_words", "int4_words", "q4_k"])
def test_words_are_in_the_registers_that_products_of_four_warps_read(products, name):
    assert products[name]["copies_of_products"] == 0


@pytest.mark.parametrize(
    "text",
    [
        decode_asm.int_codes(4, 1, True),
        decode_asm.e4m3_codes(),
        decode_asm.word_factors("e4m3", 2),
        decode_asm.int_words(True),
        decode_asm.halves(),
        # Lengths of rows, of codes and of factors.
        f"({CODED}, {{",
        f"({SCALED}, {{",
    ],
)
def test_other_instructions_make_other_kernels(found, text):
    """Else a cache would go on with those that were compiled from older ones."""
    assert repr(text)[1:-1] in found["constants"].replace("\\\\", "\\")
