"""Asks a Prometheus over its HTTP API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: Unix times and values."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """Of time, in Unix seconds; `step` seconds lie between two points."""

    start: float
    end: float
    step: float


class Source(Protocol):
    """What pictures are drawn from."""

    def over(self, query: str, span: Span) -> Sequence[Series]: ...

    def at(self, query: str, time: float) -> Sequence[Series]: ...


class PrometheusError(Exception):
    """The Prometheus does not answer, or not with data."""


class Prometheus:
    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        """`url`: such as http://127.0.0.1:9090."""
        self._client = httpx.Client(base_url=url, timeout=30, transport=transport)

    def over(self, query: str, span: Span) -> list[Series]:
        """Raises PrometheusError."""
        answer = self._ask("query_range", query=query, start=span.start, end=span.end, step=span.step)
        return [Series(one["metric"], _points(one["values"])) for one in answer["result"]]

    def at(self, query: str, time: float) -> list[Series]:
        """One point each. Raises PrometheusError."""
        answer = self._ask("query", query=query, time=time)
        return [Series(one["metric"], _points([one["value"]])) for one in answer["result"]]

    def _ask(self, endpoint: str, **parameters: str | float) -> dict:
        try:
            answer = self._client.get(f"/api/v1/{endpoint}", params=parameters).json()
        except (httpx.HTTPError, ValueError) as error:
            raise PrometheusError(
                f"{self._client.base_url} does not answer as a Prometheus: {error}"
            ) from error
        if answer["status"] != "success":
            raise PrometheusError(f"{answer['error']}, in {parameters['query']}")
        data: dict = answer["data"]
        return data


def _points(values: Sequence[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(time, float(value)) for time, value in values]
