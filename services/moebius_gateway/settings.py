"""The gateway's settings: flags, then environment, then a TOML file, then defaults."""

import os
import socket
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

ENV_PREFIX = "MOEBIUS_GATEWAY_"


def _split(value: Any) -> Any:
    return (
        tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    )


class GatewaySettings(BaseSettings):
    """Serves OpenAI's HTTP API from model workers.

    Each flag --some-name is also read from MOEBIUS_GATEWAY_SOME_NAME and, as some_name, from the TOML file
    that MOEBIUS_GATEWAY_CONFIG names.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    listen: str = Field("127.0.0.1:8000", description="host:port for HTTP; port 0 takes a free one")
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
    log_format: Literal["json", "console"] = Field(
        "console", description="how log lines are written to stderr"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level logged"
    )

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError("must be host:port")
        return value

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = os.environ.get(f"{ENV_PREFIX}CONFIG")
        sources = (init_settings, env_settings)
        # Read here, since pydantic's own source takes a missing file for an empty one.
        return (
            (*sources, InitSettingsSource(settings_cls, tomllib.loads(Path(file).read_text())))
            if file
            else sources
        )


def load_settings(arguments: Sequence[str] | None = None) -> GatewaySettings:
    """From the command line (`arguments`, by default the process's own), environment and file.

    Raises `pydantic.ValidationError`, and `OSError` or `tomllib.TOMLDecodeError` for the file; --help and
    unknown flags end the process.
    """
    flags: CliSettingsSource[Any] = CliSettingsSource(
        GatewaySettings,
        cli_parse_args=list(sys.argv[1:] if arguments is None else arguments),
        cli_prog_name="moebius-gateway",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )
    return GatewaySettings(_cli_settings_source=flags)  # type: ignore[call-arg]
