"""`moebius up` from start to end, and again: real workers, a tiny model, a real Ctrl-C."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import MOEBIUS, assert_one_line_says, moebius, processes_that_name
from tests.stack import Stack, free_port, stack, until
from tests.tiny import write_checkpoint

# Seconds for a start with everything in place, on two busy cores.
FAST = 40.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint; all processes of these tests name it."""
    folder = tmp_path_factory.mktemp("up")
    write_checkpoint(folder / "tiny-mixtral")
    return folder


async def test_up_serves_until_ctrl_c_and_leaves_nothing(home: Path) -> None:
    model, state = home / "tiny-mixtral", home / "state"
    async with stack(model, state) as running:
        status = await running.status()
        assert [worker["state"] for worker in status["workers"]] == ["READY", "READY"]
        assert [event["what"] for event in status["events"]].count("ready") == 2
        await _speaks_as_promised(running)

        another = await asyncio.to_thread(moebius, "up", "--model", model, "--state-dir", state)
        assert_one_line_says(another, "already running", running.url)

        said = await asyncio.to_thread(moebius, "chat", "Hello?", "--max-tokens", "8", "--state-dir", state)
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip()
        shown = await asyncio.to_thread(moebius, "status", "--state-dir", state)
        assert shown.returncode == 0
        assert "READY" in shown.stdout
        assert str(status["workers"][0]["pid"]) in shown.stdout
        assert processes_that_name(home)
    assert running.process.returncode == 0
    assert "Stopped." in running.log.read_text()
    assert processes_that_name(home) == []
    assert moebius("status", "--state-dir", state).returncode == 1

    started = time.monotonic()
    async with stack(model, state, workers=1):
        assert time.monotonic() - started < FAST
    assert processes_that_name(home) == []


async def _speaks_as_promised(running: Stack) -> None:
    """Steps with times, an answer, and how to ask more; none of it made for a terminal."""

    async def complete() -> bool:
        return "Ctrl-C stops it" in running.log.read_text()

    await until(complete, FAST, "moebius up says how to go on")
    text = running.log.read_text()
    for step in ("model", "workers", "gateway"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"✓ {step}"))
        assert line.endswith(" s")
    assert "> What is the capital of France?" in text
    assert f"curl {running.url}/v1/chat/completions" in text
    assert f'OpenAI(base_url="{running.url}/v1"' in text
    assert "\x1b" not in text


async def test_a_killed_worker_comes_back_and_up_tells_so(home: Path) -> None:
    async with stack(home / "tiny-mixtral", home / "state-killed", workers=1) as running:
        (before,) = (await running.status())["workers"]
        os.kill(before["pid"], signal.SIGKILL)

        async def back() -> dict[str, object] | None:
            status = await running.status()
            (worker,) = status["workers"]
            return status if worker["state"] == "READY" and worker["pid"] != before["pid"] else None

        status = await until(back, FAST, "the worker is back")
        told = [(event["what"], event["reason"]) for event in status["events"][-3:]]
        assert [what for what, _ in told] == ["died", "started", "ready"]
        assert "SIGKILL" in told[0][1]

        async def printed() -> bool:
            text = running.log.read_text()
            return "worker-0 died: it was killed by SIGKILL" in text and "worker-0 ready" in text

        await until(printed, 5, "moebius up tells it")


async def test_a_killed_controller_is_started_again_with_its_memory(home: Path) -> None:
    async with stack(home / "tiny-mixtral", home / "state-controller", workers=1) as running:
        before = await running.status()
        os.kill(before["controller_pid"], signal.SIGKILL)

        async def back() -> dict[str, object] | None:
            status = await running.status()
            ready = status["controller_pid"] != before["controller_pid"] and status["gateway"]["ready"]
            return status if ready and status["workers"][0]["starts"] == 2 else None

        after = await until(back, FAST, "controller and worker are back")
        assert after["gateway"]["pid"] == before["gateway"]["pid"]
        assert after["events"][: len(before["events"])] == before["events"]


async def test_the_death_of_up_takes_all_with_it(home: Path) -> None:
    state = home / "state-orphans"
    async with stack(home / "tiny-mixtral", state, workers=1) as running:
        family = psutil.Process(running.process.pid).children(recursive=True)
        assert len(family) >= 4  # controller, gateway, worker, engine
        running.process.kill()
        await running.process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=5)
        assert not alive
    assert moebius("status", "--state-dir", state).returncode == 1


async def test_a_second_ctrl_c_ends_at_once(home: Path) -> None:
    env = {"MOEBIUS_GATEWAY_DRAIN_GRACE": "30"}
    async with stack(home / "tiny-mixtral", home / "state-hurry", workers=1, env=env) as running:
        model = await running.model()
        async with running.client() as client:
            body = {"model": model, "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
                # The engine stops, so that the stream would hold the gateway's drain to its end.
                (worker,) = (await running.status())["workers"]
                os.kill(worker["engine_pid"], signal.SIGSTOP)
                running.process.send_signal(signal.SIGINT)
                await until(lambda: "Stopping" in running.log.read_text(), 5, "it is stopping")
                running.process.send_signal(signal.SIGINT)
                await asyncio.wait_for(running.process.wait(), 10)
    assert processes_that_name(home) == []


def test_once_is_a_smoke_test(home: Path) -> None:
    done = moebius(
        *("up", "--once", "--question", "Hello?", "--workers", "1", "--port", str(free_port())),
        *("--model", home / "tiny-mixtral", "--state-dir", home / "state-once"),
        timeout=FAST + 20,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> Hello?" in done.stdout
    assert "Stopped." in done.stdout
    assert processes_that_name(home) == []


async def test_a_model_without_chat_template_is_served_all_the_same(home: Path, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text("{}")
    async with stack(plain, home / "state-plain", workers=1) as running:
        await until(lambda: "Ctrl-C stops it" in running.log.read_text(), FAST, "it goes on")
        assert "Not answered" in running.log.read_text()
        async with running.client() as client:
            body = {"model": "plain", "prompt": "Once", "max_tokens": 4}
            assert (await client.post("/v1/completions", json=body)).status_code == 200


def test_ctrl_c_while_starting_leaves_nothing(home: Path) -> None:
    process = subprocess.Popen(
        [
            *(MOEBIUS, "up", "--port", str(free_port()), "--model", home / "tiny-mixtral"),
            *("--state-dir", home / "state-early"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert "model" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert "Traceback" not in output
    assert processes_that_name(home) == []
