import subprocess
import sys
from pathlib import Path

import pytest

from moebius_worker.main import main
from moebius_worker.settings import InjectedFault, WorkerSettings, split_address


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(flags)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic_settings import CliApp

    file = tmp_path / "worker.toml"
    file.write_text('model = "from-file"\nmax_running = 1\nmax_waiting = 1\npage_size = 1\n')
    monkeypatch.setenv("MOEBIUS_WORKER_MAX_RUNNING", "2")
    monkeypatch.setenv("MOEBIUS_WORKER_MAX_WAITING", "2")
    settings = CliApp.run(WorkerSettings, cli_args=["--config", str(file), "--max-waiting", "3"])
    assert (settings.model, settings.page_size) == ("from-file", 1)
    assert (settings.max_running, settings.max_waiting) == (2, 3)


def test_the_engine_gets_the_settings_of_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(
        model="m", kv_cache_memory="2GiB", inject_faults=(InjectedFault(token_id=1, action="kill"),)
    )
    monkeypatch.setenv("MOEBIUS_WORKER_MAX_RUNNING", "99")
    copy = WorkerSettings.model_validate_json(settings.model_dump_json())
    assert copy == settings
    assert copy.kv_cache_memory == 2 * 2**30


def test_mistakes_are_one_clear_line_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOEBIUS_WORKER_MODEL", raising=False)
    assert "--model: Field required" in refused(capsys)
    assert "--listen: '1' is not an address" in refused(capsys, "--model", "m", "--listen", "1")
    assert "--max-running" in refused(capsys, "--model", "m", "--max-running", "0")
    assert "cannot read the settings file" in refused(capsys, "--config", str(tmp_path / "none.toml"))
    typo = tmp_path / "typo.toml"
    typo.write_text('model = "m"\nmax_runing = 3\n')
    assert "--max-runing" in refused(capsys, "--config", str(typo))


@pytest.mark.parametrize(
    ("address", "parts"), [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:65535", ("::1", 65535))]
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["localhost", ":1", "h:x", "h:65536", "h:-1", ""])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        split_address(address)


def test_the_front_knows_no_torch_and_no_engine() -> None:
    probe = (
        "import sys, moebius_worker.main, moebius_worker.front.server\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'moebius_kernels')"
        " or m.startswith('moebius_worker.engine')]\n"
        "sys.exit(f'the front imports {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
