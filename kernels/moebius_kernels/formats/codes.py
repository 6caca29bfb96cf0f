"""Number codes that several forms share, decoded to fp32 exactly.

E2M1 and E8M0: OCP Microscaling Formats (MX) specification 1.0, sections 5.3.3 and 5.4.1.
"""

import torch


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 of the codes 0 to 15: a sign, two bits of exponent and one of mantissa."""
    # fp32's exponent is biased by 126 more. A table would be copied from the host, which no CUDA graph does.
    codes = codes.int()
    size = ((codes & 7) + (126 << 1) << 22).view(torch.float32)
    return torch.where(codes & 6 == 0, 2 * size - 1, size) * (1 - (codes >> 2 & 2))


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(code - 127) of the uint8 codes; NaN for 255."""
    # fp32 has the same exponent in the same place, but its 0 and 255 mean something else.
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 1 << 22, bits)  # 2^-127, a denormal number
    bits = torch.where(codes == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2 n] of the bytes [..., n]: the low nibble is the even element."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_nibbles`, for an even number of elements."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def spread(scale: torch.Tensor, block: int, count: int, dim: int = -1) -> torch.Tensor:
    """A scale for each of `count` elements along `dim`, of one a block; the last block may be ragged."""
    return scale.repeat_interleave(block, dim).narrow(dim, 0, count)
