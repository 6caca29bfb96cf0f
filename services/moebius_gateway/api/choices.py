"""From a request to the generations that answer it."""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moebius_gateway.api.errors import invalid
from moebius_gateway.api.request import GenerationRequest, SamplingWishes
from moebius_gateway.text.assembler import AnswerAssembler
from moebius_gateway.text.model import EncodedPrompt, SamplingDefaults, TextModel
from moebius_gateway.types import Generation, ModelInfo, Sampling

MAX_CHOICES = 128
SEEDS = 2**64
# Far apart and odd, so that all choices of a request have different seeds.
SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Choice:
    """One answer in the making."""

    index: int
    generation: Generation
    text: AnswerAssembler
    # The first choice of each prompt: the prompt is counted with it.
    first_of_prompt: bool
    cached_tokens: int = 0

    def usage(self) -> "Usage":
        """What this one has cost so far."""
        return Usage(
            len(self.generation.prompt_ids),
            self.text.generated_tokens,
            self.cached_tokens,
            self.text.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request cost.

    `cached_tokens` of the prompts were not computed anew; `reasoning_tokens` of the completions were thought.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> "Usage":
        first = [choice for choice in choices if choice.first_of_prompt]
        return cls(
            prompt_tokens=sum(len(choice.generation.prompt_ids) for choice in first),
            completion_tokens=sum(choice.text.generated_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in first),
            reasoning_tokens=sum(choice.text.reasoning_tokens for choice in choices),
        )


def make_choices(
    request: GenerationRequest,
    prompts: Sequence[EncodedPrompt],
    model: ModelInfo,
    text: TextModel,
    *,
    grammar: str | None,
    request_id: str,
    deadline: float,
    client: str,
    priority: int,
) -> list[Choice]:
    """`n` choices for each prompt, numbered through. Raises `ApiError` for what the model cannot do.

    `max_tokens` is a limit: what does not fit into the context behind the prompt is cut off it.
    """
    if len(prompts) * request.n > MAX_CHOICES:
        raise invalid(f"'n' times the number of prompts must be at most {MAX_CHOICES}", "n")
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise invalid(
            f"'min_tokens' must not be above the limit of {request.max_tokens} tokens", "min_tokens"
        )
    check_ids(request.stop_token_ids, model, "stop_token_ids")
    check_ids(request.sampling.logit_bias, model, "logit_bias")
    # A special token has no text: as a stop string it could never be found.
    special = [text.special_token_id(stop) for stop in request.stop]
    stop_token_ids = {*request.stop_token_ids, *(token_id for token_id in special if token_id is not None)}
    if not request.ignore_eos:
        stop_token_ids |= set(model.eos_token_ids)
    if request.min_tokens and len(stop_token_ids) >= model.vocab_size:
        raise invalid("with 'min_tokens', some token must not be a stop", "stop_token_ids")
    seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed % SEEDS
    choices: list[Choice] = []
    for prompt in prompts:
        room = _room(prompt.ids, request.min_tokens, model)
        for i in range(request.n):
            generation = Generation(
                request_id=request_id,
                model=model.id,
                prompt_ids=prompt.ids,
                max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
                min_tokens=request.min_tokens,
                stop_token_ids=tuple(sorted(stop_token_ids)),
                sampling=_sampling(
                    request.sampling, text.defaults, (seed + i * SEED_STRIDE) % SEEDS, request.logprobs
                ),
                deadline=deadline,
                grammar=grammar,
                client=client,
                priority=priority,
            )
            assembler = text.assembler(
                prompt,
                request.stop,
                generation.stop_token_ids,
                request.min_tokens,
                one_call=request.one_call,
            )
            choices.append(Choice(len(choices), generation, assembler, first_of_prompt=i == 0))
    return choices


def check_ids(ids: Collection[int], model: ModelInfo, name: str) -> None:
    """Raises `ApiError` for ids that the model has not. `name`: of the parameter."""
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
    wishes: SamplingWishes, defaults: SamplingDefaults, seed: int, logprobs: int | None
) -> Sampling:
    def either(given: float | None, default: float) -> float:
        return default if given is None else given

    return Sampling(
        temperature=either(wishes.temperature, defaults.temperature),
        top_k=max(0, defaults.top_k if wishes.top_k is None else wishes.top_k),
        top_p=either(wishes.top_p, defaults.top_p),
        min_p=either(wishes.min_p, defaults.min_p),
        repetition_penalty=either(wishes.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=wishes.presence_penalty,
        frequency_penalty=wishes.frequency_penalty,
        seed=seed,
        logit_bias=wishes.logit_bias,
        logprobs=logprobs,
    )
