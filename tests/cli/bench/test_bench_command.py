"""`moebius bench serve` as it is typed, against a scripted endpoint and against the simulated engine."""

import asyncio
import json
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moebius_cli.bench.result import read_result, write_result
from moebius_cli.main import app
from tests.bench.rig import gateway, simulated
from tests.cli.bench.results import level, result
from tests.cli.bench.scripted import scripted
from tests.cli.refusal import refused
from tests.stack import MOEBIUS
from tests.waiting import PATIENCE


def bench(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.timed
def test_a_sweep(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    with scripted(ttft=0.03, itl=0.005, template_tokens=8, word_tokens=2) as endpoint:
        output = bench(
            *("--url", endpoint.url, "--concurrency", "1,3", "--requests", 7, "--out", out),
            *("--input-tokens", 48, "--output-tokens", 9, "--shared-prefix", 20),
        )
    measured = read_result(out)
    assert (measured.model, measured.url) == ("clerk", endpoint.url + "/v1")
    assert [(one.load.value, one.completed, one.failed) for one in measured.levels] == [(1, 7, 0), (3, 7, 0)]
    assert [one.peak_in_flight for one in measured.levels] == [1, 3]
    assert endpoint.peak == 3
    for one in measured.levels:
        assert (one.input_tokens, one.output_tokens, one.token_source) == (48, 9, "usage")
        assert one.ttft is not None
        assert one.itl is not None
        assert 0.03 <= one.ttft.p50 < 0.2
        # A few that are late move the mean, but not this.
        assert one.itl.p50 < 0.05
        # A first token that is read late makes what follows look quick; together they are what they are.
        assert one.ttft.mean + 8 * one.itl.mean >= 0.03 + 8 * 0.005 - 0.001
    prompts = [body["messages"][0]["content"].split() for body in endpoint.bodies]
    asked = [body["max_tokens"] for body in endpoint.bodies]
    # A word to find the dialect, two probes of lengths; then each level: warmed with its streams, measured.
    assert asked == [1, 1, 1, *[9] * 1, *[9] * 7, *[9] * 3, *[9] * 7]
    levels = prompts[3:]
    assert {len(prompt) for prompt in levels} == {20}
    assert len({tuple(prompt[:10]) for prompt in levels}) == 1
    assert len({tuple(prompt) for prompt in levels}) == len(levels)
    assert "Input tokens 48, output tokens 9 (ignore_eos)." in output


def test_a_sweep_with_an_open_loop_and_failures(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    # One for the dialect, two probes, twenty to warm a rate of 20, and six good ones.
    with scripted(good=1 + 2 + 20 + 6) as endpoint:
        output = bench("--url", endpoint.url, "--rate", 20, "--requests", 10, "--out", out)
    (only,) = read_result(out).levels
    assert (only.load.kind, only.completed, only.failed) == ("rate", 6, 4)
    assert "At 20/s, 4 failed: HTTP 500 (internal_error): no more" in output


def test_a_sweep_in_which_nothing_is_answered() -> None:
    with scripted(good=3) as endpoint:
        output = bench("--url", endpoint.url, "--concurrency", 2, "--requests", 2, status=1)
    assert "2 failed: HTTP 500" in output
    assert "No request was answered." in output


@pytest.mark.timed
def test_what_was_measured_before_an_interrupt_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    # More levels than end before the interrupt comes.
    levels = ",".join(map(str, range(1, 60)))
    with scripted(itl=0.001) as endpoint:
        flags = ("--concurrency", levels, "--duration", "0.5", "--output-tokens", "8", "--out", out)
        process = subprocess.Popen(
            [MOEBIUS, "bench", "serve", "--url", endpoint.url, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("concurrency 2 "):
                process.send_signal(signal.SIGINT)
                break
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert read_result(out).levels[0].load.value == 1
    assert "tokens/s" in output


def test_two_results_are_compared(tmp_path: Path) -> None:
    a, b = tmp_path / "old.json", tmp_path / "new.json"
    write_result(a, result(level(8, output_rate=100.0)))
    write_result(b, result(level(8, output_rate=150.0), level(16), model="other"))
    output = bench("--compare", a, b)
    for words in (
        "old.json",
        "new.json",
        "+50.0%",
        "model: clerk in A, other in B",
        "only B has the levels 16",
    ):
        assert words in output


def test_results_without_a_common_level(tmp_path: Path) -> None:
    write_result(tmp_path / "a.json", result(level(8)))
    write_result(tmp_path / "b.json", result(level(4)))
    output = bench("--compare", tmp_path / "a.json", tmp_path / "b.json", status=1)
    assert "no level in common" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--concurrency", "1,x"), "--concurrency '1,x'"),
        (("--concurrency", "0"), "above 0"),
        (("--concurrency", "1.5"), "whole"),
        (("--concurrency", "8,8"), "once"),
        (("--rate", "nan"), "--rate 'nan'"),
        (("--rate", "inf"), "--rate 'inf'"),
        (("--duration", "5", "--requests", "5"), "not both"),
        (("--input-tokens", "8", "--shared-prefix", "8"), "--shared-prefix 8"),
        (("--url", "localhost:8000"), "no address"),
        (("--url", "http://[::"), "--url"),
        (("--out", "/no/such/folder/a.json"), "/no/such/folder is no directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("bench", "serve", *arguments)


def test_where_no_stack_runs(tmp_path: Path) -> None:
    assert "--url" in refused("bench", "serve", "--state-dir", tmp_path)


def test_help_teaches_by_example() -> None:
    assert "moebius bench serve " in bench("--help").partition("Examples")[2]


@pytest.mark.timed
async def test_the_simulated_engine_behind_its_gateway(tmp_path: Path) -> None:
    """The times are those that the engine was told to take; a step more is the scheduler's."""
    out = tmp_path / "a.json"
    flags = ("--sim.ttft", "0.1", "--sim.itl", "0.02", "--sim.jitter", "0", "--sim.answer-tokens", "4")
    async with simulated(*flags) as workers, gateway(workers) as running:
        process = await asyncio.create_subprocess_exec(
            *(MOEBIUS, "bench", "serve", "--url", f"http://127.0.0.1:{running.port}"),
            *("--concurrency", "1,4", "--duration", "1", "--output-tokens", "20", "--out", out),
            stdout=subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0, output
    measured = json.loads(out.read_text())
    assert measured["length_control"] == "ignore_eos"
    for one in measured["levels"]:
        assert one["errors"] == []
        # Answers that would end at 4 tokens by themselves.
        assert (one["output_tokens"], one["short_outputs"]) == (20, 0)
        # A token of this tokenizer is a letter, and words are drawn.
        assert one["input_tokens"] == pytest.approx(128, abs=30)
        assert 0.1 <= one["ttft"]["p50"] < 0.5
        assert one["itl"]["mean"] < 0.06
        # A first token that is read late makes what follows look quick; together they are what they are.
        assert one["ttft"]["mean"] + 19 * one["itl"]["mean"] >= 0.1 + 19 * 0.02 - 0.01
        assert one["token_source"] == "usage"
    single, four = measured["levels"]
    assert four["output_rate"] > 1.5 * single["output_rate"]
