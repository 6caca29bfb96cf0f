"""Experts and the kernels that compute them."""

from deploy.boards.panels import Board, Panel, Row
from deploy.boards.queries import each, mean, quantiles, series, total

IMBALANCE = series("moebius_worker_expert_imbalance")

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
                    {"choices": each("moebius_worker_kernel_choices", "backend")},
                    "table",
                    thresholds={1: "green"},
                ),
                Panel(
                    "Rejected, and at which gate",
                    "For how many of these a backend was not taken, and what it failed at: admission, "
                    "compile, numbers (a wrong result), capture, latched, time, again (a later call), "
                    "memory (the GPU had none left), crash. `moebius preflight` tells the reasons.",
                    {"choices": each("moebius_worker_kernel_rejections", "backend", "gate")},
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
            "Experts",
            (
                Panel(
                    "Imbalance",
                    "Tokens of a layer's busiest expert over those of a mean one, in steps that were "
                    "watched (one with a prefill about every ten seconds). Up to 1.5 is chance. Where "
                    "experts are spread over devices the busiest is waited for; on one device it costs "
                    "little.",
                    {
                        "worst layer": f"max({IMBALANCE})",
                        "mean of the layers": f"avg({IMBALANCE})",
                    },
                    width=12,
                ),
                Panel(
                    "Idle experts",
                    "Experts, over all layers of a worker, that no token went to in these steps. Some are "
                    "trained so; many are a router that collapsed, or a checkpoint that was not read right.",
                    {"{{instance}}": each("moebius_worker_experts_idle")},
                    width=12,
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
