"""What the queries of dashboards and rules ask for, as a real parser of PromQL reads them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "rules").glob("*.yaml"))
# What Prometheus adds to each series, or an operator's pod monitor does.
TARGET_LABELS = frozenset({"namespace", "job", "instance", "pod", "container"})


@dataclass(frozen=True)
class Query:
    where: str
    text: str


def of_dashboards() -> Iterator[Query]:
    """With each variable at "All"."""
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Query(f"{file.stem}: {panel['title']}", _filled_in(target["expr"]))


def of_rules() -> Iterator[Query]:
    for rule in rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])


def rules() -> Iterator[dict[str, Any]]:
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from group["rules"]


def _filled_in(text: str) -> str:
    return re.sub(r"\$(namespace|job|model)\b", ".*", text.replace("$__rate_interval", "1m"))


def parsed(query: Query) -> promql_parser.Expr:
    """Raises ValueError for what is no PromQL."""
    return promql_parser.parse(query.text)


@dataclass(frozen=True)
class Selector:
    """`name` is None where a matcher of the name stands for it."""

    name: str | None
    # By label: the operator (=, !=, =~, !~) and the value.
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expr: promql_parser.Expr) -> list[Selector]:
    return [
        Selector(one.name, tuple((m.name, _OPERATORS[str(m.op)], m.value) for m in one.matchers.matchers))
        for one in _parts(expr)
        if isinstance(one, promql_parser.VectorSelector)
    ]


def aggregations(expr: promql_parser.Expr) -> list[tuple[list[Selector], list[str]]]:
    """Of each: what is selected below it, and the labels that it keeps."""
    return [
        (selectors(one.expr), list(one.modifier.labels))
        for one in _parts(expr)
        if isinstance(one, promql_parser.AggregateExpr) and one.modifier is not None
    ]


_OPERATORS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}


def _parts(expr: promql_parser.Expr) -> list[promql_parser.Expr]:
    found: list[promql_parser.Expr] = []

    promql_parser.walk(expr, pre_visit=found.append)
    return found
