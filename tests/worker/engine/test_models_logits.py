"""Logits and greedy text of each family against transformers, through the runner."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice
from tests.tiny import VOCAB_SIZE, write_checkpoint

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one head a KV head": ("llama", {"num_key_value_heads": 4}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, own head size": ("llama", {"head_dim": 32}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mixtral": ("mixtral", {}),
    "mixtral, tied, 9/3 heads": (
        "mixtral",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "mixtral, 8 experts top 3": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "mixtral, window": ("mixtral", {"sliding_window": 11}),
}
TOLERANCE = 1e-4


def load(path, **options):
    options = {"kv_cache_bytes": 2 << 20, "page_size": 4} | options
    runner = ModelRunner.load(open_checkpoint(str(path)), RunnerOptions(**options))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return runner, reference


@pytest.fixture(params=CASES)
def models(request, tmp_path):
    family, config = CASES[request.param]
    return load(write_checkpoint(tmp_path, family, **config))


class Requests:
    """Requests with known tokens that are fed to a runner in pieces; their pages are scattered."""

    def __init__(self, runner, reference, lengths, seed=0):
        self.random = random.Random(seed)
        self.runner = runner
        free = list(range(runner.num_pages))
        self.random.shuffle(free)
        self.ids = [[self.random.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
        self.pages = [tuple(free.pop() for _ in range(length // runner.page_size + 2)) for length in lengths]
        self.done = [0] * len(lengths)
        with torch.inference_mode():
            self.expected = [reference(torch.tensor([ids])).logits[0] for ids in self.ids]

    def step(self, counts):
        """Feeds `counts[i]` tokens of request i and checks the logits of each one's last."""
        slices = []
        for index, count in counts.items():
            start = self.done[index]
            ids = tuple(self.ids[index][start : start + count])
            slices.append(Slice(index, ids, start, self.pages[index], sample=True))
            self.done[index] += count
        logits = self.runner.step(slices).logits.cpu()
        assert logits.dtype == torch.float32
        expected = torch.stack([self.expected[index][self.done[index] - 1] for index in counts])
        assert (logits - expected).abs().max() < TOLERANCE


def test_prefill_in_one_piece(models):
    Requests(*models, [37]).step({0: 37})


def test_prefill_in_odd_chunks(models):
    requests = Requests(*models, [61])
    for count in (1, 5, 13, 2, 1, 29, 10):
        requests.step({0: count})


def test_decodes_of_mixed_lengths_beside_prefill_chunks(models):
    lengths = [50, 9, 33, 20, 64, 2]
    requests = Requests(*models, lengths)
    while left := [index for index, length in enumerate(lengths) if requests.done[index] < length]:
        # Some decode, some prefill, some wait, in an order that changes.
        taken = requests.random.sample(left, requests.random.randint(1, len(left)))
        counts = {index: requests.random.choice((1, 1, 1, 3, 8)) for index in taken}
        requests.step({index: min(n, lengths[index] - requests.done[index]) for index, n in counts.items()})


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_64_greedy_tokens_of_a_batch_equal_those_of_transformers(tmp_path, family):
    runner, reference = load(write_checkpoint(tmp_path, family, eos_token_id=None))
    prompts = [[5, 6, 7], list(range(40, 80)), [300]]
    expected = [
        reference.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    free = iter(range(runner.num_pages))
    pages = [tuple(next(free) for _ in range(30)) for _ in prompts]
    outputs = [[] for _ in prompts]
    for _ in range(64):
        slices = []
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids = prompt + output
            start = len(ids) - 1 if output else 0
            slices.append(Slice(index, tuple(ids[start:]), start, pages[index], sample=True))
        for output, row in zip(outputs, runner.step(slices).logits, strict=True):
            output.append(int(row.argmax()))
    assert outputs == expected
    assert len({tuple(output) for output in outputs}) == 3


@pytest.mark.parametrize("window", [4096, 11, None])
def test_mistral_is_llama_with_a_window(tmp_path, window):
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=window,
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    requests = Requests(*load(tmp_path), [40])
    for count in (20, 1, 6, 13):
        requests.step({0: count})


def test_bf16_is_close_to_fp32(tmp_path):
    path = write_checkpoint(tmp_path, "mixtral")
    runner, reference = load(path, dtype="bfloat16")
    assert runner.dtype_name == "bfloat16"
    ids = list(range(30))
    logits = runner.step([Slice(0, tuple(ids), 0, tuple(range(8)), sample=True)]).logits.cpu()
    assert logits.dtype == torch.float32
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0, -1]
    assert torch.nn.functional.cosine_similarity(logits[0], expected, dim=0) > 0.99
