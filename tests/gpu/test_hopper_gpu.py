"""Experts by products that divide their labour, in true sizes on a GPU, against the reference."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs Hopper", allow_module_level=True)

from moebius_kernels.activations import SILU, ClampedSwiglu
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.router import Route, topk_softmax
from moebius_kernels.triton import expanded_experts, hopper_experts
from moebius_kernels.triton.tune_trials import poisoned, relative_error
from tests.kernels.triton.matrices import FORMATS

# Between two products numbers are rounded to bf16; of Q4_K, those that products read are, too.
LIMIT = 6e-3


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), device="cuda")


def make(form: str, experts: int, hidden: int, inner: int) -> ExpertWeights:
    """With gate and up apart where files have them so, and biases where they have these."""
    gate_up = [(experts, inner, hidden)] * 2 if form in ("q4_k", "q6_k") else [(experts, 2 * inner, hidden)]
    matrices = [random_matrix(FORMATS[form], shape, generator(seed)) for seed, shape in enumerate(gate_up)]
    down = random_matrix(FORMATS[form], (experts, hidden, inner), generator(2))
    if form != "mxfp4_words":
        return ExpertWeights(matrices, down)
    biases = draw(experts, 2 * inner, seed=3).bfloat16(), draw(experts, hidden, seed=4).bfloat16()
    return ExpertWeights(matrices, down, *biases)


@pytest.mark.parametrize(
    ("form", "hidden", "inner"),
    [
        ("bf16", 2048, 768),
        ("nvfp4_words", 2816, 704),
        ("mxfp4_words", 2880, 2880),
        ("int4_words", 2816, 704),
        ("q4_0", 2880, 2880),
        ("q4_k", 2048, 768),
        ("q6_k", 2048, 768),
    ],
)
def test_experts_of_all_sorts_of_counts(form, hidden, inner):
    """Some experts have no token, others more than a tile; one has them all, one fewer than a tile's and one
    more. Again and again, since races come and go."""
    weights = make(form, 16, hidden, inner)
    activation = ClampedSwiglu() if form == "mxfp4_words" else SILU
    compute = (expanded_experts if form == "q6_k" else hopper_experts).routed_experts
    x = draw(700, hidden, seed=5).bfloat16()
    logits = draw(700, 16, seed=6)
    logits[:, :4] += 2
    logits[:, 4] = -100
    routes = [topk_softmax(logits[:count], 4) for count in (1, 33, 700)]
    alone = torch.tensor([7, -1, -1, -1], device="cuda")
    routes += [Route(torch.ones(count, 4, device="cuda"), alone.repeat(count, 1)) for count in (127, 129)]
    wrong = {}
    for route in routes:
        tokens = len(route.experts)
        expected = reference(x[:tokens].float(), route, weights, activation)
        for _ in range(3):
            with poisoned():
                y = compute(x[:tokens], route, weights, activation)
            if not (found := relative_error(y, expected)) < LIMIT:
                wrong[tokens] = found
    assert not wrong


@pytest.mark.parametrize("form", ["bf16", "nvfp4_words", "q4_k"])
def test_65536_pairs_are_those_of_the_batches_halves_and_the_same_each_time(form):
    """Each sum has one order, whichever multiprocessor has which tile and whatever else is in it."""
    weights = make(form, 128, 2048, 768)
    x = draw(8192, 2048, seed=5).bfloat16()
    route = topk_softmax(draw(8192, 128, seed=6), 8)
    first = hopper_experts.routed_experts(x, route, weights)
    for _ in range(10):
        assert torch.equal(hopper_experts.routed_experts(x, route, weights), first)
    for half in (slice(0, 4096), slice(4096, 8192)):
        part = Route(route.weights[half], route.experts[half])
        assert relative_error(hopper_experts.routed_experts(x[half], part, weights), first[half]) < 1e-3
