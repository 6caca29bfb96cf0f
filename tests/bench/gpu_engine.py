"""The whole engine on a GPU: decode and prefill of models of true dimensions with random weights.

`make gpu-bench` runs it. A preflight at the token counts that are measured chooses the backends, as a
worker's does. Decode goes through the engine's own loop, which launches the next step while one is computed;
beside it stands the step's graph alone. A prompt is a step of `ModelRunner`, timed from its token ids in
Python, as a scheduler hands them over, until the host knows the likeliest next one. Scheduling, drawing and
the check for what is not finite are not in that time, nor the block table's copy: it is the same each time.

Prints tokens per second beside the floor: the bytes that a step must read, at 4.3 TB/s, with as many experts
as uniform routing hits; of a prompt the operations of its products in bf16, at 790 TFLOP/s, without the
attention's scores.
"""

import argparse
import cProfile
import gc
import json
import math
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moebius_common.garbage import spare_what_is_there
from moebius_kernels.dispatch import bind
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.operations import Operations
from moebius_kernels.registry import gather
from moebius_kernels.router import Route
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.probation import Probation
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice, StateStep
from tests.bench.engine_floors import BANDWIDTH, FLOPS, prefill_operations, step_bytes
from tests.bench.engine_plan import backends_of, failures, plan_for, told
from tests.bench.engine_streams import DecodingStreams

# The published configs.
CONFIGS = Path(__file__).parents[1] / "data" / "configs"
MODELS: dict[str, dict[str, Any]] = {
    name: json.loads((CONFIGS / f"{file}.json").read_text())
    for name, file in {
        "qwen3-30b": "Qwen3-30B-A3B",
        "gpt-oss-20b": "gpt-oss-20b",
        "gemma-4-26b": "gemma-4-26B-A4B-it",
        # Qwen3.6-35B-A3B has the same sizes.
        "qwen3.6-35b": "Qwen3.5-35B-A3B",
    }.items()
}
CASES = (
    *(f"qwen3-30b:{form}" for form in ("bf16", "fp8", "nvfp4", "q4_0", "q4_k")),
    *("gpt-oss-20b:mxfp4", "gemma-4-26b:nvfp4", "qwen3.6-35b:nvfp4"),
)
PROMPT, OUTPUT = 128, 256
STREAMS = (1, 8, 32, 64, 128)
# Of the steps of decodes: before those that are timed, and for profiles after them.
WARM, SPARE = 16, 32
# Experts that are hit, of those that uniform routing hits. With fewer the figures are no trained model's.
ENOUGH = 0.9
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`form`: of the weights. `steps`: decode steps that are timed. `prefill`: tokens of a prompt."""

    model: str
    form: str
    device: str = "cuda"
    streams: tuple[int, ...] = STREAMS
    steps: int = 64
    prefill: int = 8192
    layers: int | None = None
    probation: bool = False
    # What to do with a step after it was timed.
    looks: Sequence[Callable[[Callable[[], None]], None]] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.model}:{self.form}"

    @property
    def config(self) -> dict[str, Any]:
        config = MODELS[self.model]
        return config if self.layers is None else shortened(config, self.layers)

    @property
    def options(self) -> RunnerOptions:
        return RunnerOptions(
            device=self.device,
            dtype="bfloat16",
            dummy_weights=self.form,
            max_running=max(self.streams),
            max_model_len=self.prefill + 1024,
            max_step_tokens=self.prefill,
        )


def shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """With its first layers only."""
    if "text_config" in config:
        return config | {"text_config": shortened(config["text_config"], layers)}
    fewer = config | {"num_hidden_layers": layers}
    if "layer_types" in config:
        fewer["layer_types"] = config["layer_types"][:layers]
    return fewer


class Streams:
    def __init__(self, runner: ModelRunner, count: int, prompt: int, output: int = OUTPUT) -> None:
        self.runner, self.count = runner, count
        size = runner.layout.page_size
        each = -(-(prompt + output + 1) // size)
        self.pages = [tuple(range(i * each, (i + 1) * each)) for i in range(count)]
        window_total = max(runner.layout.num_window_pages, 1)
        self.windows = [tuple(page % window_total for page in pages) for pages in self.pages]
        self.prompt = prompt
        self.tokens = [i % runner.vocab_size for i in range(count)]
        self.at = prompt
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, runner.vocab_size, (count, prompt), generator=generator).tolist()
        # As many at a time as a step has room for.
        fit = max(1, runner.max_step_tokens // prompt)
        self.steps = [
            [self.slice(index, tuple(prompts[index]), 0) for index in range(first, min(first + fit, count))]
            for first in range(0, count, fit)
        ]

    def slice(self, index: int, ids: tuple[int, ...], start: int) -> Slice:
        windows = self.windows[index] if self.runner.layout.window is not None else ()
        state = StateStep(index) if self.runner.layout.state_slots else None
        return Slice(index, ids, start, self.pages[index], sample=True, window_pages=windows, state=state)

    def prefill(self) -> None:
        computed = [self.runner.step(slices).logits.argmax(-1).tolist() for slices in self.steps]
        self.tokens = [token for tokens in computed for token in tokens]

    def decode(self) -> None:
        slices = [self.slice(i, (token,), self.at) for i, token in enumerate(self.tokens)]
        self.tokens = self.runner.step(slices).logits.argmax(-1).tolist()
        self.at += 1


def spread(runner: ModelRunner, operations: Operations, streams: int) -> float:
    """How many experts a step of decodes hits, of those that uniform routing would; the mean of the layers.
    Of weights that make all tokens alike few are hit, and a step is faster than one of a trained model."""
    found: list[float] = []

    def routed_experts(x: torch.Tensor, route: Route, weights: ExpertWeights, *rest: Any) -> torch.Tensor:
        experts, top_k = weights.num_slots, route.experts.shape[1]
        uniform = experts * (1 - (1 - top_k / experts) ** streams)
        found.append(len(route.experts.unique()) / uniform)
        return operations.routed_experts(x, route, weights, *rest)

    decoding = Streams(runner, streams, PROMPT)
    decoding.prefill()
    runner.bind(replace(operations, routed_experts=routed_experts))
    decoding.decode()
    runner.bind(operations)
    return statistics.mean(found)


def timed(work: Callable[[], None]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def replays(runner: ModelRunner, streams: int) -> float | None:
    """Seconds of a step's graph alone, once more and once more; None if it has none."""
    if runner._graphs is None or streams not in runner._graphs._graphs:
        return None
    graph, _ = runner._graphs._graphs[streams]

    def several() -> None:
        for _ in range(10):
            graph.replay()

    several()
    return timed(several) / 10


