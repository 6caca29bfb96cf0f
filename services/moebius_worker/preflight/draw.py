"""From verdicts on single calls to a plan over ranges of token counts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from moebius_kernels.plan import Choice, Plan, Verdict, choose
from moebius_kernels.registry import TokenRange
from moebius_worker.preflight.report import Site

Verdicts = Mapping[tuple[Site, str], Verdict]


def draw_plan(
    verdicts: Verdicts, ranges: Sequence[TokenRange], *, capture_tokens: int, identity: Mapping[str, str]
) -> Plan:
    """A choice for each operation, key and range in which something was judged."""
    choices: list[Choice] = []
    keys = dict.fromkeys((site.operation, site.key) for site, _ in verdicts)
    for operation, key in keys:
        mine = {
            (site, backend): verdict
            for (site, backend), verdict in verdicts.items()
            if (site.operation, site.key) == (operation, key)
        }
        for span in ranges:
            inside = {
                (site, backend): verdict
                for (site, backend), verdict in mine.items()
                if span.first <= site.tokens <= span.last
            }
            if inside:
                backends = dict.fromkeys(backend for _, backend in inside)
                joined = [_joined(inside, backend) for backend in backends]
                capture = span.last <= capture_tokens
                choices.append(choose(operation, key, span, joined, capture=capture))
    return Plan(tuple(choices), identity)


def _joined(inside: Verdicts, backend: str) -> Verdict:
    """What a backend's verdicts within a range come to: one rejection rejects it."""
    mine = {site: verdict for (site, name), verdict in inside.items() if name == backend}
    missing = {site for site, _ in inside} - set(mine)
    for site, verdict in mine.items():
        if verdict.rejected is not None:
            return replace(verdict, reason=_where(site, verdict))
    if missing:
        site = next(iter(missing))
        return Verdict(backend, "untried", f"was not tried at {site.tokens} tokens")
    last = max(site.tokens for site in mine)
    graphs = [verdict.captured for site, verdict in mine.items() if site.kind in ("", "decode")]
    return Verdict(
        backend,
        error=_most(verdict.error for verdict in mine.values()),
        microseconds=_mean(verdict.microseconds for site, verdict in mine.items() if site.tokens == last),
        captured=bool(graphs) and all(graphs),
    )


def _where(site: Site, verdict: Verdict) -> str:
    if verdict.rejected == "admission" or verdict.reason is None:
        return verdict.reason or ""
    return f"{verdict.reason} ({verdict.rejected}, {site.kind or 'any step'}, {site.tokens} tokens)"


def _most(numbers: Iterable[float | None]) -> float | None:
    return max((number for number in numbers if number is not None), default=None)


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return fmean(known) if known else None
