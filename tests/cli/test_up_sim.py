"""`moebius up --engine sim`: the whole stack without a model."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from moebius_cli.plan import UpOptions, plan_stack
from moebius_cli.state_dir import StateDir
from moebius_common.settings import read_settings
from moebius_worker.settings import WorkerSettings
from tests.ports import free_port
from tests.stack import MOEBIUS


def test_its_workers_are_simulated(tmp_path: Path) -> None:
    options = UpOptions(2, None, "127.0.0.1", 8000, "cpu", "json", StateDir(tmp_path), "", False)
    stack = plan_stack(replace(options, engine="sim"), None, (20_000, 20_001))
    for worker in stack.workers:
        settings = read_settings(WorkerSettings, worker.argv[3:])
        assert (settings.engine, settings.model) == ("sim", "")


@pytest.mark.timeout(180)
def test_it_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(str(MOEBIUS), "up", "--engine", "sim", "--workers", "1", "--once"),
            *("--port", str(free_port()), "--state-dir", str(tmp_path), "--question", "Say something."),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"MOEBIUS_WORKER_SIM": '{"ttft": 0, "itl": 0.001, "answer_tokens": 20}'},
    )
    answer = done.stdout.partition("> Say something.")[2].partition(" pieces in ")[0]
    assert 10 <= len([word for word in answer.split() if word.isalpha()]) <= 31
