"""The PromQL of the dashboards. Names and labels are looked up: what no service exports is a KeyError."""

from functools import cache

from deploy import catalog
from deploy.catalog import Entry

# Of each dashboard; "All" stands for any value, and for none.
VARIABLES = {
    "namespace": "label_values(moebius_gateway_build_info, namespace)",
    "job": 'label_values({__name__=~"moebius_[a-z]+_build_info", namespace=~"$namespace"}, job)',
    "model": 'label_values(moebius_worker_model_info{namespace=~"$namespace"}, model_name)',
}
_MODEL_LABELS = ("model", "model_name")


@cache
def _exported() -> dict[str, Entry]:
    return catalog.everything()


def series(name: str, *matchers: str) -> str:
    """Those that the dashboard's variables select; `matchers` as in `code=~"5.."`."""
    of_model = [f'{label}=~"$model"' for label in _exported()[name].labels_of(name) if label in _MODEL_LABELS]
    selected = ", ".join(('namespace=~"$namespace"', 'job=~"$job"', *of_model, *matchers))
    return f"{name}{{{selected}}}"


def rate(name: str, *matchers: str) -> str:
    return f"rate({series(name, *matchers)}[$__rate_interval])"


def increase(name: str, *matchers: str) -> str:
    return f"increase({series(name, *matchers)}[$__rate_interval])"


def total(of: str, *by: str) -> str:
    """The sum over everything but the labels `by`."""
    return f"sum by ({', '.join(by)}) ({of})" if by else f"sum({of})"


def each(name: str, *by: str) -> str:
    """The largest of each; by default of each process."""
    return f"max by ({', '.join(by or ('instance',))}) ({series(name)})"


def quantile(q: float, name: str, *by: str) -> str:
    """Of a histogram."""
    return f"histogram_quantile({q}, {total(rate(f'{name}_bucket'), 'le', *by)})"


def recent_quantile(q: float, name: str) -> str:
    """Of what rarely happens: over the last ten minutes."""
    buckets = total(f"increase({series(f'{name}_bucket')}[10m])", "le")
    return f"histogram_quantile({q}, {buckets})"


def quantiles(name: str, *qs: float) -> dict[str, str]:
    """Legend to query."""
    return {f"p{100 * q:g}": quantile(q, name) for q in qs or (0.5, 0.95, 0.99)}


def mean(name: str, *by: str) -> str:
    """Of a histogram."""
    return share(total(rate(f"{name}_sum"), *by), total(rate(f"{name}_count"), *by))


def share(part: str, whole: str) -> str:
    """No value where the whole is 0."""
    return f"{part} / ({whole} > 0)"
