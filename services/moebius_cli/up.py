"""`moebius up`: the whole stack on this machine, until Ctrl-C."""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.console import Console
from rich.markup import escape

from moebius_cli.api import client, stream_chat
from moebius_cli.children import Child
from moebius_cli.console import Step, step
from moebius_cli.errors import CliError, shown
from moebius_cli.memory import MemoryNeed, least_weight_bytes
from moebius_cli.model import prepare_model
from moebius_cli.options import StateDirOption
from moebius_cli.plan import (
    UpOptions,
    check_port,
    controller_command,
    gateway_command,
    model_name,
    plan_stack,
)
from moebius_cli.ports import hold_ports
from moebius_cli.state_dir import StateDir, UpRecord
from moebius_cli.view import WorkerView, read_state, view_gateway, view_workers
from moebius_controller.spec import StackSpec
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.host_memory import host_memory

# Longer than the gateway's and the workers' own grace periods, which are the ones that should end things.
STOP_GRACE = 40.0
# So many processes of a worker that died before any was ready are enough to call it hopeless.
HOPELESS_DEATHS = 2
POLL_SECONDS = 0.2
# How long the gateway may take, once the workers are ready, to load what makes text of tokens.
GATEWAY_PATIENCE = 15.0
EVENTS_SECONDS = 1.0


def up(
    state_dir: StateDirOption,
    model: Annotated[
        str | None,
        typer.Option(
            help="A checkpoint directory, a .gguf file, or a Hugging Face id (owner/name). "
            "Left out: the demo model, a small MoE that is made on first use."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            envvar="MOEBIUS_WORKER_SERVED_MODEL_NAME",
            help="What clients call the model. Left out: the name of its directory or file.",
        ),
    ] = None,
    engine: Annotated[
        Literal["model", "sim"],
        typer.Option(
            envvar="MOEBIUS_WORKER_ENGINE",
            help="sim: workers that compute nothing and take as long as MOEBIUS_WORKER_SIM (JSON) says.",
        ),
    ] = "model",
    workers: Annotated[
        int, typer.Option(min=1, help="Model workers. The API survives all but the last.")
    ] = 2,
    host: Annotated[
        str, typer.Option(help="Where the API listens. 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the API.")] = 8000,
    device: Annotated[
        str,
        typer.Option(
            envvar="MOEBIUS_WORKER_DEVICE", help="cpu, cuda, cuda:1; auto takes a GPU if there is one."
        ),
    ] = "auto",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="The first of the ports at which Prometheus finds the gateway, the controller and each "
            "worker. Left out: it finds none.",
        ),
    ] = None,
    log_format: Annotated[
        Literal["console", "json"], typer.Option(help="Of the files in the state directory's logs/.")
    ] = "console",
    question: Annotated[
        str, typer.Option(help="Asked once the stack is ready; empty asks nothing.")
    ] = "What is the capital of France?",
    once: Annotated[bool, typer.Option("--once", help="Stop after the answer, as a smoke test.")] = False,
) -> None:
    """Serve a model on this machine: gateway, health controller and workers, until Ctrl-C.

    Shows each step with its time, asks the model a question, and prints how to ask more. Every worker is
    restarted when it dies, and its requests go on elsewhere meanwhile: try kill -9 on one.

    Examples: moebius up

    moebius up --model ~/models/olmoe --workers 1 --port 9000

    moebius up --once --question "Say hello."
    """
    options = UpOptions(
        *(workers, model, host, port, device, log_format, StateDir(state_dir.resolve()), question, once),
        *(engine, metrics_port, served_model_name),
    )
    console = Console(highlight=False)
    with shown(), options.state_dir.locked():
        options.state_dir.clean()
        check_port(options.host, options.port)
        checkpoint = _prepare(options, console)
        with hold_ports(options.workers) as ports:
            stack = plan_stack(options, checkpoint, ports)
            options.state_dir.write_stack(stack)
            asyncio.run(_Up(options, checkpoint, stack, console).run())


def _prepare(options: UpOptions, console: Console) -> Checkpoint | None:
    """None if nothing but simulated words will be said."""
    with step(console, "model") as current:
        if options.engine == "sim" and options.model is None:
            current.result = "simulated"
            return None
        checkpoint = prepare_model(
            options.model, lambda what, done, total: current.update(_progress(what, done, total))
        )
        on_cpu = options.device == "cpu" or not Path("/dev/nvidiactl").exists()
        if options.engine == "model" and on_cpu:
            need = MemoryNeed(least_weight_bytes(checkpoint), options.workers)
            need.check(host_memory().available)
        current.result = f"{checkpoint.name} at {checkpoint.path}"
    return checkpoint


