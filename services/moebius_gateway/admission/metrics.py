"""What the gate counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moebius_gateway.admission.limits import Priority

WAIT_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
# Why sequences are refused: `full`, `displaced` by a client with fewer, `forecast`, `deadline`; requests:
# `requests`, `tokens` (the client's rates).
REFUSALS = ("full", "displaced", "forecast", "deadline", "requests", "tokens")


class AdmissionMetrics:
    """Labels take values from served models, priorities and the names of API keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def name(suffix: str) -> str:
            return f"moebius_gateway_admission_{suffix}"

        self.waiting = Gauge(
            name("waiting"), "Sequences that wait for their turn", ["model", "priority"], registry=registry
        )
        self.running = Gauge(name("running"), "Sequences that had their turn", ["model"], registry=registry)
        self.reserved = Gauge(
            name("reserved_tokens"),
            "KV cache tokens that they are expected to take",
            ["model"],
            registry=registry,
        )
        self.room = Gauge(
            name("room_tokens"),
            "KV cache tokens that they may take in all; 0 if a worker does not say",
            ["model"],
            registry=registry,
        )
        self.wait = Histogram(
            name("wait_seconds"),
            "From a sequence's arrival to its turn",
            ["priority"],
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.refusals = Counter(
            name("refusals"),
            f"Refused with 429 or 503 by reason: {', '.join(REFUSALS)}",
            ["reason"],
            registry=registry,
        )
        self.client_requests = Counter(
            "moebius_gateway_client_requests", "Requests by API key", ["client"], registry=registry
        )
        self.client_tokens = Counter(
            "moebius_gateway_client_tokens",
            "Tokens by API key: prompt, generated",
            ["client", "kind"],
            registry=registry,
        )
        for reason in REFUSALS:
            self.refusals.labels(reason)

    def has_line(self, model: str) -> None:
        """Its series are there from now on."""
        for priority in Priority:
            self.waiting.labels(model, label(priority))


def label(priority: int) -> str:
    return Priority(priority).name.lower()
