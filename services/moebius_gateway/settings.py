"""The gateway's settings."""

import os
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from moebius_common.address import Address
from moebius_common.logs import LogFormat, LogLevel
from moebius_common.settings import SEPARATED_BY_COMMAS, split_at_commas
from moebius_gateway.text.parsing.registry import names
from moebius_proto.worker_tls import WorkerTlsSettings


def _split_pairs(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return {model: family for model, _, family in (pair.rpartition("=") for pair in split_at_commas(value))}


def _known(family: str) -> str:
    if family not in names():
        raise ValueError(f"{family!r} is none of {', '.join(names())}")
    return family


AnswerFormat = Annotated[str, AfterValidator(_known)]


class GatewaySettings(WorkerTlsSettings):
    """Serves OpenAI's HTTP API from model workers."""

    model_config = SettingsConfigDict(env_prefix="MOEBIUS_GATEWAY_", cli_prog_name="moebius-gateway")

    listen: Address = Field("127.0.0.1:8000", description="host:port for HTTP; port 0 takes a free one")
    workers: Annotated[tuple[str, ...], *SEPARATED_BY_COMMAS] = Field(
        (), description="addresses of the workers, host:port, separated by commas"
    )
    discover_selector: str | None = Field(
        None,
        min_length=1,
        description="instead of --workers, on Kubernetes: the pods with these labels are the workers, for "
        "example app.kubernetes.io/component=worker; they are reached at their port named grpc",
    )
    discover_namespace: str | None = Field(
        None, description="where these pods are. Left out: the gateway's own namespace"
    )
    gateway_id: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        description="names this gateway to workers",
    )
    admin_listen: Address | None = Field(
        None,
        description="host:port for those who run the gateway: /metrics, /drain, /debug/... without a key; "
        "keep it from clients. Left out: none of these is served",
    )
    api_keys: Path | None = Field(
        None,
        description="file with the hashes of API keys, read again when it changes; `moebius keys` writes it. "
        "Left out: nobody needs a key",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate chain for HTTPS, read again when it changes. "
        "Left out: HTTP",
    )
    tls_key: Path | None = Field(None, description="PEM file with the key of that certificate")
    request_timeout: float = Field(
        600.0,
        gt=0,
        description="seconds a request may take unless its header Timeout or X-Request-Timeout says "
        "otherwise",
    )
    max_request_timeout: float = Field(
        3600.0, gt=0, description="the most that these headers may say, seconds"
    )
    max_body_bytes: int = Field(16 * 2**20, gt=0, description="largest request body")
    max_header_bytes: int = Field(64 * 2**10, gt=0, description="most bytes of a request's URL and headers")
    max_headers: int = Field(100, gt=0, description="most headers of a request")
    max_messages: int = Field(2048, gt=0, description="most messages of a chat")
    max_schema_bytes: int = Field(
        256 * 2**10, gt=0, description="most bytes of JSON schemas and grammars in a request, tools included"
    )
    keep_alive_interval: float = Field(
        10.0,
        gt=0,
        description="seconds of silence after which a stream gets a comment (the first with the headers)",
    )
    silence_timeout: float = Field(
        5.0, gt=0, description="seconds without a word from a worker after which its requests move"
    )
    max_waiting: int = Field(
        1024, ge=0, description="sequences that may wait for their turn; more are refused with 429"
    )
    max_wait: float = Field(
        60.0,
        gt=0,
        description="seconds; a request that is expected to wait longer for its turn is refused with 429",
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

    @model_validator(mode="after")
    def _complete(self) -> "GatewaySettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.workers and self.discover_selector is not None:
            raise ValueError("--workers and --discover-selector exclude one another")
        if self.discover_namespace is not None and self.discover_selector is None:
            raise ValueError("--discover-namespace needs --discover-selector")
        return self
