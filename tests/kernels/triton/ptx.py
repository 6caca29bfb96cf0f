"""The few instructions of PTX that `decode_asm.py` expands words with, computed on numbers of Python."""

import re
from collections.abc import Callable, Mapping

import torch

_WORD = 0xFFFFFFFF
_AND_OR = 0xEA


def run(text: str, inputs: Mapping[str, int]) -> dict[str, int]:
    """All registers and operands after the statements of an inline assembly, by their names."""
    values = dict(inputs)
    for statement in text.strip("{}\n").split(";"):
        name, _, rest = statement.strip().partition(" ")
        operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if not name or name == ".reg":
            continue
        if name == "mov.b32" and operands[0].startswith("{"):
            low, high = _halves(operands[0])
            word = _value(values, operands[1])
            values[low], values[high] = word & 0xFFFF, word >> 16
        else:
            values[operands[0]] = _OPERATIONS[name](*(_value(values, one) for one in operands[1:]))
    return values


def bf16(half: int) -> float:
    return float(torch.tensor(half, dtype=torch.int32).to(torch.int16).view(torch.bfloat16))


def _halves(pair: str) -> list[str]:
    return [one.strip() for one in pair.strip("{}").split(",")]


def _value(values: Mapping[str, int], operand: str) -> int:
    if operand.startswith("{"):
        low, high = (_value(values, one) for one in _halves(operand))
        return low | high << 16
    return values[operand] if operand in values else int(operand, 0)


def _permuted(low: int, high: int, selector: int) -> int:
    assert not selector & 0x8888, "signs are not spread here"
    both = low | high << 32
    return sum((both >> 8 * (selector >> 4 * byte & 7) & 255) << 8 * byte for byte in range(4))


def _and_or(a: int, b: int, c: int, table: int) -> int:
    assert table == _AND_OR
    return a & b | c


def _fused(a: int, b: int, c: int) -> int:
    word = 0
    for shift in (0, 16):
        x, y, z = (bf16(one >> shift & 0xFFFF) for one in (a, b, c))
        bits = torch.tensor(x * y + z, dtype=torch.float64).bfloat16().view(torch.int16)
        word |= (int(bits) & 0xFFFF) << shift
    return word


_OPERATIONS: Mapping[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": _permuted,
    "mad.lo.u32": lambda a, b, c: a * b + c & _WORD,
    "mul.lo.u32": lambda a, b: a * b & _WORD,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _and_or,
    "fma.rn.bf16x2": _fused,
}
