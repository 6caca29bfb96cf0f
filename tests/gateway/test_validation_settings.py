"""Where settings come from, and which comes first."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from moebius_gateway.settings import GatewaySettings, load_settings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISTEN", "WORKERS", "CONFIG", "MAX_WAITING"):
        monkeypatch.delenv(f"MOEBIUS_GATEWAY_{name}", raising=False)


def test_flags_before_environment_before_file_before_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('workers = ["f:1"]\nmax_waiting = 1\nlisten = "f:1"\n')
    monkeypatch.setenv("MOEBIUS_GATEWAY_CONFIG", str(file))
    monkeypatch.setenv("MOEBIUS_GATEWAY_WORKERS", "e:1, e:2")
    monkeypatch.setenv("MOEBIUS_GATEWAY_LISTEN", "e:1")
    settings = load_settings(["--listen", "127.0.0.1:9"])
    assert settings.address == ("127.0.0.1", 9)
    assert settings.workers == ("e:1", "e:2")
    assert settings.max_waiting == 1
    assert settings.request_timeout == 600


def test_workers_as_a_flag() -> None:
    assert load_settings(["--workers", "a:1,b:2"]).workers == ("a:1", "b:2")
    assert load_settings(["--workers", "a:1"]).workers == ("a:1",)
    assert load_settings([]).workers == ()


def test_ipv6() -> None:
    assert GatewaySettings(listen="[::1]:80").address == ("::1", 80)


@pytest.mark.parametrize("listen", ["", "80", ":80", "host:", "host:x", "host:70000"])
def test_listen_is_checked(listen: str) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(listen=listen)


def test_unknown_keys_in_the_file_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('lisen = "x:1"\n')
    monkeypatch.setenv("MOEBIUS_GATEWAY_CONFIG", str(file))
    with pytest.raises(ValidationError, match="lisen"):
        load_settings([])
