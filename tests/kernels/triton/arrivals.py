"""Whether groups of warps hand shared memory over in order, by the PTX that the compiler made of a kernel.

One thread arrives on an mbarrier for its group. That orders what it did itself, and what the others did
before a barrier at which all of them waited (PTX ISA, memory consistency model: causality is transitive). So
each arrival has to come right after its group's barrier, when no more products read on than may.
"""

import re
from collections.abc import Callable, Sequence

# Touches no memory, waits for nobody, and goes on with the next.
_PLAIN = re.compile(
    r"(@!?%p\d+ )?(abs|add|and|bfe|bfi|copysign|cvt|cvta|div|elect|ex2|fence|fma|lop3|mad|max|min|mov|mul|neg"
    r"|not|or|prmt|rcp|rem|selp|setmaxnreg|setp|shf|shfl|shl|shr|sub|wgmma\.commit_group|wgmma\.fence|xor)\b"
)
_LABEL, _TARGET = re.compile(r"(\$L__BB\d+_\d+):"), re.compile(r"\$L__BB\d+_\d+(?!\d|:)")
# Groups that give something back have four warps, and barriers of their own.
_GROUP = ", 128"
# Those that all warps of the program wait at: Triton's own.
_ALL = "barrier.sync 1"
_MOST = 5
# What `states` has to tell. The first group writes before the first barrier of all and behind the third, the
# others read behind the first and, the next time, behind the fourth: or later, by ways that nobody takes.
IN_ORDER = [{0}, {3}], [{1, 4, _MOST}]


def order(ptx: str) -> list[str]:
    """Labels, jumps, what touches memory and what waits, in the order of the text; the steps of a product in
    one. A wait's loop is one instruction."""
    found: list[str] = []
    for text in ptx.splitlines():
        for statement in text.partition("//")[0].split(";"):
            line = " ".join(statement.split()).lstrip("{} ")
            if not line or line.startswith((".", "(", ")")) or "waitLoop" in line or _PLAIN.match(line):
                continue
            if line.startswith("$L") and not (_LABEL.match(line) or _TARGET.match(line)):
                continue
            if not ("wgmma.mma" in line and found and "wgmma.mma" in found[-1]):
                found.append(line)
    return found


def faults(order: Sequence[str], under_way: int) -> list[str]:
    """What is wrong with it, a text each. `under_way`: products that may read on when a group arrives."""
    found, reading = [], _reached(order, _products)
    barriers: list[set[str]] = [set()]
    arrivals: dict[int, str] = {}
    for line in order:
        if line == _ALL:
            barriers.append(set())
        elif line.startswith("bar.sync"):
            barriers[-1].add(line)
    stretch = 0
    for at, line in enumerate(order):
        stretch += line == _ALL
        if re.match(r"@.*mbarrier\.(try_wait|arrive\.noinc)", line):
            found.append(f"{at}: {line} by some threads alone")
        if re.search(r"mbarrier\.arrive\.shared", line):
            arrivals[stretch] = order[at - 1]
            if barriers[stretch] != {order[at - 1]}:
                found.append(f"{at}: {line} after {order[at - 1]}, not {barriers[stretch]}")
            if max(reading[at]) > under_way:
                found.append(f"{at}: {line} with {max(reading[at])} products under way")
    own = {line for line in arrivals.values() if line.endswith(_GROUP)}
    if not arrivals or len(own) < len(arrivals):
        found.append(f"groups and their barriers: {arrivals}")
    return found


def states(order: Sequence[str]) -> tuple[list[set[int]], list[set[int]]]:
    """At how many of the barriers of all warps a warp has been, by every way through the program, when it
    writes what the other groups are to do, and when they read it."""
    passed = _reached(order, lambda line, count: min(count + (line == _ALL), _MOST))
    writes = [at for at, line in enumerate(order) if re.match(r"st\.shared\.\S+ \[global_smem\+", line)]
    # A byte a warp: those of the first group, four, have none.
    [place] = {int(re.findall(r"global_smem\+(\d+)", order[at])[0]) for at in writes}
    reads = [at for at, line in enumerate(order) if re.match(rf"ld\.shared\.b8 .*\+{place - 4}\]", line)]
    return [passed[at] for at in writes], [passed[at] for at in reads]


def _products(line: str, count: int) -> int:
    if "wgmma.mma" in line:
        return min(count + 1, _MOST)
    return min(count, int(line.split()[-1])) if line.startswith("wgmma.wait_group") else count


def _reached(order: Sequence[str], step: Callable[[str, int], int]) -> list[set[int]]:
    """The counts that one may come to each place with, by every way from the first, where it is 0."""
    labels = {match[1]: at for at, line in enumerate(order) if (match := _LABEL.match(line))}
    found: list[set[int]] = [set() for _ in order]
    ways = [(0, 0)]
    while ways:
        at, count = ways.pop()
        while at < len(order) and count not in found[at]:
            found[at].add(count)
            line = order[at]
            count = step(line, count)
            ways += [(labels[target], count) for target in _TARGET.findall(line)]
            if line.startswith(("bra", "brx", "ret")):
                break
            at += 1
    return found
