"""Number codes decoded in plain numpy, by their definitions: what the forms are compared with."""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """fp32 of E4M3 codes: 1 bit sign, 4 exponent (bias 7), 3 mantissa; no infinity, NaN where all are set."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) / 8 * 2.0 ** (exponent - 7))
    magnitude = np.where(codes & 127 == 127, np.nan, magnitude)
    return np.where(codes >> 7, -magnitude, magnitude).astype(np.float32)


def e8m0(codes: np.ndarray) -> np.ndarray:
    """fp64 2^(code - 127); NaN for 255."""
    return np.where(codes == 255, np.nan, 2.0 ** (codes.astype(np.float64) - 127))


def nibbles(packed: np.ndarray) -> np.ndarray:
    """The codes of the bytes, the low nibble first."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed % 16, packed // 16
    return codes
