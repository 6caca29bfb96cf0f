"""Where the settings of a service come from, which comes first, and what is said about wrong ones."""

import json
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings, SettingsConfigDict

from moebius_common.address import Address
from moebius_common.settings import Seconds, ServiceSettings, read_settings
from moebius_controller.settings import ControllerSettings
from moebius_gateway.settings import GatewaySettings
from moebius_worker.settings import WorkerSettings


class Settings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="MOEBIUS_SOME_", cli_prog_name="moebius-some")

    listen: Address = "127.0.0.1:1"
    max_size: int = 0
    max_waiting: int = 0
    long_timeout: Seconds = 1.0
    other: int = 5


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    with pytest.raises(SystemExit) as end:
        read_settings(Settings, flags)
    assert end.value.code == 2
    first, *faults = capsys.readouterr().err.splitlines()
    assert first == "moebius-some: these settings are wrong; --help explains them"
    return faults


@pytest.mark.parametrize("named_by", ["flag", "environment"])
def test_flags_before_environment_before_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    file = tmp_path / "some.toml"
    file.write_text("max_size = 1\nmax_waiting = 1\nlong_timeout = 1.5\n")
    monkeypatch.setenv("MOEBIUS_SOME_MAX_SIZE", "2")
    monkeypatch.setenv("MOEBIUS_SOME_MAX_WAITING", "2")
    flags = ["--max-waiting", "3"]
    if named_by == "flag":
        flags += ["--config", str(file)]
    else:
        monkeypatch.setenv("MOEBIUS_SOME_CONFIG", str(file))
    settings = read_settings(Settings, flags)
    assert (settings.max_waiting, settings.max_size) == (3, 2)
    assert (settings.long_timeout, settings.other) == (1.5, 5)


def test_mistakes_are_one_line_each_by_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    timeout, listen = sorted(refused(capsys, "--listen", "x", "--long-timeout", "0"), reverse=True)
    assert timeout == "moebius-some: --long-timeout: Input should be greater than 0"
    assert listen.startswith("moebius-some: --listen: 'x' is not an address; write host:port")


def test_a_wrong_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    (line,) = refused(capsys, "--config", str(file))
    assert f"cannot read the settings file {file}" in line
    assert line.count("No such file") == 1
    file.write_text("max_size =")
    assert f"cannot read the settings file {file}" in refused(capsys, "--config", str(file))[0]
    file.write_text("max_sise = 3\n")
    assert refused(capsys, "--config", str(file)) == [
        "moebius-some: --max-sise: Extra inputs are not permitted"
    ]


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        (GatewaySettings, "workers", ("a:1", "b:2")),
        (WorkerSettings, "exclude_backends", ("experts:triton", "linear:triton")),
        (ControllerSettings, "node_fault_conditions", ("Bad", "Worse")),
    ],
)
@pytest.mark.parametrize("source", ["flag", "JSON flag", "environment", "JSON environment", "file"])
def test_lists_are_separated_by_commas_wherever_they_come_from(
    kind: type[ServiceSettings],
    field: str,
    values: tuple[str, ...],
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = kind.model_config.get("env_prefix", "")
    flags = {WorkerSettings: ["--model", "m"], ControllerSettings: ["--stack", "s"]}.get(kind, [])
    written = json.dumps(values) if "JSON" in source else ",".join(values)
    match source.split()[-1]:
        case "flag":
            flags += [f"--{field.replace('_', '-')}", written]
        case "environment":
            monkeypatch.setenv(f"{prefix}{field.upper()}", written)
        case _:
            (tmp_path / "some.toml").write_text(f"{field} = {list(values)}")
            flags += ["--config", str(tmp_path / "some.toml")]
    assert getattr(read_settings(kind, flags), field) == values


def test_what_is_no_flags_fault_alone_is_told_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(WorkerSettings, ["--model", "m", "--tls-cert", "c"])
    assert capsys.readouterr().err.splitlines()[1:] == [
        "moebius-worker: --tls-cert and --tls-key go together"
    ]


def test_a_variable_that_is_no_json_is_told_with_its_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEBIUS_WORKER_SIM", "{ttft: 1}")
    with pytest.raises(SystemExit):
        read_settings(WorkerSettings, ["--model", "m"])
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert '"sim"' in line
    assert "Expecting property name" in line


@pytest.mark.parametrize("kind", [GatewaySettings, WorkerSettings, ControllerSettings])
def test_every_service_has_them(kind: type[BaseSettings]) -> None:
    assert issubclass(kind, ServiceSettings)
    program = kind.model_config.get("cli_prog_name")
    assert program
    assert kind.model_config.get("env_prefix") == program.upper().replace("-", "_") + "_"
