"""What a sweep measures, as data and as JSON. Times in seconds, rates in one per second."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from moebius_cli.errors import CliError

LengthControl = Literal["ignore_eos", "min_tokens", "none"]
TokenSource = Literal["usage", "chunks", "mixed"]


@dataclass(frozen=True)
class Load:
    """A level: so many streams at the same time, or so many requests a second, come what may."""

    kind: Literal["concurrency", "rate"]
    value: float

    def __str__(self) -> str:
        return f"{self.value:g}" if self.kind == "concurrency" else f"{self.value:g}/s"


@dataclass(frozen=True)
class Spread:
    """pN: N percent of the values are at least so good: as low, of times; as high, of rates."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class ErrorCount:
    kind: str
    count: int
    # What was said the first time.
    example: str


@dataclass(frozen=True)
class Level:
    load: Load
    # Over which rates are taken: to the end of the duration, or of the last request.
    seconds: float
    # Requests that were answered whole. Only these are in the figures below.
    completed: int
    errors: tuple[ErrorCount, ...]
    # The most requests that were open at the same time.
    peak_in_flight: int
    # Means over requests; None where the endpoint does not tell.
    input_tokens: float | None
    output_tokens: float | None
    # Answers that ended before the length that was set.
    short_outputs: int
    token_source: TokenSource | None
    # From sending a request to the first piece with text.
    ttft: Spread | None
    # Between two pieces with text.
    itl: Spread | None
    # From sending a request to its last byte.
    e2e: Spread | None
    # Tokens a second of a stream, from its first piece on.
    stream_rate: Spread | None
    # Tokens a second of all streams together, and requests completed.
    output_rate: float
    request_rate: float
    # Of a core, by the load generator, in its busiest second. Near 1 it measures itself.
    client_cpu: float

    @property
    def failed(self) -> int:
        return sum(error.count for error in self.errors)


@dataclass(frozen=True)
class Settings:
    input_tokens: int
    output_tokens: int
    # Of the input tokens, those that all prompts begin with.
    shared_prefix: int
    # How long a level is: one of them.
    requests: int | None
    duration: float | None


@dataclass(frozen=True)
class Result:
    version: Literal[1]
    # ISO 8601, UTC.
    created: str
    url: str
    model: str
    settings: Settings
    length_control: LengthControl
    # Whether the lengths of prompts were fitted to the endpoint's tokenizer.
    input_fitted: bool
    levels: tuple[Level, ...]


RESULT = TypeAdapter(Result)


def write_result(path: Path, result: Result) -> None:
    """Raises CliError."""
    try:
        path.write_bytes(RESULT.dump_json(result, indent=1) + b"\n")
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from error


def read_result(path: Path) -> Result:
    """Raises CliError."""
    try:
        return RESULT.validate_json(path.read_bytes())
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise CliError(
            f"{path} is no result of moebius bench serve --out: {where}: {first['msg']}"
        ) from error
