"""Is the API well, and if not, why not?"""

from deploy.boards.panels import Board, Panel, Row
from deploy.boards.queries import each, increase, quantile, rate, series, share, total
from deploy.boards.recovery import OUTCOMES

STATES = {
    "READY": "green",
    "LOADING": "blue",
    "DRAINING": "purple",
    "RESTARTING": "orange",
    "UNREACHABLE": "yellow",
    "FAILED": "red",
}
CODES = {
    "200": "green",
    "400": "blue",
    "404": "blue",
    "429": "yellow",
    "499": "purple",
    "500": "red",
    "503": "orange",
}

API = 'route=~"/v1/.*"'
REQUESTS = total(rate("moebius_gateway_requests_total", API))
# As HighErrorRate counts them: a refusal within a stream is no failure either, nor what a client has to mend.
STREAM_ERRORS = total(
    rate("moebius_gateway_stream_errors_total", 'code!~"overloaded|kv_exhausted|bad_request"')
)
REFUSED = total(rate("moebius_gateway_requests_total", API, 'code=~"5.."'))
FAILED = f"({REFUSED} + {STREAM_ERRORS})"
# Each gateway sees all workers: their views are not added up.
READY = f"""max({total(series("moebius_gateway_workers", 'state="READY"'), "instance")})"""
NOT_READY = f"""max({total(series("moebius_gateway_workers", 'state!="READY"'), "instance")})"""

OVERVIEW = Board(
    "overview",
    "Moebius / Overview",
    "Is the API well, and if not, why not? The first row answers the one, the rows below the other.",
    (
        Row(
            "Is the API well?",
            (
                Panel(
                    "Ready workers",
                    "Workers that can take requests, by the gateway that sees most of them. At none, "
                    "requests wait until their deadline and fail with 503; the runbook is NoReadyWorkers.",
                    {"ready": READY},
                    "stat",
                    thresholds={1: "green"},
                    base="red",
                    width=4,
                    height=4,
                ),
                Panel(
                    "Not ready",
                    "Workers that load, drain, restart, failed or cannot be reached. A few for a minute are "
                    "restarts; for long they are lost capacity: see Fleet.",
                    {"not ready": NOT_READY},
                    "stat",
                    thresholds={1: "yellow"},
                    width=4,
                    height=4,
                ),
                Panel(
                    "Requests",
                    "Requests answered each second, of clients alone: probes are not counted.",
                    {"requests": REQUESTS},
                    "stat",
                    "reqps",
                    base="blue",
                    width=4,
                    height=4,
                ),
                Panel(
                    "Failing",
                    "Part of the requests that were answered with 5xx, or whose stream ended with an error "
                    "other than a refusal. The death of a worker alone does not fail requests.",
                    {"failing": share(FAILED, REQUESTS)},
                    "stat",
                    "percentunit",
                    thresholds={0.01: "yellow", 0.05: "red"},
                    width=4,
                    height=4,
                    decimals=1,
                ),
                Panel(
                    "First token, p95",
                    "95 of 100 sequences had their first token within this time of the request's arrival. "
                    "Waiting for a turn is part of it.",
                    {"p95": quantile(0.95, "moebius_gateway_time_to_first_token_seconds")},
                    "stat",
                    "s",
                    thresholds={2.5: "yellow", 10: "red"},
                    width=4,
                    height=4,
                    decimals=2,
                ),
                Panel(
                    "Tokens",
                    "Tokens generated each second for all clients.",
                    {"tokens": total(rate("moebius_gateway_generated_tokens_total"))},
                    "stat",
                    "tok/s",
                    base="blue",
                    width=4,
                    height=4,
                    decimals=0,
                ),
            ),
        ),
        Row(
            "Why not?",
            (
                Panel(
                    "Alerts that fire",
                    "Each has a page in docs/operations.md: what it means, what users notice, what to do.",
                    {"alerts": 'sum by (alertname, severity) (ALERTS{alertstate="firing", app="moebius"})'},
                    "table",
                ),
                Panel(
                    "Workers by state",
                    "As the gateways see them. RESTARTING: the engine died and comes back; UNREACHABLE: no "
                    "connection; FAILED: its engine cannot be started, a person must act.",
                    {"{{state}}": each("moebius_gateway_workers", "state")},
                    "stack",
                    colours=STATES,
                ),
                Panel(
                    "Answers by code",
                    "429: refused since the queue is full or a key used up its rate. 503: no worker in "
                    "time, or the gateway drains. 499: the client left. 500: a fault of ours, or a "
                    "poisonous request.",
                    {"{{code}}": f"{total(rate('moebius_gateway_requests_total', API), 'code')} > 0"},
                    colours=CODES,
                    unit="reqps",
                ),
                Panel(
                    "Waiting",
                    "Sequences that wait for their turn, and those that wait for any worker at all (the one "
                    "they had is gone). Growing lines mean that more comes in than is served.",
                    {
                        "turn, {{priority}}": total(series("moebius_gateway_admission_waiting"), "priority"),
                        "worker": total(series("moebius_gateway_streams_waiting")),
                    },
                ),
                Panel(
                    "Streams that lost their worker",
                    "By how it ended. Resumed is what should be: the client noticed a pause at most. Failed "
                    "is an error that a client saw. See Recovery.",
                    {
                        "{{outcome}}": total(increase("moebius_gateway_migrations_total"), "outcome"),
                    },
                    "bars",
                    colours=OUTCOMES,
                ),
                Panel(
                    "Errors within streams",
                    "Streams that had begun with status 200 and ended with an error event, by its code.",
                    {"{{code}}": total(rate("moebius_gateway_stream_errors_total"), "code")},
                    unit="reqps",
                ),
            ),
        ),
    ),
)
