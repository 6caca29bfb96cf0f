"""`moebius up` with two workers, from its start to Ctrl-C, and the commands that a user types meanwhile.

The tests of the first stack run in the order in which they are written; the last one stops it.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.running_up import RunningUp, assert_gone, mentioning, running_up
from tests.stack import START_TIMEOUT
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.timeout(180)
SECONDS = r"\d+\.\d s"


@pytest.fixture(scope="module")
def up(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with running_up(tiny_model, tmp_path_factory.mktemp("up") / "state") as running:
        running.says("Ctrl-C stops it")
        yield running


def test_it_shows_each_step_with_its_time(up: RunningUp) -> None:
    for step in (
        rf"✓ model +tiny-moe at {up.model} {SECONDS}\n",
        rf"✓ workers +2 ready {SECONDS}\n",
        rf"✓ gateway +ready at {up.url} {SECONDS}\n",
    ):
        assert re.search(step, up.output), up.output


def test_it_asks_and_shows_the_answer(up: RunningUp) -> None:
    asked = re.search(
        rf"\n> What is the capital of France\?\n(.+)\n\d+ pieces in {SECONDS}\n", up.output, re.DOTALL
    )
    assert asked, up.output
    assert asked[1].strip()


def test_the_curl_line_works(up: RunningUp) -> None:
    line = re.search(r"^  (curl .*\\\n.*)$", up.output, re.MULTILINE)
    assert line, up.output
    _, url, header_flag, header, data_flag, data = shlex.split(line[1].replace("\\\n", " "))
    assert (header_flag, data_flag) == ("-H", "-d")
    name, value = header.split(": ")
    response = httpx.post(url, headers={name: value}, content=data, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["role"] == "assistant"


def test_the_openai_lines_work(up: RunningUp) -> None:
    program = re.search(r"^  from openai import OpenAI\n(?:  .*\n)+", up.output, re.MULTILINE)
    assert program, up.output
    lines = [line.removeprefix("  ") for line in program[0].splitlines()]
    assert len(lines) == 5
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def status(up: RunningUp, *flags: str) -> str:
    """When all have answered: each is asked for 2 s, in which a busy machine may not come to it."""

    def shown() -> str:
        done = up.command("status", *flags)
        assert done.returncode == 0, done.stderr
        return "" if re.search("UNREACHABLE|does not answer", done.stdout) else done.stdout

    return str(wait_for(shown, "all answer `moebius status`"))


def test_status_for_people(up: RunningUp) -> None:
    shown = status(up)
    assert re.search(r"^model +tiny-moe$", shown, re.MULTILINE)
    assert re.search(rf"^gateway +{up.url} +ready +pid \d+$", shown, re.MULTILINE)
    assert re.search(r"^controller +pid \d+$", shown, re.MULTILINE)
    for worker in ("worker-0", "worker-1"):
        assert re.search(rf"^ ?{worker} +READY +\d+ +\d+ ", shown, re.MULTILINE), shown
        assert re.search(rf"\d\d:\d\d:\d\d +{worker} +started: it is to run", shown)
        assert re.search(rf"\d\d:\d\d:\d\d +{worker} +ready: its engine serves", shown)


def test_status_for_programs(up: RunningUp) -> None:
    shown = json.loads(status(up, "--json"))
    assert shown["running"] is True
    assert shown["model"] == "tiny-moe"
    assert shown["gateway"]["url"] == up.url
    assert shown["gateway"]["ready"] is True
    assert [worker["state"] for worker in shown["workers"]] == ["READY", "READY"]
    assert {event["what"] for event in shown["events"]} == {"started", "ready"}
    pids = {process.pid for process in up.family()}
    named = {shown["gateway"]["pid"], shown["controller_pid"]}
    named |= {worker[key] for worker in shown["workers"] for key in ("pid", "engine_pid")}
    assert named == pids, "status names every process"
    assert all(Path(worker["log"]).is_file() for worker in shown["workers"])


def test_chat_answers_a_question(up: RunningUp) -> None:
    said = up.command("chat", "Say hello.", "--max-tokens", 8, "--temperature", 0)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
    assert said.stderr == ""


def test_chat_holds_a_conversation(up: RunningUp) -> None:
    flags = ("--max-tokens", 4, "--temperature", 0, "--system", "Be brief.")
    said = up.command("chat", *flags, stdin="First?\nSecond?\n\nNot asked\n")
    assert said.returncode == 0, said.stderr
    assert f"Talking to {up.url}" in said.stderr
    assert said.stderr.count("> ") == 3, "two questions, and the empty line that ends it"


def test_chat_tells_what_the_gateway_refuses(up: RunningUp) -> None:
    said = up.command("chat", "Hello?", "--model", "gpt-5")
    assert said.returncode == 1
    assert "gpt-5" in said.stderr
    assert "Traceback" not in said.stderr


def test_a_second_up_says_where_the_first_is(up: RunningUp) -> None:
    second = up.command("up", "--model", up.model)
    assert second.returncode == 1
    assert f"already running at {up.url}" in second.stderr
    assert "Traceback" not in second.stderr
    assert httpx.get(f"{up.url}/readyz", trust_env=False).status_code == 200, "the first is undisturbed"


@pytest.mark.timed
def test_a_killed_gateway_comes_back(up: RunningUp) -> None:
    def gateway() -> dict[str, object]:
        view: dict[str, object] = json.loads(up.command("status", "--json").stdout)["gateway"]
        return view

    killed = gateway()["pid"]
    assert isinstance(killed, int)
    os.kill(killed, signal.SIGKILL)
    up.says("gateway was killed by SIGKILL and is started again")
    wait_for(lambda: gateway()["pid"] != killed and gateway()["ready"], "another gateway is ready")


def test_ctrl_c_drains_and_leaves_nothing(up: RunningUp) -> None:
    family = up.family()
    assert len(family) == 6, "gateway, controller, and two each of worker and engine"
    body = {
        "model": "tiny-moe",
        "prompt": "Once",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        next(lines)
        up.process.send_signal(signal.SIGINT)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""], "the stream that ran was finished"
    assert up.ended() == 0
    assert_gone(family)
    assert not mentioning(up.model)
    assert "Stopping: streams may finish" in up.output
    assert up.output.endswith("Stopped.\n")
    assert "\x1b" not in up.output, "made for a terminal"
    assert "Traceback" not in up.output
    shown = up.command("status")
    assert shown.returncode == 1
    assert "No stack runs here" in shown.stdout
    assert json.loads(up.command("status", "--json").stdout)["running"] is False


def test_a_second_start_in_the_same_place_and_once(up: RunningUp) -> None:
    assert up.process.poll() is not None
    question = ("--question", "Say [bold]hello[/bold].")
    once = ("--model", up.model, "--workers", 1, "--port", up.url[-5:], "--once", *question)
    done = up.command("up", *once, seconds=START_TIMEOUT + PATIENCE)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"✓ workers +1 ready {SECONDS}\n", done.stdout), done.stdout
    assert "> Say [bold]hello[/bold].\n" in done.stdout
    assert done.stdout.endswith("Stopped.\n")
    assert not mentioning(up.model)


@pytest.mark.timed
def test_a_second_ctrl_c_does_not_wait(tiny_model: Path, tmp_path: Path) -> None:
    with running_up(tiny_model, tmp_path / "state", "--workers", "1") as up:
        # In the middle of a start is good enough: all processes are there.
        wait_for(lambda: len(up.engines()) == 1, f"an engine is started; output:\n{up.output}")
        family = up.family()
        assert len(family) == 4, "gateway, controller, worker and engine"
        for process in family:
            process.suspend()
        up.process.send_signal(signal.SIGINT)
        up.says("Ctrl-C again ends everything at once")
        up.process.send_signal(signal.SIGINT)
        # Less than the grace of one of them.
        assert up.ended(30) == 0
        assert_gone(family)
