"""The worker's settings."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import SettingsConfigDict

from moebius_common.address import Address
from moebius_common.cpus import cpu_count
from moebius_common.logs import LogFormat
from moebius_common.settings import SEPARATED_BY_COMMAS, Seconds, ServiceSettings
from moebius_worker.fallback import DEFAULT_LEVELS, FallbackLevel, overlaid
from moebius_worker.sim.settings import SimSettings


class InjectedFault(BaseModel):
    """A test facility: what the engine does in a step whose slices hold `token_id`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_id: int = Field(ge=0)
    action: Literal["raise", "kill", "hang"]


@dataclass(frozen=True, slots=True)
class WorkerTls:
    """PEM files. `client_ca`: who signs the certificates of those that may connect; None: everybody may."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class WorkerSettings(ServiceSettings):
    """Serves one model on one device over gRPC, and restarts its engine process when that dies or hangs."""

    model_config = SettingsConfigDict(env_prefix="MOEBIUS_WORKER_", cli_prog_name="moebius-worker")

    engine: Literal["model", "sim"] = Field(
        "model",
        description="sim: an engine that computes nothing and takes as long as --sim says, for load tests. "
        "It speaks with the tokenizer of --model, or with a small one of its own.",
    )
    sim: SimSettings = Field(default=SimSettings(), description="What the simulated engine is like.")
    model: str = Field(
        "",
        validate_default=True,
        description="What to serve: a checkpoint directory, a .gguf file, or a Hugging Face id. Needed "
        "unless --engine is sim.",
    )
    served_model_name: str | None = Field(
        None, description="The name that clients use. Left out: the checkpoint's own name."
    )
    listen: Address = Field(
        "127.0.0.1:7601",
        description="host:port of the gRPC service. Port 0 takes a free one; the log says which.",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate of the gRPC service, read again when it changes. "
        "Left out: no TLS.",
    )
    tls_key: Path | None = Field(None, description="PEM file with the key of that certificate.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that sign the certificates of gateways and controllers. "
        "Left out: they need none.",
    )
    metrics_listen: Address | None = Field(
        None, description="host:port of the Prometheus metrics. Left out: no metrics are served."
    )

    device: str = Field("auto", description="Where the model runs: cpu, cuda, cuda:1. auto: cuda if present.")
    dtype: str = Field(
        "auto", description="What the model computes in: float32, bfloat16, float16. auto: by device."
    )
    kv_cache_memory: ByteSize | None = Field(
        None, description="Memory for the KV cache, for example 2GiB. Left out: what the memory plan finds."
    )
    kv_cache_dtype: Literal["model", "fp8", "int8"] = Field(
        "model",
        description="How keys and values are kept: model (as computed), fp8 or int8, which take about half "
        "of bfloat16 and cost some accuracy (int8 the least).",
    )
    load_format: str = Field(
        "auto",
        pattern="^(auto|dummy(:[a-z0-9_]+)?)$",
        description="Where weights come from. auto: the checkpoint. dummy, or dummy:FORM (bf16, fp8, nvfp4, "
        "mxfp4, int4, q4_0, q4_k): random numbers, to measure speed with a config.json alone.",
    )
    expand_weights: Literal["auto", "yes", "no"] = Field(
        "auto",
        description="Whether quantised weights are expanded to --dtype when they are loaded: faster on a "
        "CPU, but larger. auto: on a CPU, if they then fit into half of the memory.",
    )
    max_model_len: int | None = Field(
        None,
        gt=0,
        description="Limit on the tokens of prompt and output together. Left out: the model's own.",
    )
    page_size: int = Field(16, gt=0, description="Tokens in a page of the KV cache.")
    max_running: int = Field(32, gt=0, description="Requests that are computed at the same time.")
    max_waiting: int = Field(
        256, ge=0, description="Requests that wait for a place before new ones are refused."
    )
    max_step_tokens: int | None = Field(
        None,
        gt=0,
        description="Tokens of one engine step, prefill and decode together: few keep streams smooth beside "
        "a long prompt. Left out: 128 on a CPU, 4096 on a GPU.",
    )
    threads: int = Field(
        default_factory=cpu_count,
        gt=0,
        description="CPU threads of the engine. Left out: as many as CPUs.",
    )

    cuda_graphs: bool = Field(
        True,
        description="Whether decode steps become CUDA graphs on a GPU, as far as the preflight lets them.",
    )
    kernels: Literal["auto", "reference"] = Field(
        "auto",
        description="What computes. auto: what the preflight chooses. reference: PyTorch alone, slow and "
        "without anything to prove.",
    )
    exclude_backends: Annotated[
        tuple[Annotated[str, Field(pattern=r"^\w+:\w+$")], ...], *SEPARATED_BY_COMMAS
    ] = Field(
        (),
        description="Kernels that are not used, whatever the preflight finds: operation:backend, separated "
        "by commas. Those that an engine died of are added for the next one.",
    )

    probation: float = Field(
        0.0,
        ge=0,
        description="Seconds for which an engine that serves waits for each operation of its model, without "
        "CUDA graphs: much slower, but a fault of the GPU is then found where it happens. The engine after "
        "one that a kernel may have killed does so for a minute at least, whatever is set here.",
    )

    stall_timeout: Seconds = Field(
        20.0, description="Seconds without a step or heartbeat after which the engine is killed as stalled."
    )
    load_stall_timeout: Seconds = Field(
        600.0, description="Seconds without progress after which a loading engine is killed as stalled."
    )
    restart_delay: Seconds = Field(
        0.1, description="Seconds before the first restart of the engine; doubles with each that follows."
    )
    max_restart_delay: Seconds = Field(30.0, description="Limit of that delay.")
    healthy_after: Seconds = Field(
        60.0, description="Seconds of being ready after which earlier engine deaths are forgotten."
    )
    standby: Literal["auto", "yes", "no"] = Field(
        "auto",
        description="Whether a further process, without a model, waits to become the next engine: a restart "
        "is shorter by what PyTorch takes to start. It takes memory of the host, none of the GPU. auto: if "
        "the model runs on a GPU and the host has 2 GiB left.",
    )
    fallback_levels: tuple[FallbackLevel, ...] = Field(
        DEFAULT_LEVELS,
        description="JSON list of {name, settings}: what is given up, step by step, when engines keep "
        "failing. Level 1 has the settings of the first entry over those configured, level 2 those of the "
        "second too.",
    )
    level_file: Path | None = Field(
        None,
        description="File with the level to run on, as the annotation moebius.dev/fallback-level of a pod in "
        "a Kubernetes downward API volume. It is read for each start of an engine; one that is not ready is "
        "started again when the level changes. Left out: level 0.",
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that SIGTERM or SIGINT lets running requests finish."
    )
    log_format: LogFormat = Field("console", description="How log lines look on stderr.")
    inject_faults: tuple[InjectedFault, ...] = Field(
        (),
        description="For tests only. JSON list of {token_id, action: raise|kill|hang}: the engine does "
        "that in a step that computes the token.",
    )

    @field_validator("model")
    @classmethod
    def _needed(cls, model: str, info: ValidationInfo) -> str:
        if not model and info.data.get("engine") == "model":
            raise ValueError("Field required")
        return model

    @model_validator(mode="after")
    def _complete(self) -> "WorkerSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert")
        for level in range(1, len(self.fallback_levels) + 1):
            self.at_level(level)
        return self

    def at_level(self, level: int) -> Self:
        """As an engine gets them on a fallback level. Raises ValueError if the level's settings are wrong."""
        if level == 0:
            return self.model_copy(update={"fallback_levels": ()})
        levels = self.fallback_levels[:level]
        plain = self.model_dump(mode="json") | {"fallback_levels": []}
        try:
            # As JSON: what a process is given counts, not its environment.
            return type(self).model_validate_json(json.dumps(overlaid(plain, levels)))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
            raise ValueError(f"--fallback-levels: up to {levels[-1].name!r}: {'; '.join(faults)}") from error
        except ValueError as error:
            raise ValueError(f"--fallback-levels: {error}") from error

    @property
    def tls(self) -> WorkerTls | None:
        """How to speak TLS; None: not at all."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return WorkerTls(self.tls_cert, self.tls_key, self.tls_client_ca)