def measure(case: Case) -> Iterator[Row]:
    """A row for each number of streams, and one for prefill."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(case.config))
        checkpoint = open_checkpoint(directory)
        plan = plan_for(checkpoint, case.options, case.streams, case.prefill)
        examined = time.perf_counter() - start
        runner = ModelRunner.load(checkpoint, case.options)
    watch = Probation(math.inf) if case.probation else None
    operations = bind(plan, gather(), unplanned=unplanned, watch=watch)
    runner.bind(operations)
    # Before there are graphs, which call no function.
    hit = {streams: spread(runner, operations, streams) for streams in case.streams}
    if watch is None:
        runner.capture(lambda size: size in case.streams and plan.capturable(size), lambda *_: None)
    ready = time.perf_counter() - start
    # As the engine does before it serves.
    spare_what_is_there()
    print(f"\n{case}: preflight {examined:.1f} s, ready {ready:.1f} s", *failures(plan), sep="\n")
    for streams in case.streams:
        decoding = DecodingStreams(
            runner,
            operations.draw_tokens,
            streams,
            prompt=PROMPT,
            warm=WARM,
            output=WARM + case.steps + SPARE,
        )
        before = decoding.said

        def steps(decoding: DecodingStreams = decoding) -> None:
            for _ in range(case.steps):
                decoding.turn()

        seconds = timed(steps)
        assert decoding.said - before == streams * case.steps, "a turn is no step of all streams"
        least = step_bytes(runner._model, streams, PROMPT + WARM + case.steps / 2) / BANDWIDTH
        graph = replays(runner, streams)
        yield {
            "case": str(case),
            "streams": streams,
            "tokens_per_s": streams * case.steps / seconds,
            "ms": seconds / case.steps * 1e3,
            "graph_ms": None if graph is None else graph * 1e3,
            "floor_ms": least * 1e3,
            "floor": least * case.steps / seconds,
            "experts": hit[streams],
            "backends": backends_of(plan, streams),
        }
        for look in case.looks:
            look(decoding.turn)
    prompt = Streams(runner, 1, case.prefill)
    prompt.prefill()
    seconds = statistics.median(timed(prompt.prefill) for _ in range(3))
    least = prefill_operations(runner._model, case.prefill) / FLOPS
    yield {
        "case": str(case),
        "prefill": case.prefill,
        "tokens_per_s": case.prefill / seconds,
        "ms": seconds * 1e3,
        "floor_ms": least * 1e3,
        "floor": least / seconds,
        "backends": backends_of(plan, case.prefill),
    }
    for look in case.looks:
        look(prompt.prefill)


def unplanned(operation: str, key: str) -> None:
    print(f"the preflight met no such call, which the reference computes: {operation} of {key}")


def line(row: Row) -> str:
    what = f"prefill {row['prefill']:>5}:" if "prefill" in row else f"decode {row['streams']:>4} streams:"
    graph = ""
    if "graph_ms" in row:
        graph = " no graph," if row["graph_ms"] is None else f"{row['graph_ms']:>8.3f} its graph,"
    few = ""
    if row.get("experts", 1.0) < ENOUGH:
        few = f" ONLY {row['experts']:.0%} OF THE EXPERTS that uniform routing hits;"
    return (
        f"{what:<20} {row['tokens_per_s']:>8.0f} tok/s {row['ms']:>9.3f} ms a step,{graph}{few}"
        f" floor {row['floor_ms']:>7.3f} ({row['floor']:.0%}); {told(row['backends'])}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=CASES, help="model:form")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--steps", type=int, default=Case.steps, help="decode steps that are timed")
    parser.add_argument("--prefill", type=int, default=Case.prefill, help="tokens of a prompt")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--probation", action="store_true", help="waits for each operation, without graphs")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step of each size")
    parser.add_argument("--host", action="store_true", help="where the CPU is in steps of each size")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    looks = [look for look, wanted in ((profile, options.profile), (profile_host, options.host)) if wanted]
    for module, reason in gather().missing.items():
        print(f"not here: {module}: {reason}")
    figures: list[Row] = []
    for name in options.cases:
        model, _, form = name.partition(":")
        case = Case(
            model,
            form,
            options.device,
            tuple(options.streams),
            options.steps,
            options.prefill,
            options.layers,
            options.probation,
            looks,
        )
        for row in measure(case):
            print(line(row), flush=True)
            figures.append(row)
            if options.out:
                options.out.write_text(json.dumps(figures, indent=1))
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def profile_host(work: Callable[[], None]) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        work()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def profile(work: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)[:24]
    for row in rows:
        print(f"    {row.self_device_time_total:>9.0f} us {row.count:>5} x {row.key[:90]}")


if __name__ == "__main__":
    main()
