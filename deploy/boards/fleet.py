"""Workers, gateways and controllers one by one."""

from deploy.boards.panels import Board, Panel, Row
from deploy.boards.queries import series, total

# In the order of the legend; what a number stands for, and its colour.
STATES = {
    1: ("READY", "green"),
    2: ("LOADING", "blue"),
    3: ("DRAINING", "purple"),
    4: ("RESTARTING", "orange"),
    5: ("FAILED", "red"),
}


def _numbered(metric: str, by: str) -> str:
    """The state of each worker as its number."""
    terms = []
    for number, (name, _) in STATES.items():
        matcher = f'state="{name}"'
        terms.append(f"{number} * {total(series(metric, matcher), by)}")
    return " + ".join(terms)


FLEET = Board(
    "fleet",
    "Moebius / Fleet",
    "Each worker, gateway and controller by itself.",
    (
        Row(
            "Workers",
            (
                Panel(
                    "State",
                    "What each worker says of itself. A gap is a worker that could not be scraped: its "
                    "process is gone. LOADING takes as long as the weights do.",
                    {"{{instance}}": _numbered("moebius_worker_state", "instance")},
                    "states",
                    words=STATES,
                    width=16,
                ),
                Panel(
                    "What they serve",
                    "Model, architecture, dtype and device of each worker that loaded its model.",
                    {
                        "model": "max by (instance, model_name, architecture, dtype, device) "
                        f"({series('moebius_worker_model_info')})"
                    },
                    "table",
                ),
                Panel(
                    "Requests",
                    "That each worker computes. Uneven lines over minutes: prefix affinity, or a worker "
                    "that is avoided.",
                    {"{{instance}}": total(series("moebius_worker_requests_running"), "instance")},
                ),
                Panel(
                    "Silence of the engines",
                    "Since each engine's last sign of progress. It says something at least each second, in "
                    "long steps too; at the stall timeout it is killed and started anew.",
                    {
                        "{{instance}}": f"max by (instance) ({series('moebius_worker_engine_silence_seconds')})"
                    },
                    unit="s",
                    thresholds={10: "red"},
                ),
                Panel(
                    "Restarts of engines",
                    "Since the start of each worker.",
                    {"{{instance}}": total(series("moebius_worker_engine_restarts_total"), "instance")},
                ),
            ),
        ),
        Row(
            "Gateways and controllers",
            (
                Panel(
                    "Requests by gateway",
                    "In flight. Uneven lines: the balancer in front of the gateways keeps long connections.",
                    {"{{instance}}": total(series("moebius_gateway_requests_in_flight"), "instance")},
                ),
                Panel(
                    "Age of the controller's last look",
                    "A controller that looks is one that can act. The data path does not need it.",
                    {
                        "{{instance}}": "time() - max by (instance) "
                        f"({series('moebius_controller_last_look_timestamp_seconds')})"
                    },
                    unit="s",
                    thresholds={30: "red"},
                ),
                Panel(
                    "Versions",
                    "What runs. Two lines of one service are a rollout, or one that stopped half-way.",
                    {
                        "version": "count by (__name__, version, python) "
                        '({__name__=~"moebius_[a-z]+_build_info", namespace=~"$namespace", job=~"$job"})'
                    },
                    "table",
                    thresholds={1: "blue"},
                ),
            ),
        ),
    ),
)
