"""As `tune_keys.py`, of our experts beside other engines': with activations and biases of models."""

import json
import sys
from functools import partial

import torch

from moebius_kernels.activations import ClampedSwiglu
from moebius_kernels.jit.triton_ahead import pretend
from moebius_kernels.registry import Device
from moebius_kernels.router import topk_softmax
from moebius_kernels.triton import tune_launches
from tests.bench import gpu_experts, gpu_peers
from tests.bench.peers.layer import Shape, packed, random_layer
from tests.kernels.triton.tune_keys import be_a_gpu, noted

SMALL = {
    "gpt-oss": Shape(8, 4, 384, 128, ClampedSwiglu(), bias=True),
    "qwen3": Shape(8, 2, 384, 128),
}
CASES = ("gpt-oss:mxfp4", "qwen3:nvfp4", "qwen3:fp8_block", "qwen3:bf16")
TOKENS = (1, 8, 300)


def compute() -> None:
    for case in CASES:
        contest = object.__new__(gpu_peers.Contest)
        contest.case, contest.peers = case, {}
        name, _, form = case.partition(":")
        shape = contest.shape = SMALL[name]
        contest.layers = [packed(random_layer(gpu_peers.FORMATS[form], shape, torch.device("cpu")))]
        for count in TOKENS:
            x = torch.randn(count, shape.hidden).bfloat16()
            for run in contest.backends(count).values():
                run(x, topk_softmax(torch.randn(count, shape.experts), shape.top_k), 0)


def main() -> None:
    pretend((9, 0))
    gpu_peers.SHAPES = SMALL
    gpu_experts.device_here = lambda kind: Device("cuda", "NVIDIA H200", (9, 0))
    trials = [trial for case in CASES for trial in gpu_peers.trials_of(case, TOKENS)]
    ahead = noted(partial(tune_launches.launched, trials))
    be_a_gpu()
    json.dump({"ahead": ahead, "measured": noted(compute)}, sys.stdout)


if __name__ == "__main__":
    main()
