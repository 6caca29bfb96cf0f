"""The gateway's settings."""

import os
import socket
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from moebius_common.address import Address, split_address
from moebius_common.logs import LogFormat, LogLevel
from moebius_common.settings import ServiceSettings
from moebius_gateway.text.parsing.registry import names


def _split(value: Any) -> Any:
    return (
        tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    )


def _split_pairs(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return {model: family for model, _, family in (pair.rpartition("=") for pair in _split(value))}


def _known(family: str) -> str:
    if family not in names():
        raise ValueError(f"{family!r} is none of {', '.join(names())}")
    return family


AnswerFormat = Annotated[str, AfterValidator(_known)]


class GatewaySettings(ServiceSettings):
    """Serves OpenAI's HTTP API from model workers."""

    model_config = SettingsConfigDict(env_prefix="MOEBIUS_GATEWAY_", cli_prog_name="moebius-gateway")

    listen: Address = Field("127.0.0.1:8000", description="host:port for HTTP; port 0 takes a free one")
    workers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        (), description="addresses of the workers, host:port, separated by commas"
    )
    gateway_id: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        description="names this gateway to workers",
    )
    request_timeout: float = Field(
        600.0,
        gt=0,
        description="seconds a request may take unless its X-Request-Timeout header says otherwise",
    )
    max_request_timeout: float = Field(
        3600.0, gt=0, description="the most that X-Request-Timeout may say, seconds"
    )
    max_body_bytes: int = Field(16 * 2**20, gt=0, description="largest request body")
    keep_alive_interval: float = Field(
        10.0,
        gt=0,
        description="seconds of silence after which a stream gets a comment (the first with the headers)",
    )
    silence_timeout: float = Field(
        5.0, gt=0, description="seconds without a word from a worker after which its requests move"
    )
    max_waiting: int = Field(
        1024, ge=0, description="requests that may wait for a worker; more are refused with 429"
    )
    drain_grace: float = Field(
        30.0,
        ge=0,
        description="seconds that requests in flight may take after SIGTERM before they are cut off",
    )
    answer_formats: Annotated[dict[str, AnswerFormat], NoDecode, BeforeValidator(_split_pairs)] = Field(
        {},
        description="how models write reasoning and calls where their chat templates do not tell: "
        f"MODEL=FORMAT, separated by commas; the formats are {', '.join(names())}",
    )
    log_format: LogFormat = Field("console", description="how log lines are written to stderr")
    log_level: LogLevel = Field("info", description="least severe level logged")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return split_address(self.listen)
