"""What every family must show: logits and greedy text of transformers, however a text is cut into steps.

A family's test file makes tiny checkpoints with `write_random` and calls `check_family` on each.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice, StateStep
from tests.tiny import write_tokenizer

TOLERANCE = 1e-4
PAGE = 4


def write_random(path: Path, model: torch.nn.Module, *, seed: int = 0, scales: Mapping[str, float | tuple[float, float]] | None = None) -> Path:
    """Saves `model`, a transformers model, with random parameters that all show in the logits.

    Norms are about 1 (or about 0 where transformers initialises them so), the rest is normal with a standard
    deviation of 0.15, or what `scales` has for a part of the name: a deviation, or a mean and a deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = next((scale for part, scale in (scales or {}).items() if part in name), 0.15)
            if "norm" in name:
                parameter.copy_(parameter.mean().round() + 0.2 * noise)
            elif isinstance(scale, tuple):
                parameter.copy_(scale[0] + scale[1] * noise)
            else:
                parameter.copy_(scale * noise)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def load(path: Path, **options: Any) -> ModelRunner:
    options = {"kv_cache_bytes": 8 << 20, "page_size": PAGE} | options
    return ModelRunner.load(open_checkpoint(str(path)), RunnerOptions(**options))


class Texts:
    """Texts with known tokens that are fed to a runner in pieces; their pages are scattered."""

    def __init__(
        self, runner: ModelRunner, reference: torch.nn.Module, lengths: list[int], *, seed: int = 0
    ) -> None:
        self.random = random.Random(seed)
        self.runner, self.reference = runner, reference
        self.free = list(range(runner.num_pages))
        self.random.shuffle(self.free)
        self.free_slots = list(range(32))
        self.random.shuffle(self.free_slots)
        self.ids: list[list[int]] = []
        self.expected: list[torch.Tensor] = []
        self.pages: list[tuple[int, ...]] = []
        self.slots: list[int] = []
        self.restore: list[int | None] = []
        self.done: list[int] = []
        for length in lengths:
            self.add([self.random.randrange(3, runner.vocab_size) for _ in range(length)])

    def add(
        self, ids: list[int], *, shared: tuple[int, ...] = (), snapshot: int | None = None
    ) -> int:
        """A text whose first pages are `shared`, and whose state there is in `snapshot`."""
        with torch.inference_mode():
            self.expected.append(self.reference(torch.tensor([ids])).logits[0].float())
        needed = len(ids) // self.runner.page_size + 2 - len(shared)
        self.ids.append(ids)
        self.pages.append((*shared, *(self.free.pop() for _ in range(needed))))
        self.slots.append(self.free_slots.pop())
        self.restore.append(snapshot)
        self.done.append(len(shared) * self.runner.page_size)
        return len(self.ids) - 1

    def restart(self, index: int) -> None:
        """Preempts: what the text had is lost, to be computed again in other pages and another slot."""
        self.free += self.pages[index]
        self.free_slots.insert(0, self.slots[index])
        self.random.shuffle(self.free)
        self.pages[index] = tuple(self.free.pop() for _ in self.pages[index])
        self.slots[index] = self.free_slots.pop()
        self.done[index] = 0

    def slice(self, index: int, count: int, *, save: int | None = None) -> Slice:
        start = self.done[index]
        state = StateStep(self.slots[index], self.restore[index], save)
        self.restore[index] = None
        self.done[index] += count
        ids = tuple(self.ids[index][start : start + count])
        return Slice(index, ids, start, self.pages[index], True, self.window_pages(index, start), state)

    def window_pages(self, index: int, start: int) -> tuple[int, ...]:
        """The text's pages, but those that no window reaches any more are gone."""
        window = self.runner.window
        gone = 0 if window is None else max(0, start - window + 1) // self.runner.page_size
        return (*[-1] * gone, *self.pages[index][gone:])

    def step(self, counts: dict[int, int], *, save: dict[int, int] | None = None) -> float:
        """Feeds `counts[i]` tokens of text i; the largest error of the logits of each one's last."""
        slices = [self.slice(index, count, save=(save or {}).get(index)) for index, count in counts.items()]
        computed = self.runner.step(slices)
        assert not computed.faulty
        logits = computed.logits.cpu()
        assert logits.dtype == torch.float32
        expected = torch.stack([self.expected[index][self.done[index] - 1] for index in counts])
        return float((logits - expected).abs().max())


