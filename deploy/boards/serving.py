"""Latency, throughput, queue and cache."""

from deploy.boards.panels import Board, Panel, Row
from deploy.boards.queries import each, mean, quantile, quantiles, rate, series, share, total

SERVING = Board(
    "serving",
    "Moebius / Serving",
    "How fast, how much, how long in the queue, and what the caches do.",
    (
        Row(
            "What clients feel, measured at the gateway",
            (
                Panel(
                    "Time to first token",
                    "From the request's arrival to a sequence's first token: the queue, the prefill, and "
                    "one step. The dashed line is the objective of LatencySLOBurn.",
                    quantiles("moebius_gateway_time_to_first_token_seconds"),
                    unit="s",
                    thresholds={2.5: "red"},
                ),
                Panel(
                    "Between tokens",
                    "From one delivery of a sequence to the next. It grows with the batch; its p99 shows "
                    "pauses, such as that of a stream that moved to another worker.",
                    quantiles("moebius_gateway_inter_token_latency_seconds"),
                    unit="s",
                ),
                Panel(
                    "Whole requests",
                    "From arrival to the end of the answer. It depends on the lengths that clients ask for.",
                    quantiles("moebius_gateway_request_seconds"),
                    unit="s",
                ),
            ),
        ),
        Row(
            "How much",
            (
                Panel(
                    "Tokens",
                    "Prompt tokens of answered requests, those of them found in a prefix cache, and what was "
                    "generated.",
                    {
                        "prompt": total(rate("moebius_gateway_prompt_tokens_total")),
                        "of these cached": total(rate("moebius_gateway_prompt_tokens_cached_total")),
                        "generated": total(rate("moebius_gateway_generated_tokens_total")),
                    },
                    unit="tok/s",
                ),
                Panel(
                    "Running",
                    "Sequences that workers compute, and those that wait inside a worker. Few should wait "
                    "there: the gateway's queue is fair among clients, a worker's is not.",
                    {
                        "running": total(series("vllm:num_requests_running")),
                        "waiting in workers": total(series("vllm:num_requests_waiting")),
                        "waiting in gateways": total(series("moebius_gateway_admission_waiting")),
                    },
                ),
                Panel(
                    "Refused",
                    "By reason: full and displaced (the queue is too short), forecast and deadline (it would "
                    "take too long), requests and tokens (the rates of a key).",
                    {"{{reason}}": total(rate("moebius_gateway_admission_refusals_total"), "reason")},
                    unit="reqps",
                ),
            ),
        ),
        Row(
            "Where the time goes",
            (
                Panel(
                    "Queue",
                    "95 of 100 waited less: for their turn at the gateway, then for a place in a worker's "
                    "step.",
                    {
                        "gateway p95": quantile(0.95, "moebius_gateway_admission_wait_seconds"),
                        "worker p95": quantile(0.95, "vllm:request_queue_time_seconds"),
                    },
                    unit="s",
                ),
                Panel(
                    "Prefill and decode",
                    "Means of finished requests: from the first step to the first token, and from there to "
                    "the last.",
                    {
                        "prefill": mean("vllm:request_prefill_time_seconds"),
                        "decode": mean("vllm:request_decode_time_seconds"),
                    },
                    unit="s",
                ),
                Panel(
                    "Engine steps",
                    "How long one step of the engine takes, from its schedule to its end. Clients wait one "
                    "step for each token.",
                    quantiles("moebius_worker_step_seconds", 0.5, 0.99),
                    unit="s",
                ),
                Panel(
                    "Batch",
                    "Requests and tokens that a step computes, on average. More requests share the reading "
                    "of the weights: throughput grows with the batch, and so does the time of a step.",
                    {
                        "requests": mean("moebius_worker_step_requests"),
                        "tokens": mean("moebius_worker_step_tokens"),
                    },
                ),
                Panel(
                    "KV cache in use",
                    "Part of each worker's pages that running requests hold. Near 1, requests wait for "
                    "pages or lose them (preemptions).",
                    {"{{instance}}": each("vllm:kv_cache_usage_perc")},
                    unit="percentunit",
                    max=1,
                    thresholds={0.95: "red"},
                ),
                Panel(
                    "Prefix cache and preemptions",
                    "Part of the prompt tokens that need no prefill, and requests that lost their pages to "
                    "another and are computed again.",
                    {
                        "hits": share(
                            total(rate("vllm:prefix_cache_hits_total")),
                            total(rate("vllm:prefix_cache_queries_total")),
                        ),
                        "preemptions / s": total(rate("vllm:num_preemptions_total")),
                    },
                ),
            ),
        ),
    ),
)
