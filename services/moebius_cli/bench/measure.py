"""The statistics of a level: pure functions over when things arrived."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from moebius_cli.bench.result import ErrorCount, Level, Load, Spread, TokenSource
from moebius_cli.bench.stream import RequestError, Stream


def measure(
    load: Load, streams: Sequence[Stream], output_tokens: int, window: tuple[float, float], client_cpu: float
) -> Level:
    """What a level gave.

    `output_tokens`: asked for. `window`: from when to when, on the streams' clock, rates and gaps are taken.
    After it the last streams have the endpoint more and more to themselves, which is not this load any more.
    Streams that failed are counted as errors and have no part in the figures.
    """
    begin, end = window
    whole = [stream for stream in streams if stream.error is None]
    tokens = [tokens_of(stream) for stream in whole]
    gaps = [
        later - earlier
        for stream in whole
        for earlier, later in pairwise(stream.arrivals[: bisect_right(stream.arrivals, end)])
    ]
    delivered = sum(
        count * bisect_right(stream.arrivals, end) / len(stream.arrivals)
        for stream, count in zip(whole, tokens, strict=True)
    )
    inputs = [stream.input_tokens for stream in whole if stream.input_tokens is not None]
    return Level(
        load=load,
        seconds=end - begin,
        completed=len(whole),
        errors=error_counts([stream.error for stream in streams if stream.error is not None]),
        peak_in_flight=peak_in_flight(streams),
        input_tokens=_mean(inputs),
        output_tokens=_mean(tokens),
        short_outputs=sum(count < output_tokens for count in tokens),
        token_source=token_source(whole),
        ttft=spread([stream.arrivals[0] - stream.begun for stream in whole]),
        itl=spread(gaps),
        e2e=spread([stream.ended - stream.begun for stream in whole]),
        stream_rate=spread(
            [rate for stream in whole if (rate := stream_rate(stream)) is not None], higher_is_better=True
        ),
        output_rate=delivered / (end - begin),
        request_rate=sum(stream.ended <= end for stream in whole) / (end - begin),
        client_cpu=client_cpu,
    )


def tokens_of(stream: Stream) -> int:
    """As the endpoint counts; where it does not tell, the pieces with text."""
    return len(stream.arrivals) if stream.output_tokens is None else stream.output_tokens


def token_source(streams: Sequence[Stream]) -> TokenSource | None:
    sources = {stream.output_tokens is None for stream in streams}
    if not sources:
        return None
    if len(sources) == 2:
        return "mixed"
    return "chunks" if sources.pop() else "usage"


def stream_rate(stream: Stream) -> float | None:
    """Tokens a second after the first piece; None where there is nothing after it.

    The first piece is taken as one token, since what it holds is not told.
    """
    seconds = stream.arrivals[-1] - stream.arrivals[0]
    return (tokens_of(stream) - 1) / seconds if seconds > 0 else None


def peak_in_flight(streams: Sequence[Stream]) -> int:
    """The most streams that were open at the same time; one that begins as another ends follows it."""
    changes = sorted([(stream.begun, 1) for stream in streams] + [(stream.ended, -1) for stream in streams])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def error_counts(errors: Sequence[RequestError]) -> tuple[ErrorCount, ...]:
    """By kind, the most frequent first, each with what was said the first time."""
    examples = {error.kind: str(error) for error in reversed(errors)}
    counts = Counter(error.kind for error in errors)
    return tuple(ErrorCount(kind, count, examples[kind]) for kind, count in counts.most_common())


def spread(values: Sequence[float], *, higher_is_better: bool = False) -> Spread | None:
    """None of nothing. See `Spread` for what pN means."""
    if not values:
        return None
    ordered = sorted(values, reverse=higher_is_better)
    p50, p95, p99 = (quantile(ordered, share) for share in (0.5, 0.95, 0.99))
    return Spread(sum(values) / len(values), p50, p95, p99)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two values next to place `share` * (n - 1), in proportion."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
