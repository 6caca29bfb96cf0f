"""The grammars of the requests in an engine: what the loop asks before, during and after a step."""

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor

from moebius_worker.engine.grammar.compiler import GrammarCompiler
from moebius_worker.engine.grammar.matcher import GrammarError, GrammarMatcher, MaskRow, bar
from moebius_worker.engine.types import Rejected, Request


class Masks(NamedTuple):
    """By handle: what may come next, or why nothing can. Rows are good until the next step begins."""

    rows: Mapping[int, MaskRow]
    faults: Mapping[int, str]


# Without a grammar.
NO_MASKS = Masks({}, {})


class Grammars:
    """For the loop's thread. A matcher moves on by tokens that were accepted, and by nothing else.

    Nothing is ever rolled back: a step that raises has moved no matcher, and a request that is preempted
    keeps its outputs, and so its matcher.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, GrammarMatcher] = {}
        # Masks are computed while the device computes the step.
        self._thread = ThreadPoolExecutor(1, "masks")
        self._masks: Future[Masks] | None = None

    @cached_property
    def _executor(self) -> LLExecutor:
        """Several masks at a time; its threads are there once there is a grammar."""
        return LLExecutor()

    # ---- before the scheduler -----------------------------------------------------------------------

    @property
    def compiling(self) -> int:
        return len(self._compiler)

    def compile(self, request: Request) -> None:
        self._compiler.compile(request)

    def compiled(self) -> list[tuple[Request, Rejected | None]]:
        """Requests that can be scheduled now, or never."""
        found: list[tuple[Request, Rejected | None]] = []
        for request, matcher in ((one.request, one.matcher) for one in self._compiler.done()):
            if isinstance(matcher, GrammarError):
                found.append((request, Rejected("BAD_REQUEST", str(matcher))))
            else:
                self._matchers[request.handle] = matcher
                found.append((request, None))
        return found

    # ---- in a step ----------------------------------------------------------------------------------

    def begin(self, barred: Mapping[int, Collection[int]]) -> None:
        """Starts to compute the masks of handles; `barred`: tokens that must not come now, if others may."""
        wanted = [(self._matchers[handle], handle, ids) for handle, ids in barred.items()]
        self._masks = self._thread.submit(self._compute, wanted) if wanted else None

    def masks(self) -> Masks:
        """Those of the last `begin`. Waits for them."""
        return NO_MASKS if self._masks is None else self._masks.result()

    def accept(self, handle: int, token_id: int) -> bool:
        """Whether the answer is complete with this token; False without a grammar."""
        matcher = self._matchers.get(handle)
        return matcher is not None and matcher.accept(token_id)

    # ---- ends ---------------------------------------------------------------------------------------

    def __contains__(self, handle: int) -> bool:
        return handle in self._matchers

    def forget(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self._compiler.cancel(handle)
            self._matchers.pop(handle, None)

    # ---- in the thread ------------------------------------------------------------------------------

    def _compute(self, wanted: list[tuple[GrammarMatcher, int, Collection[int]]]) -> Masks:
        words = -(-self._compiler.vocab_size // 32)
        table = np.zeros((len(wanted), words), dtype=np.int32)
        if len(wanted) == 1:
            wanted[0][0].raw.unsafe_compute_mask_ptr(table.ctypes.data, table.nbytes)
        else:
            pairs = [(matcher.raw, index) for index, (matcher, _, _) in enumerate(wanted)]
            self._executor.unsafe_compute_mask_ptr(pairs, table.ctypes.data, 4 * words, len(wanted))
        rows: dict[int, MaskRow] = {}
        faults: dict[int, str] = {}
        for row, (matcher, handle, ids) in zip(table, wanted, strict=True):
            if (fault := matcher.fault) is not None:
                faults[handle] = fault
                continue
            if ids:
                bar(row, ids)
            rows[handle] = row
        return Masks(rows, faults)
