"""Writes docs/metrics.md: `python -m deploy.metrics_page`."""

from collections.abc import Iterable
from pathlib import Path

from deploy import catalog
from deploy.catalog import Entry

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

_HEAD = """\
# Metrics

Written by `make dashboards` from the code. What to do when they look bad is in
[operations.md](operations.md); the dashboards and rules that use them are in `deploy/`.

The gateway serves them at `/metrics` of `--admin-listen`, worker and controller at `--metrics-listen`; all
are off by default, and `moebius up --metrics-port` turns all on. Durations are in seconds. A name is there
from the start of its service, at zero; what has a label `model` or `model_name` is there once the model is
known, what has a label `worker` once the worker is.

Values of labels: states and reasons are written as in the protocol (`READY`, `GPU_FAULT`), everything else in
lower case. They come from routes, served models, configured keys, workers and code, never from what clients
send.
"""
_WORKER = """\
Of the engine's totals, those of engines that ended are part. A step is told by the engine when it ends:
nothing waits for the device on that account.
"""
_VLLM = """\
## Worker, under the names of vLLM

Autoscalers, inference gateways (the Gateway API's model server protocol) and community dashboards read these.
"""


def page() -> str:
    worker = catalog.worker()
    parts = [
        _HEAD,
        "## Gateway\n",
        _table(catalog.gateway()),
        "## Worker\n",
        _WORKER,
        _table(entry for entry in worker if not entry.name.startswith("vllm:")),
        _VLLM,
        _table(entry for entry in worker if entry.name.startswith("vllm:")),
        "## Controller\n",
        _table(catalog.controller()),
    ]
    return "\n".join(parts)


def _table(entries: Iterable[Entry]) -> str:
    lines = ["| name | type | labels | |", "|---|---|---|---|"]
    for entry in entries:
        labels = ", ".join(f"`{label}`" for label in entry.labels)
        lines.append(f"| `{entry.name}` | {entry.type} | {labels} | {entry.about.rstrip('.')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
