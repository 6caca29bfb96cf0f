"""What every family must show: logits and greedy text of transformers, however a text is cut into steps.

A family's test file makes tiny checkpoints with `write_random` and calls `check_family` on each.
"""

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice, StateStep
from tests.tiny import write_tokenizer
from tests.worker.engine.models.contract import strict

TOLERANCE = 1e-4
PAGE = 4


def write_random(
    path: Path,
    model: torch.nn.Module,
    *,
    seed: int = 0,
    scales: Mapping[str, float | tuple[float, float]] | None = None,
) -> Path:
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
    options = {"kv_cache_bytes": 8 << 20, "page_size": PAGE, "max_running": 16} | options
    runner = ModelRunner.load(open_checkpoint(str(path)), RunnerOptions(**options))
    # Kernels ask for more than the references do.
    runner.bind(strict())
    return runner


def exact(reference: torch.nn.Module) -> torch.nn.Module:
    """It in fp64: in fp32 its own rounding can be larger than the tolerance."""
    wide = copy.deepcopy(reference).double()
    if hasattr(wide, "set_experts_implementation"):
        # The other ways have no fp64.
        wide.set_experts_implementation("eager")
    return wide


class Texts:
    """Texts with known tokens that are fed to a runner in pieces; their pages are scattered."""

    def __init__(
        self, runner: ModelRunner, reference: torch.nn.Module, lengths: list[int], *, seed: int = 0
    ) -> None:
        self.random = random.Random(seed)
        self.runner, self.reference = runner, exact(reference)
        layout = runner.layout
        self.free = self.shuffled(layout.num_pages)
        self.free_windows = self.shuffled(layout.num_window_pages)
        self.free_slots = self.shuffled(layout.state_slots)
        self.ids: list[list[int]] = []
        self.expected: list[torch.Tensor] = []
        self.pages: list[tuple[int, ...]] = []
        self.windows: list[tuple[int, ...]] = []
        self.slots: list[int] = []
        self.restore: list[int | None] = []
        self.done: list[int] = []
        for length in lengths:
            self.add([self.random.randrange(3, runner.vocab_size) for _ in range(length)])

    def shuffled(self, count: int) -> list[int]:
        numbers = list(range(count))
        self.random.shuffle(numbers)
        return numbers

    def add(self, ids: list[int], *, prefix_of: int | None = None, prefix: int = 0, snapshot: int = 0) -> int:
        """A text; its first `prefix` pages are text `prefix_of`'s, whose state there `snapshot` has."""
        with torch.inference_mode():
            self.expected.append(self.reference(torch.tensor([ids])).logits[0].float())
        page_size = self.runner.layout.page_size
        needed = len(ids) // page_size + 2 - prefix
        shared = prefix_of if prefix_of is not None else 0
        self.ids.append(ids)
        for pages, free in ((self.pages, self.free), (self.windows, self.free_windows)):
            own = tuple(free.pop() for _ in range(needed if free else 0))
            pages.append((*(pages[shared][:prefix] if prefix else ()), *own))
        self.slots.append(self.free_slots.pop() if self.free_slots else 0)
        self.restore.append(snapshot if prefix else None)
        self.done.append(prefix * page_size)
        return len(self.ids) - 1

    def restart(self, index: int) -> None:
        """Preempts: what the text had is lost, to be computed again in other pages and another slot."""
        for pages, free in ((self.pages, self.free), (self.windows, self.free_windows)):
            free += pages[index]
            self.random.shuffle(free)
            pages[index] = tuple(free.pop() for _ in pages[index])
        if self.free_slots:
            self.free_slots.insert(0, self.slots[index])
            self.slots[index] = self.free_slots.pop()
        self.done[index] = 0

    def slice(self, index: int, count: int, *, save: int | None = None) -> Slice:
        start = self.done[index]
        state = StateStep(self.slots[index], self.restore[index], save)
        self.restore[index] = None
        self.done[index] += count
        return Slice(
            handle=index,
            token_ids=tuple(self.ids[index][start : start + count]),
            start=start,
            pages=self.pages[index],
            sample=True,
            window_pages=self.window_pages(index, start),
            state=state if self.runner.layout.state_slots else None,
        )

    def window_pages(self, index: int, start: int) -> tuple[int, ...]:
        """The text's pages for layers with a window, without those that no window reaches any more."""
        gone = self.runner.layout.window_start(start)
        return (*[-1] * gone, *self.windows[index][gone:]) if self.windows[index] else ()

    def step(self, counts: dict[int, int], *, save: dict[int, int] | None = None) -> float:
        """Feeds `counts[i]` tokens of text i; the largest error of the logits of each one's last."""
        slices = [self.slice(index, count, save=(save or {}).get(index)) for index, count in counts.items()]
        computed = self.runner.step(slices)
        assert not computed.faulty()
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
    check_fault_stays_alone(runner, reference)


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
    snapshot = texts.free_slots.pop() if texts.free_slots else 0
    texts.step({0: 24}, save={0: snapshot})
    texts.step({0: 16})
    ids = texts.ids[0][:24] + [texts.random.randrange(3, runner.vocab_size) for _ in range(17)]
    other = texts.add(ids, prefix_of=0, prefix=24 // runner.layout.page_size, snapshot=snapshot)
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
    """The greedy text of a batch is transformers': of all tokens after the text so far each is the best.

    Where the two best tokens are closer than rounding, either will do.
    """
    texts = Texts(runner, reference, [])
    counts = {
        texts.add(prompt + [0] * tokens): len(prompt) for prompt in ([5, 6, 7], [*range(40, 70)], [300])
    }
    written = range(-tokens - 1, -1)
    for _ in written:
        logits = runner.step([texts.slice(index, count) for index, count in counts.items()]).logits
        for index, best in zip(counts, logits.argmax(dim=-1).tolist(), strict=True):
            texts.ids[index][texts.done[index]] = best
        counts = dict.fromkeys(counts, 1)
    for ids in texts.ids:
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].float()
        for place in written:
            short = float(expected[place].max() - expected[place, ids[place + 1]])
            assert short < 1e-3, f"token {place + 1} is {short} below the best"


def check_fault_stays_alone(runner: ModelRunner, reference: torch.nn.Module) -> None:
    """A request with numbers that are not finite is named; its neighbour is as it was. Spoils the runner."""
    spoilt = 9
    texts = Texts(runner, reference, [])
    for ids in ([10, 11, spoilt, 12, 13], [20, 21, 22, 23, 24, 25]):
        texts.add(ids)
    runner._model.embedding.data[spoilt] = torch.nan
    for count in (4, 1):
        computed = runner.step([texts.slice(index, count) for index in (0, 1)])
        difference = computed.logits[1] - texts.expected[1][texts.done[1] - 1]
        # Of the spoilt token itself there is no logit where embeddings are tied.
        assert torch.cat((difference[:spoilt], difference[spoilt + 1 :])).abs().max() < TOLERANCE
        # The spoilt token is in the first step; of later ones only this matters, that the neighbour is well.
        assert computed.faulty() == {0} or count == 1


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
