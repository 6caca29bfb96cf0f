"""The one request behind every dialect: what is to be generated, whoever asked for it in whatever words."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from moebius_gateway.text.conversation import Conversation
from moebius_gateway.text.grammar import Wanted

# A text, or token ids.
Prompt = str | tuple[int, ...]


class ToolMode(StrEnum):
    """Whether the answer may, must, or must not call tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: those that may be called; empty: all."""

    mode: ToolMode = ToolMode.AUTO
    names: frozenset[str] = frozenset()

    def offers(self, name: str) -> bool:
        """Whether the model is told of the tool: of all, unless some were chosen to choose from."""
        return self.mode is not ToolMode.AUTO or not self.names or name in self.names


@dataclass(frozen=True, slots=True)
class SamplingWishes:
    """How to draw tokens; None: as the model's authors recommend, or neutral. As `types.Sampling` else."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # None: drawn by the gateway.
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything that decides what the answer is; how it is written is the dialect's business."""

    model: str
    # A chat, or texts to go on with.
    prompt: Conversation | tuple[Prompt, ...]
    sampling: SamplingWishes = SamplingWishes()
    # Answers to each prompt.
    n: int = 1
    # None: what the context leaves.
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    # What the answer must spell, apart from reasoning and calls.
    grammar: Wanted | None = None
    # Tokens that may go into reasoning; None: any number.
    reasoning_budget: int | None = None
    # Alternatives reported with each token; None: no log probabilities.
    logprobs: int | None = None
    stream: bool = False

    @property
    def one_call(self) -> bool:
        """At most one call an answer: who names a function wants it called once."""
        named = self.tool_choice.mode is ToolMode.REQUIRED and len(self.tool_choice.names) == 1
        return named or not self.parallel_tool_calls

    def offered(self) -> Conversation:
        """The chat as the model shall see it: it is not shown tools that it must not call."""
        assert isinstance(self.prompt, Conversation)
        return replace(self.prompt, tools=()) if self.tool_choice.mode is ToolMode.NONE else self.prompt
