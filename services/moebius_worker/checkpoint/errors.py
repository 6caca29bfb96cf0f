"""The one error of everything that reads checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(Exception):
    """A checkpoint cannot be found, read or used. The message names the file and says what to do."""


@contextmanager
def understanding(what: str) -> Iterator[None]:
    """While values are read that may be of any kind: one that no check names still ends as CheckpointError.

    `what` is being read, for people, such as "The config".
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{what} cannot be understood: a value is of a kind that does not belong there "
            f"({type(error).__name__}: {error})."
        ) from error
