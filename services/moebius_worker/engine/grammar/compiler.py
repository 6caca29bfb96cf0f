"""Compiles the grammars of requests in threads of its own, so that no step waits for one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLTokenizer

from moebius_worker.engine.grammar.matcher import GrammarError, GrammarMatcher
from moebius_worker.engine.types import Request

# One that takes a second does not hold up the others.
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    request: Request
    # Or why there is none.
    matcher: GrammarMatcher | GrammarError


class GrammarCompiler:
    """For one thread; `wake` is called in another one when there is something done."""

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], wake: Callable[[], None]) -> None:
        """`make_tokenizer` takes a second for a large vocabulary; it begins at once, in a thread."""
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")
        self._tokenizer = self._threads.submit(make_tokenizer)
        self._wake = wake
        self._jobs: dict[int, tuple[Request, Future[GrammarMatcher]]] = {}

    def __len__(self) -> int:
        """How many are being compiled."""
        return len(self._jobs)

    @property
    def vocab_size(self) -> int:
        """The tokenizer's. Waits for it."""
        return self._tokenizer.result().vocab_size

    def compile(self, request: Request) -> None:
        assert request.grammar is not None
        answer = request.token_ids[request.prompt_len :]
        job = self._threads.submit(self._compile, request.grammar, answer)
        self._jobs[request.handle] = request, job
        job.add_done_callback(lambda _: self._wake())

    def cancel(self, handle: int) -> bool:
        """False if it is not being compiled."""
        return self._jobs.pop(handle, None) is not None

    def done(self) -> list[Compiled]:
        """Those that are done, and were not told before."""
        ended = [(handle, request, job) for handle, (request, job) in self._jobs.items() if job.done()]
        found: list[Compiled] = []
        for handle, request, job in ended:
            del self._jobs[handle]
            error = job.exception()
            if error is None:
                found.append(Compiled(request, job.result()))
            elif isinstance(error, GrammarError):
                found.append(Compiled(request, error))
            else:
                why = f"this model's tokenizer cannot be used for grammars: {error}"
                found.append(Compiled(request, GrammarError(why)))
        return found

    def _compile(self, grammar: str, answer: tuple[int, ...]) -> GrammarMatcher:
        return GrammarMatcher(self._tokenizer.result(), grammar, answer)


def grammar_tokenizer(tokenizer_json: bytes, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """What the library must know of a model: what each id spells, and which ends a text.

    Ids of the model that the tokenizer does not have spell nothing, so that no grammar allows them. Raises
    ValueError.
    """
    text = tokenizer_json.decode()
    eos = list(eos_token_ids) or None
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise
        # The tokenizer has ids that the model has not.
        return LLTokenizer(text, eos_token=eos)
