"""From validated parameters to the generations that answer them."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from moebius_gateway.api.errors import invalid
from moebius_gateway.api.parameters import MAX_CHOICES, GenerationParameters
from moebius_gateway.text.assembler import TextAssembler
from moebius_gateway.text.model import SamplingDefaults, TextModel
from moebius_gateway.types import Generation, ModelInfo, Sampling

SEEDS = 2**64
# Far apart and odd, so that all choices of a request have different seeds.
SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Choice:
    """One answer in the making."""

    index: int
    generation: Generation
    text: TextAssembler
    # The first choice of each prompt: the prompt is counted with it.
    first_of_prompt: bool
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request cost; `cached_tokens` of the prompts were not computed anew."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> "Usage":
        first = [choice for choice in choices if choice.first_of_prompt]
        return cls(
            prompt_tokens=sum(len(choice.generation.prompt_ids) for choice in first),
            completion_tokens=sum(choice.text.generated_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in first),
        )

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def make_choices(
    parameters: GenerationParameters,
    prompts: Sequence[tuple[int, ...]],
    model: ModelInfo,
    text: TextModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    request_id: str,
    deadline: float,
) -> list[Choice]:
    """`n` choices for each prompt, numbered through. Raises `ApiError` for what the model cannot do.

    `max_tokens` is a limit: what does not fit into the context behind the prompt is cut off it.
    """
    if len(prompts) * parameters.n > MAX_CHOICES:
        raise invalid(f"'n' times the number of prompts must be at most {MAX_CHOICES}", "n")
    if max_tokens is not None and parameters.min_tokens > max_tokens:
        raise invalid(f"'min_tokens' must not be above the limit of {max_tokens} tokens", "min_tokens")
    for name, ids in (("stop_token_ids", parameters.stop_token_ids), ("logit_bias", parameters.logit_bias)):
        _check_ids(name, ids, model)
    # A special token has no text: as a stop string it could never be found.
    special = [text.special_token_id(stop) for stop in parameters.stop]
    stop_token_ids = {*parameters.stop_token_ids, *(token_id for token_id in special if token_id is not None)}
    if not parameters.ignore_eos:
        stop_token_ids |= set(model.eos_token_ids)
    seed = secrets.randbits(64) if parameters.seed is None else parameters.seed % SEEDS
    choices: list[Choice] = []
    for prompt_ids in prompts:
        room = _room(prompt_ids, parameters.min_tokens, model)
        for i in range(parameters.n):
            generation = Generation(
                request_id=request_id,
                model=model.id,
                prompt_ids=prompt_ids,
                max_tokens=room if max_tokens is None else min(max_tokens, room),
                min_tokens=parameters.min_tokens,
                stop_token_ids=tuple(sorted(stop_token_ids)),
                sampling=_sampling(parameters, text.defaults, (seed + i * SEED_STRIDE) % SEEDS, logprobs),
                deadline=deadline,
            )
            assembler = TextAssembler(
                text.token_bytes, parameters.stop, generation.stop_token_ids, parameters.min_tokens
            )
            choices.append(Choice(len(choices), generation, assembler, first_of_prompt=i == 0))
    return choices


def _check_ids(name: str, ids: Sequence[int] | dict[int, float], model: ModelInfo) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
        raise invalid(f"invalid value for '{name}': token ids are in [0, {model.vocab_size})", name)


def _room(prompt_ids: Sequence[int], min_tokens: int, model: ModelInfo) -> int:
    """How many tokens can be generated behind the prompt."""
    if not prompt_ids:
        raise invalid("the prompt is empty", "prompt")
    room = model.max_model_len - len(prompt_ids)
    if room < max(1, min_tokens):
        asked = f" and 'min_tokens' asks for {min_tokens}" if min_tokens > 1 else ""
        raise invalid(
            f"this model's context is {model.max_model_len} tokens; the prompt has {len(prompt_ids)}{asked}",
            code="context_length_exceeded",
        )
    return room


def _sampling(
    parameters: GenerationParameters, defaults: SamplingDefaults, seed: int, logprobs: int | None
) -> Sampling:
    def either(given: float | None, default: float) -> float:
        return default if given is None else given

    return Sampling(
        temperature=either(parameters.temperature, defaults.temperature),
        top_k=max(0, defaults.top_k if parameters.top_k is None else parameters.top_k),
        top_p=either(parameters.top_p, defaults.top_p),
        min_p=either(parameters.min_p, defaults.min_p),
        repetition_penalty=either(parameters.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        seed=seed,
        logit_bias=parameters.logit_bias,
        logprobs=logprobs,
    )
