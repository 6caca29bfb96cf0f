"""What the gateway's settings may be; where they come from is tests/common/test_service_settings.py."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from moebius_common.address import split_address
from moebius_common.settings import read_settings
from moebius_gateway.settings import GatewaySettings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISTEN", "WORKERS", "CONFIG"):
        monkeypatch.delenv(f"MOEBIUS_GATEWAY_{name}", raising=False)


@pytest.mark.parametrize(
    ("workers", "addresses"), [("a:1,b:2", ("a:1", "b:2")), ("a:1", ("a:1",)), ("a:1, b:2,", ("a:1", "b:2"))]
)
def test_workers_in_a_flag_and_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, workers: str, addresses: tuple[str, ...]
) -> None:
    assert read_settings(GatewaySettings, ["--workers", workers]).workers == addresses
    monkeypatch.setenv("MOEBIUS_GATEWAY_WORKERS", workers)
    assert read_settings(GatewaySettings, []).workers == addresses


def test_workers_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('workers = ["a:1", "b:2"]\n')
    assert read_settings(GatewaySettings, ["--config", str(file)]).workers == ("a:1", "b:2")


def test_no_workers() -> None:
    assert read_settings(GatewaySettings, []).workers == ()


def test_ipv6() -> None:
    assert split_address(GatewaySettings(listen="[::1]:80").listen) == ("::1", 80)


@pytest.mark.parametrize("listen", ["", "80", ":80", "host:", "host:x", "host:70000"])
def test_listen_is_checked(listen: str) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(listen=listen)


def test_formats_of_answers(tmp_path: Path) -> None:
    flags = ["--answer-formats", "org/a=hermes, b=glm"]
    assert read_settings(GatewaySettings, flags).answer_formats == {"org/a": "hermes", "b": "glm"}
    file = tmp_path / "gateway.toml"
    file.write_text('[answer_formats]\n"org/a" = "harmony"\n')
    assert read_settings(GatewaySettings, ["--config", str(file)]).answer_formats == {"org/a": "harmony"}
    with pytest.raises(ValidationError, match="'nonsense' is none of"):
        GatewaySettings(answer_formats={"a": "nonsense"})


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_cert": "c.pem"}, "--tls-cert and --tls-key go together"),
        ({"tls_key": "k.pem"}, "--tls-cert and --tls-key go together"),
        ({"worker_tls_ca": "a.pem", "worker_tls_key": "k.pem"}, "--worker-tls-cert and --worker-tls-key"),
        ({"worker_tls_cert": "c.pem", "worker_tls_key": "k.pem"}, "needs --worker-tls-ca"),
    ],
)
def test_tls_files_come_in_pairs(given: dict[str, Path], missing: str) -> None:
    with pytest.raises(ValidationError, match=missing):
        GatewaySettings(**given)  # type: ignore[arg-type]
