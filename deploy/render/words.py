"""Text in the pictures: legends, numbers with units; and variables in queries."""

import math
import re
from collections.abc import Mapping

# As Grafana does, from the units below a second up.
_TIMES = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"))
_SUFFIXES = {"reqps": "req/s", "bytes": "B", "suffix: tok/s": "tok/s", "short": ""}


def filled_in(query: str, rate_interval: float) -> str:
    """The query with each variable of the dashboards at "All"."""
    query = query.replace("$__rate_interval", f"{round(rate_interval)}s")
    return re.sub(r"\$(namespace|job|model)\b", ".*", query)


def legend(format: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), format)


def number(value: float, unit: str, decimals: int | None = None) -> str:
    """For people: three digits, or so many decimals, and the unit."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "more than the last bucket"
    if unit == "percentunit":
        return f"{100 * value:.{1 if decimals is None else decimals}f} %"
    if unit == "s" and value:
        size, name = next((pair for pair in reversed(_TIMES) if abs(value) >= pair[0]), _TIMES[0])
        return f"{_digits(value / size)} {name}"
    if unit == "s":
        return "0"
    text = _digits(value) if decimals is None else f"{value:.{decimals}f}"
    # As in MB: a prefix and its unit are one word.
    return f"{text}{'' if text[-1].isalpha() and unit == 'bytes' else ' '}{_SUFFIXES.get(unit, unit)}".strip()


def _digits(value: float) -> str:
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if name == 'k' else size):.3g} {name}"
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"
