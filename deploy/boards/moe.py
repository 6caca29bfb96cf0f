"""Experts and the kernels that compute them."""

from deploy.boards.panels import Board, Panel, Row
from deploy.boards.queries import mean, quantiles, series, total

MOE = Board(
    "moe",
    "Moebius / MoE",
    "Which kernels were chosen for this GPU and why others were not; how evenly the experts are used.",
    (
        Row(
            "Backends, as the preflight left them",
            (
                Panel(
                    "In use",
                    "For how many operations, shapes and token counts each backend was chosen. Empty where "
                    "PyTorch computes everything.",
                    {"choices": f"max by (backend) ({series('moebius_worker_kernel_choices')})"},
                    "table",
                    thresholds={1: "green"},
                ),
                Panel(
                    "Rejected, and at which gate",
                    "For how many of these a backend was not taken, and what it failed at: admission, "
                    "compile, numbers (a wrong result), capture, latched, time, crash. `moebius preflight` "
                    "tells the reasons.",
                    {"choices": f"max by (backend, gate) ({series('moebius_worker_kernel_rejections')})"},
                    "table",
                    thresholds={1: "yellow"},
                ),
                Panel(
                    "Excluded",
                    "Backends that a setting excludes, or that an engine died of: the next engine starts "
                    "without them.",
                    {"workers": f"count by (backend) ({series('moebius_worker_kernel_excluded')} > 0)"},
                    "table",
                    thresholds={1: "red"},
                ),
            ),
        ),
        Row(
            "Steps",
            (
                Panel(
                    "Time of a step",
                    "From its schedule to its end. A new kernel or a fallback level shows here.",
                    quantiles("moebius_worker_step_seconds"),
                    unit="s",
                ),
                Panel(
                    "Tokens in a step",
                    "Few tokens read few experts; from some hundreds on nearly all experts are read in each "
                    "step.",
                    {"{{instance}}": mean("moebius_worker_step_tokens", "instance")},
                ),
                Panel(
                    "Kernels compiled while serving",
                    "In somebody's request. 0 after a good preflight.",
                    {"{{instance}}": total(series("moebius_worker_late_compilations_total"), "instance")},
                    thresholds={1: "red"},
                ),
            ),
        ),
    ),
)