class _Up:
    """The stack while it runs."""

    def __init__(
        self, options: UpOptions, checkpoint: Checkpoint | None, stack: StackSpec, console: Console
    ) -> None:
        self._options = options
        self._stack = stack
        self._model = model_name(options, checkpoint)
        self._console = console
        state = options.state_dir
        self._gateway = Child("gateway", gateway_command(options, stack), state.log("gateway"), self._record)
        command = controller_command(options, state.stack_file)
        self._controller = Child("controller", command, state.log("controller"), self._record)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Returns when it was told to stop and all processes are gone. Raises CliError if it cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        # It is ignored when we were started by nohup.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        keeping: list[asyncio.Task[None]] = []
        try:
            for child in (self._controller, self._gateway):
                await child.start()
                keeping.append(asyncio.create_task(child.keep(self._say)))
            serving = asyncio.create_task(self._serve())
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        finally:
            await self._shut_down()
            await asyncio.gather(*keeping)

    async def _serve(self) -> None:
        with step(self._console, "workers") as current:
            await self._workers_ready(current)
        with step(self._console, "gateway") as current:
            await self._gateway_ready(current)
            current.result = f"ready at {self._options.url}"
        if self._options.question:
            await self._ask(self._options.question)
        self._show_how()
        if not self._options.once:
            await self._tell_events()

    async def _workers_ready(self, current: Step) -> None:
        while True:
            self._controller.check()
            self._gateway.check()
            views = await self._views()
            if all(view.state == "READY" for view in views):
                current.result = f"{len(views)} ready"
                return
            current.update(", ".join(map(_worker_progress, views)))
            await asyncio.sleep(POLL_SECONDS)

    async def _views(self) -> tuple[WorkerView, ...]:
        """Raises CliError for a worker that will never be ready."""
        _, control = read_state(self._options.state_dir)
        views = await view_workers(self._stack, control)
        for view in views:
            past = control.history.get(view.name) if control else None
            hopeless = past is not None and past.ready == 0 and past.deaths >= HOPELESS_DEATHS
            if view.state == "FAILED" or hopeless:
                reason = view.last_fault or "it ends at once"
                raise CliError(f"{view.name} cannot start: {reason}\nIts log: {view.log}")
        return views

    async def _gateway_ready(self, current: Step) -> None:
        """Raises CliError if a worker is ready for long and it is not, whose side of the model then cannot be
        used, or if a worker fails for good."""
        deadline = time.monotonic() + GATEWAY_PATIENCE
        while not (view := await view_gateway(self._options.url, self._gateway.pid)).ready:
            self._gateway.check()
            if not any(view.state == "READY" for view in await self._views()):
                # All died again already: the gateway has nobody to serve with.
                deadline = time.monotonic() + GATEWAY_PATIENCE
            elif time.monotonic() > deadline:
                raise CliError(
                    f"The gateway cannot serve the model: {view.detail}\nIts log: {self._gateway.log}"
                )
            current.update(view.detail)
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, question: str) -> None:
        self._console.print(f"\n[bold]> {escape(question)}[/bold]")
        started, pieces = time.monotonic(), 0
        messages = [{"role": "user", "content": question}]
        try:
            async with client(self._options.url) as gateway:
                async for text in stream_chat(gateway, self._model, messages, temperature=0, max_tokens=128):
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    pieces += 1
        except CliError as error:
            if self._options.once:
                raise
            # A model without a chat template, say; it can be asked otherwise.
            self._console.print(f"[yellow]Not answered:[/yellow] {escape(str(error))}", soft_wrap=True)
            return
        self._console.print(f"\n[dim]{pieces} pieces in {time.monotonic() - started:.1f} s[/dim]")

    def _show_how(self) -> None:
        url, model = escape(self._options.url), escape(self._model)
        logs = escape(str(self._options.state_dir.log("x").parent))
        self._console.print(
            f"""
The API is at [bold]{url}/v1[/bold]. Try:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  messages = [{{"role": "user", "content": "Hello!"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
      print(chunk.choices[0].delta.content or "", end="")

moebius chat talks to it, moebius status shows it, Ctrl-C stops it. Logs: {logs}""",
            markup=True,
            soft_wrap=True,
        )

    async def _tell_events(self) -> None:
        """Prints what happens to workers, and what is done about it, as it comes; until cancelled."""
        told = time.time()
        while True:
            try:
                _, control = read_state(self._options.state_dir)
            except CliError as error:
                # Whoever removed the files: the stack itself does not need them.
                self._say(str(error))
                await self._stop.wait()
                return
            news = [event for event in control.events if event.time > told] if control else []
            for event in news:
                when = time.strftime("%H:%M:%S", time.localtime(event.time))
                self._say(f"{when} {event.worker} {event.what}: {event.reason}")
                told = event.time
            await asyncio.sleep(EVENTS_SECONDS)

    async def _shut_down(self) -> None:
        """The gateway first: what it still streams comes from the workers."""
        if self._stop.is_set():
            self._console.print("\nStopping: streams may finish. Ctrl-C again ends everything at once.")
        stopping = asyncio.create_task(self._stop_in_order())
        hurrying = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({stopping, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not stopping.done():
            await self._gateway.kill()
            await self._controller.kill()
        await stopping
        self._console.print("Stopped.")

    async def _stop_in_order(self) -> None:
        await self._gateway.stop(STOP_GRACE)
        await self._controller.stop(STOP_GRACE)

    def _on_signal(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    def _on_hangup(self) -> None:
        """The terminal is gone, and writing to it would fail."""
        self._console.quiet = True
        self._on_signal()

    def _say(self, what: str) -> None:
        self._console.print(escape(what), soft_wrap=True)

    def _record(self) -> None:
        """For `moebius status` and `moebius chat`; written again whenever a process is."""
        own = psutil.Process(os.getpid())
        record = UpRecord(
            own.pid,
            own.create_time(),
            self._options.url,
            self._model,
            self._gateway.pid,
            self._controller.pid,
        )
        try:
            self._options.state_dir.write_record(record)
        except OSError as error:
            self._say(f"moebius status will not know of this: {error}")


def _progress(what: str, done: int, total: int) -> str:
    return f"{what} {done / total:.0%}" if total else what


def _worker_progress(view: WorkerView) -> str:
    if view.state == "LOADING" and view.load_bytes_total:
        return f"{view.name} {_progress(view.load_phase, view.load_bytes_done, view.load_bytes_total)}"
    return f"{view.name} {view.state.lower().replace('unreachable', 'starting')}"
