"""The controller's settings."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from moebius_common.address import Address
from moebius_common.logs import LogFormat
from moebius_common.settings import Seconds, ServiceSettings
from moebius_controller.decide import Policy

_DEFAULTS = Policy()


class ControllerSettings(ServiceSettings):
    """Keeps the workers of a stack alive: starts them, watches them, restarts what died or hangs."""

    model_config = SettingsConfigDict(env_prefix="MOEBIUS_CONTROLLER_", cli_prog_name="moebius-controller")

    stack: Path = Field(
        description="The stack file: JSON that lists the workers. controller.json is written next to it."
    )
    metrics_listen: Address | None = Field(
        None, description="host:port of the Prometheus metrics. Left out: no metrics are served."
    )
    log_format: LogFormat = Field("console", description="How log lines look on stderr.")
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
