"""`moebius-controller` as a process: no worker outlives it, and it comes back with its memory."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from moebius_controller.events import What
from moebius_controller.settings import ControllerSettings
from moebius_controller.spec import StackSpec, write_stack
from tests.cluster_fakes import FakeApi
from tests.controller.cluster import LEASE, deletions, put_pod
from tests.controller.processes import (
    ControllerProcess,
    controller_process,
    gone,
    shell,
    standin,
)
from tests.ports import free_port
from tests.waiting import PATIENCE, until

# Deaf to SIGTERM, from when it says so.
DEAF = "trap '' TERM; echo deaf; while true; do sleep 0.1; done"


async def deaf(controller: ControllerProcess, folder: Path) -> int:
    """Waits until the worker is deaf; returns its process id."""
    pid = await controller.running()
    log = folder / "worker-0.log"
    await until(lambda: "deaf" in log.read_text(), f"'deaf' in {log}")
    return pid


async def test_metrics_are_served_and_sigterm_ends_all_workers(tmp_path: Path) -> None:
    specs = standin(tmp_path, "worker-0"), shell(tmp_path, "exec sleep 1000", "worker-1")
    address = f"127.0.0.1:{free_port()}"
    async with controller_process(tmp_path, *specs, metrics_listen=address) as controller:
        pids = await controller.ready(), await controller.running("worker-1")
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{address}/metrics")).text
        assert 'moebius_controller_worker_state{state="READY",worker="worker-0"} 1.0' in text
        assert 'moebius_controller_events_total{event="started",worker="worker-1"} 1.0' in text
        controller.process.send_signal(signal.SIGTERM)
        assert await controller.ended() == 0
        await gone(*pids)
        assert {view.death for view in controller.state().processes.values()} == {"it was killed by SIGTERM"}


async def test_a_worker_that_does_not_end_is_killed(tmp_path: Path) -> None:
    async with controller_process(tmp_path, shell(tmp_path, DEAF), stop_grace=0.5) as controller:
        pid = await deaf(controller, tmp_path)
        controller.process.send_signal(signal.SIGINT)
        assert await controller.ended() == 0
        await gone(pid)
        assert controller.view().death == "it was killed by SIGKILL"


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async with controller_process(tmp_path, shell(tmp_path, DEAF), stop_grace=600) as controller:
        pid = await deaf(controller, tmp_path)
        controller.process.send_signal(signal.SIGTERM)
        await controller.logged("stopping")
        controller.process.send_signal(signal.SIGTERM)
        assert await controller.ended() == 0
        await gone(pid)
        assert controller.view().death == "it was killed by SIGKILL"


async def test_no_worker_outlives_a_killed_controller_and_the_next_one_remembers(tmp_path: Path) -> None:
    spec = standin(tmp_path)
    async with controller_process(tmp_path, spec) as controller:
        first = await controller.ready()
        controller.process.kill()
        await controller.ended()
        await gone(first)
    async with controller_process(tmp_path, spec, restart_delay=0.1) as controller:
        await controller.ready(2)
        told = [(event.what, event.run) for event in controller.state().events]
        assert told == [
            (What.STARTED, 1),
            (What.READY, 1),
            (What.DIED, 1),
            (What.STARTED, 2),
            (What.READY, 2),
        ]
        assert controller.told(What.STARTED)[1].reason == "the controller that had started it is gone"


async def test_a_damaged_memory_is_said_and_done_without(tmp_path: Path) -> None:
    memory, damaged = tmp_path / "controller.json", '{"pid": 1, "hist'
    memory.write_text(damaged)
    async with controller_process(tmp_path, shell(tmp_path, "exec sleep 1000")) as controller:
        await controller.logged("starting without a history")
        await controller.logged("worker started")
        await until(lambda: memory.read_text() != damaged, "what it knows now is kept")
        assert await controller.running()


@asynccontextmanager
async def of_a_cluster(folder: Path, api: FakeApi) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`moebius-controller --driver kubernetes`, and where it answers."""
    config = folder / "kubeconfig"
    config.write_text(
        f"""
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{api.port}"}}}}]
users: [{{name: u, user: {{}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u, namespace: default}}}}]
current-context: x
"""
    )
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moebius_controller", "--driver", "kubernetes"),
        *("--metrics-listen", address),
        env={**os.environ, "KUBECONFIG": str(config)},
    )
    try:
        yield process, f"http://{address}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_on_a_cluster_it_says_how_it_is_and_leaves_the_pods_when_it_ends(tmp_path: Path) -> None:
    with FakeApi() as api:
        api.faults.refuse = 403
        async with of_a_cluster(tmp_path, api) as (process, url), httpx.AsyncClient(trust_env=False) as http:

            async def status(path: str) -> int:
                try:
                    return (await http.get(f"{url}{path}")).status_code
                except httpx.TransportError:
                    return 0

            async def is_(path: str, code: int) -> bool:
                return await status(path) == code

            await until(lambda: is_("/healthz", 200), "it lives")
            assert await status("/readyz") == 503
            api.faults.refuse = None
            await until(lambda: is_("/readyz", 200), "it sees the pods")
            put_pod(api, "w-0", free_port())

            async def text() -> str:
                return (await http.get(f"{url}/metrics")).text

            async def seen() -> bool:
                return 'worker_state{state="SILENT",worker="w-0"} 1.0' in await text()

            await until(seen, "it sees the worker")

            async def leads() -> bool:
                return "moebius_controller_leader 1.0" in await text()

            await until(leads, "it leads")
            assert 'moebius_controller_discovery_synced{kind="pods"} 1.0' in await text()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
            assert not deletions(api)
            lease = api.get(LEASE)
            assert lease is not None
            assert lease["spec"]["holderIdentity"] == ""


