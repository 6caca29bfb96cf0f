"""Workers, gateways and controllers one by one."""

from deploy.boards.panels import Board, Panel, Row
from deploy.boards.queries import each, series, total

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


MEMORY = (
    'max by (job, instance) (process_resident_memory_bytes{namespace=~"$namespace", job=~"$job"}) '
    'and on (job, instance) {__name__=~"moebius_[a-z]+_build_info"}'
)
LAST_LOOK = f"time() - max({series('moebius_controller_last_look_timestamp_seconds')})"

MODEL_LABELS = ("model_name", "architecture", "dtype", "device")

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
                        "model": each(
                            "moebius_worker_model_info",
                            "instance",
                            *MODEL_LABELS,
                        )
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
                    {"{{instance}}": each("moebius_worker_engine_silence_seconds")},
                    unit="s",
                    thresholds={10: "red"},
                ),
                Panel(
                    "Fallback level",
                    "0 is as configured. A worker that kept dying serves on a level that leaves something "
                    "out (graphs, fast kernels, part of the batch), until its configuration changes.",
                    {"{{instance}}": each("moebius_worker_fallback_level")},
                    thresholds={1: "red"},
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
                    "Memory",
                    "Resident, of gateways, controllers and the fronts of workers. An engine's memory is "
                    "its plan.",
                    {"{{job}} {{instance}}": MEMORY},
                    unit="bytes",
                ),
                Panel(
                    "Age of what is known of pods",
                    "Since gateways and controllers last heard of the API server. Without a cluster it is 0.",
                    {
                        "gateway {{instance}}": each("moebius_gateway_discovery_age_seconds"),
                        "controller {{instance}}": each("moebius_controller_discovery_age_seconds"),
                    },
                    unit="s",
                    thresholds={120: "red"},
                ),
                Panel(
                    "Controllers",
                    "Seconds since the last look of the one that leads. One that looks can act; none for "
                    "long means that nothing is repaired. The data path does not need it.",
                    {"last look": LAST_LOOK, "leaders": total(series("moebius_controller_leader"))},
                    thresholds={30: "red"},
                ),
                Panel(
                    "Given up, and nodes with bad GPUs",
                    "Workers that the controller leaves alone since nothing helped, and nodes that it "
                    "marked. Each waits for a person: CrashLoop and GPUFault.",
                    {
                        "given up": total(series("moebius_controller_worker_given_up")),
                        "marked nodes": f"max({series('moebius_controller_marked_nodes')})",
                    },
                    thresholds={1: "red"},
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