def check_family(path: Path, reference: torch.nn.Module, **options: Any) -> None:
    """Everything that a family must show in fp32. `reference` holds the same parameters, in fp32."""
    reference = reference.float().eval()
    runner = load(path, **options)
    check_one_piece(runner, reference)
    check_chunks(runner, reference)
    check_mixed_batches(runner, reference)
    check_prefix_hit(runner, reference)
    check_preempted(runner, reference)
    check_greedy(runner, reference)


def check_one_piece(runner: ModelRunner, reference: torch.nn.Module) -> None:
    assert Texts(runner, reference, [37]).step({0: 37}) < TOLERANCE


def check_chunks(runner: ModelRunner, reference: torch.nn.Module) -> None:
    texts = Texts(runner, reference, [91])
    for count in (1, 5, 13, 2, 1, 29, 40):
        assert texts.step({0: count}) < TOLERANCE, f"after {texts.done[0]} tokens"


def check_mixed_batches(runner: ModelRunner, reference: torch.nn.Module) -> None:
    """Some decode, some prefill, some wait, in an order that changes."""
    lengths = [50, 9, 33, 20, 64, 2]
    texts = Texts(runner, reference, lengths)
    while left := [index for index, length in enumerate(lengths) if texts.done[index] < length]:
        taken = texts.random.sample(left, texts.random.randint(1, len(left)))
        counts = {index: texts.random.choice((1, 1, 1, 3, 8)) for index in taken}
        error = texts.step({index: min(n, lengths[index] - texts.done[index]) for index, n in counts.items()})
        assert error < TOLERANCE, f"at {texts.done}"


def check_prefix_hit(runner: ModelRunner, reference: torch.nn.Module) -> None:
    """A second text begins with pages, and with the snapshot of a state, of the first."""
    texts = Texts(runner, reference, [40])
    snapshot = texts.free_slots.pop()
    texts.step({0: 24}, save={0: snapshot})
    texts.step({0: 16})
    ids = texts.ids[0][:24] + [texts.random.randrange(3, runner.vocab_size) for _ in range(17)]
    other = texts.add(ids, shared=texts.pages[0][: 24 // runner.page_size], snapshot=snapshot)
    for count in (6, 1, 10):
        assert texts.step({other: count}) < TOLERANCE


def check_preempted(runner: ModelRunner, reference: torch.nn.Module) -> None:
    texts = Texts(runner, reference, [45, 30])
    texts.step({0: 20, 1: 9})
    texts.step({0: 1, 1: 1})
    texts.restart(0)
    for counts in ({0: 31, 1: 1}, {0: 1, 1: 1}, {0: 13, 1: 18}):
        assert texts.step(counts) < TOLERANCE


def check_greedy(runner: ModelRunner, reference: torch.nn.Module, tokens: int = 64) -> None:
    """Greedy text of a batch. Where the two best tokens are closer than rounding, either will do."""
    texts = Texts(runner, reference, [])
    for prompt in ([5, 6, 7], list(range(40, 70)), [300]):
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            )[0].tolist()
        index = texts.add(ids)
        logits = runner.step([texts.slice(index, len(prompt))]).logits
        for token in ids[len(prompt) :]:
            expected = texts.expected[index][texts.done[index] - 1]
            best = int(logits[0].argmax())
            assert best == token or expected.max() - expected[best] < 1e-3, f"at token {texts.done[index]}"
            if texts.done[index] < len(ids):
                logits = runner.step([texts.slice(index, 1)]).logits


def check_bf16(path: Path, reference: torch.nn.Module, **options: Any) -> None:
    """In bf16 the logits are as near to fp32's as those of transformers in bf16 are (twice, at most).

    At half of the tokens: rounding may send some to another expert, in transformers other ones than here.
    """
    runner = load(path, dtype="bfloat16", **options)
    texts = Texts(runner, reference.float().eval(), [48])
    exact = texts.expected[0]
    with torch.inference_mode():
        theirs = reference.bfloat16()(torch.tensor([texts.ids[0]])).logits[0].float()
    reference.float()
    slices = [texts.slice(0, 30)]
    ours = [runner.step(slices).logits[0]]
    ours += [runner.step([texts.slice(0, 1)]).logits[0] for _ in range(18)]
    allowed = (theirs - exact)[29:].pow(2).mean(dim=-1).sqrt().median()
    error = (torch.stack(ours) - exact[29:]).pow(2).mean(dim=-1).sqrt().median()
    assert error < 2 * allowed, f"{error} is more than twice {allowed}"