def told(*flags: str | Path, **env: str) -> str:
    """What a controller that ends at once says, on stdout if all is well."""
    done = subprocess.run(
        [sys.executable, "-m", "moebius_controller", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | env,
        check=False,
    )
    assert (done.returncode == 0) == ("--help" in flags)
    return done.stdout if done.returncode == 0 else f"{done.returncode}: {done.stderr}"


def test_mistakes_are_told(tmp_path: Path) -> None:
    none, damaged, stack = (tmp_path / name for name in ("none.json", "damaged.json", "stack.json"))
    damaged.write_text('{"workers": [{"name": "w"}]}')
    write_stack(stack, StackSpec(()))
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor() as pool:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        wrong = ("--min-ready", "-1", "--ladder", '[{"when": "dead", "step": "jump"}]')
        cases: dict[tuple[str | Path, ...], tuple[str, ...]] = {
            ("--stack", none): ("1: ", f"cannot read the stack file {none}"),
            ("--stack", damaged): ("1: ", f"cannot read the stack file {damaged}"),
            (): ("2: ", "--driver local needs --stack"),
            ("--stack", stack, *wrong): (
                "2: ",
                "--min-ready: Input should be greater than or equal to 0",
                "--ladder.0.step: Input should be 'replace'",
            ),
            ("--stack", stack, "--metrics-listen", address): (
                "1: ",
                f"cannot serve metrics on {address} (Address already in use)",
                "--metrics-listen",
            ),
        }
        for said, words in zip(pool.map(lambda flags: told(*flags), cases), cases.values(), strict=True):
            assert said.startswith(words[0]), said
            assert all(word in said for word in words), said


def test_without_a_cluster_it_says_so(tmp_path: Path) -> None:
    said = told("--driver", "kubernetes", KUBECONFIG=str(tmp_path / "none"))
    assert "\nmoebius-controller: the Kubernetes API cannot be reached" in said


def test_help_explains_every_setting() -> None:
    text = told("--help")
    for name, setting in ControllerSettings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert setting.description
