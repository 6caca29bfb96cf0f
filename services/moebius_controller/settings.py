"""The controller's settings: flags, then environment (MOEBIUS_CONTROLLER_*), then defaults."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from moebius_controller.decide import Policy

_DEFAULTS = Policy()


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[ipv6]:port` as host (without brackets) and port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address; write host:port, for example 127.0.0.1:9100")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _checked_address(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(_checked_address)]
Seconds = Annotated[float, Field(gt=0)]


class ControllerSettings(BaseSettings):
    """Keeps the workers of a stack alive: starts them, watches them, restarts what died or hangs.

    Every flag can be given as an environment variable: --max-deaths as MOEBIUS_CONTROLLER_MAX_DEATHS.
    """

    model_config = SettingsConfigDict(
        env_prefix="MOEBIUS_CONTROLLER_",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
    )

    stack: Path = Field(
        description="The stack file: JSON that lists the workers. controller.json is written next to it."
    )
    metrics_listen: Address | None = Field(
        None, description="host:port of the Prometheus metrics. Left out: no metrics are served."
    )
    log_format: Literal["console", "json"] = Field("console", description="How log lines look on stderr.")
    look_interval: Seconds = Field(0.25, description="Seconds between two looks at the workers.")
    stop_grace: Seconds = Field(
        35.0, description="Seconds that workers have to end after SIGTERM before they are killed."
    )
    unresponsive_timeout: Seconds = Field(
        _DEFAULTS.unresponsive_timeout, description="Seconds without an answer before a worker is killed."
    )
    start_timeout: Seconds = Field(
        _DEFAULTS.start_timeout, description="Seconds that a started worker has to answer for the first time."
    )
    progress_timeout: Seconds = Field(
        _DEFAULTS.progress_timeout,
        description="Seconds without progress before a worker that loads or is busy is killed.",
    )
    restart_delay: Seconds = Field(
        _DEFAULTS.restart_delay,
        description="Seconds from a death to the restart; doubles with each further death in a row.",
    )
    max_restart_delay: Seconds = Field(_DEFAULTS.max_restart_delay, description="Limit of that delay.")
    healthy_after: Seconds = Field(
        _DEFAULTS.healthy_after,
        description="Seconds of life after which the deaths before it are forgotten.",
    )
    max_deaths: int = Field(_DEFAULTS.max_deaths, gt=0, description="Deaths in a row that make a crash loop.")
    retry_delay: Seconds = Field(
        _DEFAULTS.retry_delay, description="Seconds from a death to the restart in a crash loop."
    )

    def policy(self) -> Policy:
        return Policy(
            unresponsive_timeout=self.unresponsive_timeout,
            start_timeout=self.start_timeout,
            progress_timeout=self.progress_timeout,
            restart_delay=self.restart_delay,
            max_restart_delay=self.max_restart_delay,
            healthy_after=self.healthy_after,
            max_deaths=self.max_deaths,
            retry_delay=self.retry_delay,
        )
