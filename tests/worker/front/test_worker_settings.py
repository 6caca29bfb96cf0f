import subprocess
import sys

import pytest

from moebius_worker.main import main
from moebius_worker.settings import InjectedFault, WorkerSettings


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(flags)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_the_engine_gets_the_settings_of_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(
        model="m", kv_cache_memory="2GiB", inject_faults=(InjectedFault(token_id=1, action="kill"),)
    )
    monkeypatch.setenv("MOEBIUS_WORKER_MAX_RUNNING", "99")
    copy = WorkerSettings.model_validate_json(settings.model_dump_json())
    assert copy == settings
    assert copy.kv_cache_memory == 2 * 2**30


def test_mistakes_are_one_clear_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOEBIUS_WORKER_MODEL", raising=False)
    assert "--model: Field required" in refused(capsys)
    assert "--listen: '1' is not an address" in refused(capsys, "--model", "m", "--listen", "1")
    assert "--max-running" in refused(capsys, "--model", "m", "--max-running", "0")
    assert "--stall-timeout" in refused(capsys, "--model", "m", "--stall-timeout", "0")


def test_the_front_knows_no_torch_and_no_engine() -> None:
    probe = (
        "import sys, moebius_worker.main, moebius_worker.front.server\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'moebius_kernels')"
        " or m.startswith('moebius_worker.engine')]\n"
        "sys.exit(f'the front imports {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
