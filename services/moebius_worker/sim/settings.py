"""How a simulated engine behaves."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SimFault(BaseModel):
    """Something that goes wrong once an engine has generated so many tokens since its start.

    `die`: the engine ends. `raise`: its step raises, once. `stall`: it says nothing any more. `reset`: the
    whole worker is gone, with its connections.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["die", "raise", "stall", "reset"]
    after_tokens: int = Field(ge=0)


class SimSettings(BaseModel):
    """Times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft: float = Field(
        default=0.05, ge=0, description="From a request's arrival to its first step; prefill comes on top."
    )
    itl: float = Field(
        default=0.02, ge=0, description="What a step takes besides its prefill: the time between tokens."
    )
    prefill_rate: float = Field(default=10_000, gt=0, description="Prompt tokens computed in a second.")
    jitter: float = Field(
        default=0.1, ge=0, le=1, description="Part by which each of these times varies, up and down."
    )
    kv_tokens: int = Field(default=262_144, gt=0, description="Tokens that the KV cache holds.")
    answer_tokens: int = Field(
        default=256, gt=0, description="Tokens of an answer that ends by itself, give or take a half."
    )
    start_seconds: float = Field(default=0.0, ge=0, description="What loading takes.")
    faults: tuple[SimFault, ...] = Field(
        default=(), description="JSON list of {action: die|raise|stall|reset, after_tokens}."
    )
