"""The local driver with real processes and real signals."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moebius_controller.decide import decide
from moebius_controller.events import What
from moebius_controller.history import remember
from moebius_controller.local import worker
from moebius_controller.local.driver import LocalDriver
from moebius_controller.policy import Policy
from moebius_controller.probe import Rhythm
from moebius_controller.types import Past, Start
from tests.controller.processes import controlled, giving_up, gone, impatient, shell, standin
from tests.gateway.worker_standin import Plan, StandIn, serving


async def test_a_killed_worker_is_restarted_with_back_off(
    tmp_path: Path,
) -> None:
    specs = standin(tmp_path, "worker-0"), standin(tmp_path, "worker-1")
    async with controlled(tmp_path, *specs, restart_delay=0.2) as stack:
        neighbour = await stack.ready(name="worker-1")
        for run in (1, 2):
            os.kill(await stack.ready(run), signal.SIGKILL)
        await stack.ready(3)
        deaths, starts = stack.told(What.DIED), await stack.happened(What.STARTED)
        assert [(death.worker, death.reason) for death in deaths] == [
            ("worker-0", "it was killed by SIGKILL")
        ] * 2
        assert [start.reason for start in starts] == ["it is to run", *["it was killed by SIGKILL"] * 2]
        waits = [start.time - death.time for death, start in zip(deaths, starts[1:], strict=True)]
        # 0.2 s, then 0.4 s, spread by a quarter; more on a busy machine.
        assert waits[0] >= 0.15
        assert waits[1] >= 0.3
        assert stack.view("worker-1").pid == neighbour


@pytest.mark.timed
async def test_a_stopped_worker_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One question without an answer, which a busy machine may cause, is not silence enough.
    monkeypatch.setattr(worker, "RHYTHM", Rhythm(interval=0.25, timeout=1.0))
    async with controlled(
        tmp_path, standin(tmp_path), ladder=impatient(silent=2), restart_delay=0.1
    ) as stack:
        stopped = await stack.ready()
        os.kill(stopped, signal.SIGSTOP)
        assert await stack.ready(2) != stopped
        await gone(stopped)
        (killed,) = stack.told(What.KILLED)
        assert killed.reason.startswith("it has not answered for")
        assert [event.reason for event in stack.told(What.DIED)] == ["it was killed by SIGKILL"]


async def test_a_level_that_the_last_process_was_to_take_up_is_there_for_the_next(tmp_path: Path) -> None:
    spec = shell(tmp_path, "exec sleep 1000")
    (seen,) = LocalDriver([spec], {}).view().observations
    past = Past(seen=3, started=3, dead=3, level=1, level_body=3, revision=seen.revision)
    driver = LocalDriver([spec], {spec.name: past})
    (action,) = decide(driver.view().observations, {spec.name: past}, Policy(), 1e9)
    assert isinstance(action, Start)
    assert await driver.perform(action)
    hurry = asyncio.Event()
    hurry.set()
    await driver.stop(5, hurry)
    assert '"1"' in spec.log.with_suffix(".level").read_text()


async def test_one_that_never_answers_is_killed_after_the_start_timeout(tmp_path: Path) -> None:
    async with controlled(tmp_path, shell(tmp_path, "exec sleep 1000"), ladder=impatient(mute=0.5)) as stack:
        await stack.happened(What.STARTED, 2)
        assert "did not answer" in stack.told(What.KILLED)[0].reason


async def test_what_somebody_else_answers_at_the_address_is_not_believed(tmp_path: Path) -> None:
    async with serving(StandIn(Plan())) as port:
        spec = replace(shell(tmp_path, "exec sleep 1000"), listen=f"127.0.0.1:{port}")
        async with controlled(tmp_path, spec, ladder=impatient(mute=0.5)) as stack:
            await stack.happened(What.KILLED)
            assert not stack.told(What.READY)


async def test_a_crash_loop_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    spec = shell(tmp_path, "echo loading; echo 'no luck today' >&2; exit 3")
    async with controlled(tmp_path, spec, restart_delay=0.02, ladder=giving_up(3), retry_delay=600) as stack:
        (given_up,) = await stack.happened(What.GAVE_UP)
        assert given_up.run == 3
        assert "died 3 times in a row" in given_up.reason
        assert "it exited with status 3: no luck today" in given_up.reason
        assert len(stack.told(What.STARTED)) == 3
        assert stack.view().pid is None
        assert stack.view().death == "it exited with status 3: no luck today"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("/no/such/program",), "cannot run /no/such/program: No such file or directory"),
        (("true", "x" * 1_000_000), "it could not be started: [Errno 7] Argument list too long"),
        (("sh", "-c", "exit 5"), "it exited with status 5"),
        (("sh", "-c", "kill -SEGV $$"), "it was killed by SIGSEGV"),
        ((sys.executable, "-c", "raise RuntimeError('bad weights')"), "RuntimeError: bad weights"),
    ],
)
async def test_why_a_start_failed_is_told(tmp_path: Path, argv: tuple[str, ...], reason: str) -> None:
    spec = replace(shell(tmp_path, ""), argv=argv)
    async with controlled(tmp_path, spec) as stack:
        (died, *_) = await stack.happened(What.DIED)
        assert reason in died.reason


async def test_a_disk_that_takes_nothing_more_keeps_no_worker_down(tmp_path: Path) -> None:
    spec = standin(tmp_path)
    async with controlled(tmp_path, spec, restart_delay=0.05) as stack:
        first = await stack.ready()
        # Where files would be written are folders.
        spec.log.with_suffix(".level.new").mkdir()
        spec.log.unlink()
        spec.log.mkdir()
        os.kill(first, signal.SIGKILL)
        await stack.ready(2)
        assert not stack.told(What.LEVEL_SET)


async def test_ends_that_were_asked_for_are_held_against_nobody(tmp_path: Path) -> None:
    async with controlled(
        tmp_path, shell(tmp_path, "exit 0"), ladder=giving_up(3), restart_delay=0.02
    ) as stack:
        starts = await stack.happened(What.STARTED, 6)
        assert not stack.told(What.GAVE_UP)
    # Still, what ends at once is not started without a pause.
    assert starts[-1].time - starts[0].time >= 5 * 0.75 * 0.02


def test_controllers_that_died_are_held_against_no_worker(tmp_path: Path) -> None:
    spec = shell(tmp_path, "exec sleep 1000")
    (seen,) = LocalDriver([spec], {}).view().observations
    history = {spec.name: Past(seen=1, started=1, ready=1, levels=3, revision=seen.revision)}
    for look in range(1, 9):
        observations = LocalDriver([spec], history).view().observations
        # The first look sees the death, the second is after the pause.
        for now in (10.0 * look, 10.0 * look + 5):
            actions = decide(observations, history, Policy(), now)
            history = remember(history, observations, actions, Policy(), now)
    assert history[spec.name].started > 4
    assert history[spec.name].level == 0


async def test_environment_and_output_are_the_workers_own(tmp_path: Path) -> None:
    spec = replace(shell(tmp_path, 'echo "$COLOUR" >> "$0"; echo out; echo err >&2'), env={"COLOUR": "green"})
    spec = replace(spec, argv=(*spec.argv, str(tmp_path / "said")), log=tmp_path / "logs" / "new.log")
    async with controlled(tmp_path, spec, restart_delay=0.02) as stack:
        await stack.happened(What.DIED, 2)
    assert (tmp_path / "said").read_text().splitlines()[:2] == ["green", "green"]
    # Appended to by each process in turn.
    assert spec.log.read_text().splitlines()[:4] == ["out", "err", "out", "err"]
