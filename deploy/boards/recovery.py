"""Every death, what it cost, how it ended."""

from deploy.boards.panels import Board, Panel, Row
from deploy.boards.queries import each, increase, recent_quantile, total

OUTCOMES = {"resumed": "green", "abandoned": "blue", "poisoned": "purple", "failed": "red"}
REASONS = {"ENGINE_DEAD": "orange", "ENGINE_STALLED": "yellow", "GPU_FAULT": "red", "DRAINING": "blue"}
EVENTS = {
    "died": "red",
    "killed": "orange",
    "level set": "yellow",
    "node marked": "yellow",
    "gave up": "purple",
    "started": "blue",
    "ready": "green",
}
# By the gateway that thinks worst of it.
ON_TRIAL = each("moebius_gateway_worker_on_trial", "worker")

RECOVERY = Board(
    "recovery",
    "Moebius / Recovery",
    "Every death of an engine or a worker, what it cost the streams that ran there, and how each of them "
    "ended.",
    (
        Row(
            "What died",
            (
                Panel(
                    "Engines, by reason",
                    "Engine processes that were started again inside a living worker. ENGINE_DEAD: the "
                    "process ended; ENGINE_STALLED: no progress; GPU_FAULT: the device reported an error.",
                    {"{{reason}}": total(increase("moebius_worker_engine_restarts_total"), "reason")},
                    "bars",
                    colours=REASONS,
                ),
                Panel(
                    "Workers, by event",
                    "What happened to whole workers, and what the controller did about it. A death has its "
                    "start; a level that is set, a node that is marked or a worker that is given up needs a "
                    "person.",
                    {"{{event}}": total(increase("moebius_controller_events_total"), "event")},
                    "bars",
                    colours=EVENTS,
                ),
                Panel(
                    "Connections opened again",
                    "Streams between gateway and worker that were lost and came back: each death of a worker "
                    "has one for each gateway. Without deaths it is the network.",
                    {"{{worker}}": total(increase("moebius_gateway_attach_reconnects_total"), "worker")},
                    "bars",
                ),
            ),
        ),
        Row(
            "What it cost",
            (
                Panel(
                    "Streams moved, by reason",
                    "Generations that lost the worker that ran them. REJOINED is none: a suspect that proved "
                    "itself alone goes on among others. DRAINING: the worker was told to end.",
                    {"{{reason}}": total(increase("moebius_gateway_migrations_total"), "reason")},
                    "bars",
                    colours=REASONS,
                ),
                Panel(
                    "The pause that a client saw",
                    "From the last token before the loss to the first one after it, of the streams that "
                    "moved in the last ten minutes: detection, placing and prefill together. What hangs is "
                    "detected late: an engine by its stall timeout, a worker by the gateway's silence "
                    "timeout.",
                    {
                        "p50": recent_quantile(0.5, "moebius_gateway_recovery_seconds"),
                        "p95": recent_quantile(0.95, "moebius_gateway_recovery_seconds"),
                    },
                    unit="s",
                ),
                Panel(
                    "Tokens computed again",
                    "Prompt and output that were submitted once more. They cost a prefill, and less of it "
                    "where a prefix cache has them.",
                    {"tokens": total(increase("moebius_gateway_tokens_replayed_total"))},
                    "bars",
                ),
            ),
        ),
        Row(
            "How it ended",
            (
                Panel(
                    "Streams moved, by outcome",
                    "resumed: the client noticed a pause at most. failed: no worker in time. poisoned: the "
                    "request kills engines and was given up. abandoned: the client left meanwhile.",
                    {"{{outcome}}": total(increase("moebius_gateway_migrations_total"), "outcome")},
                    "bars",
                    colours=OUTCOMES,
                ),
                Panel(
                    "Suspects",
                    "A strike is a death during a step that computed the request. After two it is computed "
                    "alone; if engines still die it is failed as poisoned.",
                    {
                        "strikes": total(increase("moebius_gateway_strikes_total")),
                        "poisoned": total(increase("moebius_gateway_poisoned_total")),
                    },
                    "bars",
                ),
                Panel(
                    "Breakers",
                    "Workers on trial: after repeated deaths without a token in between they get one "
                    "request at a time, until one is delivered.",
                    {"on trial": total(ON_TRIAL), "{{worker}}": f"{ON_TRIAL} > 0"},
                    thresholds={1: "red"},
                ),
            ),
        ),
    ),
)
