"""Results for tests, with figures that differ in everything that matters."""

from moebius_cli.bench.result import ErrorCount, Level, Load, Result, Settings, Spread


def level(value: float = 8, kind: str = "concurrency", **changes: object) -> Level:
    fields: dict[str, object] = {
        "load": Load(kind, value),  # type: ignore[arg-type]
        "seconds": 30.0,
        "completed": 40,
        "errors": (),
        "peak_in_flight": int(value),
        "input_tokens": 128.25,
        "output_tokens": 256.0,
        "short_outputs": 0,
        "token_source": "usage",
        "ttft": Spread(0.11, 0.1, 0.2, 0.3),
        "itl": Spread(0.011, 0.01, 0.02, 0.03),
        "e2e": Spread(2.7, 2.66, 2.9, 3.1),
        "stream_rate": Spread(96.0, 95.0, 90.0, 80.0),
        "output_rate": 700.5,
        "request_rate": 1.25,
        "client_cpu": 0.2,
    }
    return Level(**(fields | changes))  # type: ignore[arg-type]


def result(*levels: Level, **changes: object) -> Result:
    fields: dict[str, object] = {
        "version": 1,
        "created": "2026-01-02T03:04:05+00:00",
        "url": "http://127.0.0.1:8000/v1",
        "model": "clerk",
        "settings": Settings(128, 256, 0, None, 30.0),
        "length_control": "ignore_eos",
        "input_fitted": True,
        "levels": levels,
    }
    return Result(**(fields | changes))  # type: ignore[arg-type]


FAILED = (ErrorCount("HTTP 429 (overloaded)", 3, "the request would wait too long"),)
