"""Certificates for tests, made by the openssl command."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


def authority(folder: Path, name: str = "ca") -> Certificate:
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    _openssl("req", "-x509", *_new(made), "-subj", f"/CN={name}", "-days", "2")
    return made


def signed(folder: Path, by: Certificate, name: str, host: str = "localhost") -> Certificate:
    """Made out to `host`."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    _openssl(
        *("req", "-x509", *_new(made), "-subj", f"/CN={name}", "-days", "2"),
        *("-CA", str(by.cert), "-CAkey", str(by.key)),
        *("-addext", f"subjectAltName=DNS:{host}", "-addext", "basicConstraints=critical,CA:FALSE"),
    )
    return made


def _new(made: Certificate) -> tuple[str, ...]:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    return (*curve, "-keyout", str(made.key), "-out", str(made.cert))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
