"""Decode and prefill on this CPU beside llama.cpp and transformers: the same file, one after the other.

`make bench-cpu-peers` prints a table. Run it on an idle machine: the load is printed with it.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.peers.files import demo, smollm2

PROMPT, DECODE, REPEATS = 512, 64, 3
# Prefill and decode, tokens per second.
Rates = tuple[float, float]


def moebius(model: Path, threads: int, *, expand: bool, dtype: str) -> Callable[[], Rates]:
    from moebius_worker.checkpoint.checkpoint import open_checkpoint
    from moebius_worker.engine.runner import ModelRunner, RunnerOptions
    from moebius_worker.engine.types import Slice

    options = RunnerOptions(
        dtype=dtype, kv_cache_bytes=256 << 20, threads=threads, expand_weights=expand, max_running=1
    )
    runner = ModelRunner.load(open_checkpoint(str(model)), options)
    pages = tuple(range(1 + (PROMPT + DECODE) // runner.layout.page_size))

    def run() -> Rates:
        # In chunks as large as the worker's steps.
        start = time.perf_counter()
        for first in range(0, PROMPT, runner.max_step_tokens):
            ids = tuple(range(10 + first, 10 + min(first + runner.max_step_tokens, PROMPT)))
            runner.step([Slice(0, ids, first, pages, sample=True)])
        prefill = time.perf_counter() - start
        token, start = 100, time.perf_counter()
        for position in range(PROMPT, PROMPT + DECODE):
            logits = runner.step([Slice(0, (token,), position, pages, sample=True)]).logits
            token = int(logits[0].argmax())
        return PROMPT / prefill, DECODE / (time.perf_counter() - start)

    return run


def llama_cpp(model: Path, threads: int) -> Callable[[], Rates]:
    from llama_cpp import Llama

    llama = Llama(
        str(model),
        n_ctx=PROMPT + DECODE + 8,
        n_batch=PROMPT,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def run() -> Rates:
        llama.reset()
        start = time.perf_counter()
        llama.eval(list(range(10, 10 + PROMPT)))
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(DECODE):
            llama.eval([llama.sample(temp=0.0)])
        return PROMPT / prefill, DECODE / (time.perf_counter() - start)

    return run


def transformers(model: Path, threads: int, dtype: str) -> Callable[[], Rates]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    where, name = (model.parent, {"gguf_file": model.name}) if model.suffix == ".gguf" else (model, {})
    network = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype), **name).eval()

    @torch.inference_mode()
    def run() -> Rates:
        start = time.perf_counter()
        out = network(torch.arange(10, 10 + PROMPT)[None], use_cache=True)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(DECODE):
            token = out.logits[:, -1:].argmax(-1)
            out = network(token, past_key_values=out.past_key_values, use_cache=True)
        return PROMPT / prefill, DECODE / (time.perf_counter() - start)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    threads = parser.parse_args().threads
    from moebius_worker.demo import demo_model

    with tempfile.TemporaryDirectory() as directory:
        dense, sparse = smollm2(Path(directory)), demo(Path(directory))
        contenders: dict[str, Callable[[], Callable[[], Rates]]] = {
            "SmolLM2 Q4_1, Moebius, fp32": lambda: moebius(dense, threads, expand=True, dtype="float32"),
            "SmolLM2 Q4_1, Moebius, as stored": lambda: moebius(
                dense, threads, expand=False, dtype="float32"
            ),
            "SmolLM2 Q4_1, llama.cpp": lambda: llama_cpp(dense, threads),
            "SmolLM2 Q4_1, transformers, fp32": lambda: transformers(dense, threads, "float32"),
            "demo Q8_0, Moebius, fp32": lambda: moebius(sparse, threads, expand=True, dtype="float32"),
            "demo Q8_0, llama.cpp": lambda: llama_cpp(sparse, threads),
            "demo bf16, Moebius, fp32": lambda: moebius(demo_model(), threads, expand=True, dtype="float32"),
            "demo bf16, transformers, fp32": lambda: transformers(demo_model(), threads, "float32"),
        }
        print(f"{threads} threads, load {os.getloadavg()[0]:.1f}; {PROMPT} prompt tokens, {DECODE} decoded")
        print(f"{'':<36}{'prefill tok/s':>16}{'decode tok/s':>16}")
        for name, make in contenders.items():
            run = make()
            run()
            prefill, decode = zip(*(run() for _ in range(REPEATS)), strict=True)
            print(
                f"{name:<36}{statistics.median(prefill):>16.0f}{statistics.median(decode):>16.1f}", flush=True
            )


if __name__ == "__main__":
    main()
