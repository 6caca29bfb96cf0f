"""The settings of those who speak with workers that say how. Written by hand."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from moebius_common.settings import ServiceSettings
from moebius_proto.channel import WorkerTls


class WorkerTlsSettings(ServiceSettings):
    worker_tls_ca: Path | None = Field(
        None,
        description="PEM file with the authorities that sign workers' certificates. Left out: workers are "
        "spoken to without TLS",
    )
    worker_tls_cert: Path | None = Field(
        None, description="PEM file with the certificate that is shown to workers"
    )
    worker_tls_key: Path | None = Field(None, description="PEM file with the key of that certificate")
    worker_tls_name: str | None = Field(
        None,
        description="the name in the workers' certificates. Left out: the host by which each is addressed",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.worker_tls_cert is None) != (self.worker_tls_key is None):
            raise ValueError("--worker-tls-cert and --worker-tls-key go together")
        if self.worker_tls_cert is not None and self.worker_tls_ca is None:
            raise ValueError("--worker-tls-cert needs --worker-tls-ca")
        return self

    @property
    def worker_tls(self) -> WorkerTls | None:
        """How to speak TLS with workers; None: not at all."""
        if self.worker_tls_ca is None:
            return None
        return WorkerTls(self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key, self.worker_tls_name)
