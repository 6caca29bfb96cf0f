"""Host arithmetic of launches, against Triton's own."""

import triton

from moebius_kernels.triton.targets import ceil_div, power_of_two


def test_blocks_and_powers_are_those_of_triton() -> None:
    for number in (*range(1, 300), 65_535, 65_536, 65_537, 2**31):
        assert power_of_two(number) == triton.next_power_of_2(number)
        for size in (1, 2, 3, 16, 128, 512):
            assert ceil_div(number, size) == triton.cdiv(number, size)
    assert ceil_div(0, 16) == 0
