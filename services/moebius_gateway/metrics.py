"""Prometheus metrics of the HTTP side."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moebius_common.build_info import tell_build
from moebius_gateway.plain_metrics import PlainBuckets, PlainCount, PlainCounter, PlainHistogram
from moebius_gateway.types import Reason

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
INTER_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
# What exists from the start, at zero: a rate over the first error is no rate otherwise.
GENERATION_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
CODES = ("200", "400", "429", "500", "503")
STREAM_ERRORS = ("internal_error", *(reason.value.lower() for reason in Reason))


class GatewayMetrics:
    """One for each gateway. The labels take values from routes and served models only, never from clients."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tell_build("gateway", registry)

        def name(suffix: str) -> str:
            return f"moebius_gateway_{suffix}"

        self.requests = Counter(
            name("requests_total"),
            "HTTP requests answered",
            ["route", "code", "stream"],
            registry=registry,
        )
        self._in_flight = Gauge(
            name("requests_in_flight"),
            "HTTP requests being answered, but for probes and scrapes",
            registry=registry,
        )
        self._generations = Gauge(
            name("generations_in_flight"),
            "Sequences being generated for clients",
            ["model"],
            registry=registry,
        )
        self.disconnects = Counter(
            name("client_disconnects_total"),
            "Clients that left before their answer was complete",
            registry=registry,
        )
        self.stream_errors = Counter(
            name("stream_errors_total"), "Streams that ended with an error event", ["code"], registry=registry
        )
        self.prompt_tokens = Counter(
            name("prompt_tokens_total"), "Prompt tokens of answered requests", ["model"], registry=registry
        )
        self.cached_tokens = Counter(
            name("prompt_tokens_cached_total"),
            "Prompt tokens found in a prefix cache",
            ["model"],
            registry=registry,
        )
        self._generated_tokens = PlainCounter(name("generated_tokens_total"), "Tokens generated", registry)
        self._first_token = PlainHistogram(
            name("time_to_first_token_seconds"),
            "From the request's arrival to a sequence's first token",
            FIRST_TOKEN_SECONDS,
            registry,
        )
        self._inter_token = PlainHistogram(
            name("inter_token_latency_seconds"),
            "Between deliveries of tokens of one sequence",
            INTER_TOKEN_SECONDS,
            registry,
        )
        self._request = Histogram(
            name("request_seconds"),
            "From the request's arrival to the end of its answer, for requests that generate",
            ["model", "stream"],
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        for code in STREAM_ERRORS:
            self.stream_errors.labels(code)
        for stream in ("true", "false"):
            for route in GENERATION_ROUTES:
                for code in CODES:
                    self.requests.labels(route, code, stream)

    def serves(self, model: str) -> None:
        """Makes the model's series exist."""
        for metric in (self._generations, self.prompt_tokens, self.cached_tokens):
            metric.labels(model)
        for plain in (self._generated_tokens, self._first_token, self._inter_token):
            plain.of(model)
        for stream in ("true", "false"):
            self._request.labels(model, stream)

    @contextmanager
    def request_in_flight(self) -> Iterator[None]:
        with self._in_flight.track_inprogress():
            yield

    @contextmanager
    def generation(self, model: str, arrived: float) -> Iterator["TokenClock"]:
        """Spans a sequence's generation; `arrived` is on the clock of time.perf_counter()."""
        clock = TokenClock(
            self._first_token.of(model),
            self._inter_token.of(model),
            self._generated_tokens.of(model),
            arrived,
        )
        with self._generations.labels(model).track_inprogress():
            yield clock

    def answered(self, model: str, stream: bool, seconds: float) -> None:
        self._request.labels(model, str(stream).lower()).observe(seconds)


class TokenClock:
    """Times the deliveries of one sequence."""

    def __init__(
        self, first: PlainBuckets, between: PlainBuckets, tokens: PlainCount, arrived: float
    ) -> None:
        self._histogram = first
        self._between = between
        self._tokens = tokens
        self._last = arrived

    def tokens(self, count: int) -> None:
        now = time.perf_counter()
        self._histogram.observe(now - self._last)
        self._histogram, self._last = self._between, now
        self._tokens.value += count
