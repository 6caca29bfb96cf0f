"""The pictures: every panel is drawn from what a Prometheus answers, and its words are right."""

import json
import math
from collections.abc import Sequence

import httpx
import matplotlib
import pytest

from deploy.render.prometheus import Prometheus, PrometheusError, Series, Span
from deploy.render.words import filled_in, legend, number
from tests.deploy.queries import DASHBOARDS

matplotlib.use("Agg")
SPAN = Span(start=1000.0, end=1600.0, step=5.0)


class Scripted:
    """Answers each query with two series, the second with a hole in it."""

    def over(self, query: str, span: Span) -> Sequence[Series]:
        assert "$" not in query
        times = [
            span.start + span.step * place for place in range(int((span.end - span.start) / span.step) + 1)
        ]
        whole = [(time, 1.0 + place % 2) for place, time in enumerate(times)]
        # What fits in one number has one series.
        alone = query.startswith(("max(", "sum(", "histogram_quantile", "(sum("))
        holed = [point for place, point in enumerate(whole) if place % 7]
        named = [Series({"instance": "w0", "state": "READY"}, whole)]
        return named if alone else [*named, Series({"instance": "w1", "state": "FAILED"}, holed)]

    def at(self, query: str, time: float) -> Sequence[Series]:
        return [Series({"backend": "linear:a"}, [(time, 3.0)]), Series({"alertname": "B"}, [(time, 1.0)])]


class Silent:
    def over(self, query: str, span: Span) -> Sequence[Series]:
        return []

    def at(self, query: str, time: float) -> Sequence[Series]:
        return []


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
@pytest.mark.parametrize("prometheus", [Scripted(), Silent()], ids=["data", "no-data"])
def test_a_dashboard_is_drawn(file, prometheus) -> None:
    draw = pytest.importorskip("deploy.render.draw").draw
    board = json.loads(file.read_text())
    figure = draw(board, prometheus, SPAN, scrape_interval=5.0)
    figure.canvas.draw()
    texts = {text.get_text() for axes in figure.axes for text in axes.texts}
    titles = {axes.get_title("left") for axes in figure.axes}
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert {panel["title"] for panel in panels} <= titles
    empty = sum("no data" in text for axes in figure.axes for text in (t.get_text() for t in axes.texts))
    assert empty == (len(panels) if isinstance(prometheus, Silent) else 0), texts


def test_lines_do_not_cross_what_is_missing() -> None:
    from deploy.render.draw import broken

    series = Series({}, [(1000.0, 1.0), (1005.0, 2.0), (1030.0, 3.0)])
    _, values = broken(series, SPAN)
    assert [math.isnan(value) for value in values] == [False, False, True, False]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0234, "s", "23.4 ms"),
        (0.0, "s", "0"),
        (90.0, "s", "1.5 min"),
        (0.123, "percentunit", "12.3 %"),
        (2.128, "reqps", "2.13 req/s"),
        (24_000.0, "suffix: tok/s", "24 k tok/s"),
        (3_500_000.0, "bytes", "3.5 MB"),
        (12.0, "short", "12"),
        (math.nan, "s", "none"),
        (math.inf, "s", "more than the last bucket"),
    ],
)
def test_numbers_are_for_people(value: float, unit: str, text: str) -> None:
    assert number(value, unit) == text


def test_legends_and_variables() -> None:
    assert legend("{{instance}}, {{ state }}", {"instance": "w0", "state": "READY"}) == "w0, READY"
    query = filled_in('rate(x{namespace=~"$namespace", model=~"$model"}[$__rate_interval])', 20.0)
    assert query == 'rate(x{namespace=~".*", model=~".*"}[20s])'


def answering(answer: httpx.Response) -> Prometheus:
    return Prometheus("http://prometheus", httpx.MockTransport(lambda request: answer))


def test_what_prometheus_answers_is_read() -> None:
    data = {"result": [{"metric": {"a": "b"}, "values": [[1.0, "2.5"], [6.0, "NaN"]]}]}
    [series] = answering(httpx.Response(200, json={"status": "success", "data": data})).over("x", SPAN)
    assert series.labels == {"a": "b"}
    assert series.points[0] == (1.0, 2.5)
    assert math.isnan(series.points[1][1])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(400, json={"status": "error", "error": "bad query"}), "bad query, in x"),
        (httpx.Response(502, text="<html>"), "does not answer as a Prometheus"),
    ],
)
def test_what_goes_wrong_is_said(answer: httpx.Response, said: str) -> None:
    with pytest.raises(PrometheusError, match=said):
        answering(answer).over("x", SPAN)
