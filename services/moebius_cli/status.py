"""`moebius status`: how the stack is, and what the controller did about it."""

import asyncio
import sys
import time
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moebius_cli.errors import shown
from moebius_cli.options import StateDirOption
from moebius_cli.state_dir import StateDir
from moebius_cli.view import StackView, WorkerView, view_stack

_ADAPTER = TypeAdapter(StackView)
_COLOURS = {"READY": "green", "LOADING": "yellow", "RESTARTING": "yellow", "DRAINING": "yellow"}
SHOWN_EVENTS = 12


def status(
    state_dir: StateDirOption,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the gateway, the workers, and what the controller did and why.

    Exits with status 1 when no stack runs.

    Examples: moebius status

    moebius status --json | jq '.workers[].state'
    """
    with shown():
        view = asyncio.run(view_stack(StateDir(state_dir)))
    if as_json:
        sys.stdout.write(_ADAPTER.dump_json(view, indent=2).decode() + "\n")
    elif view.running:
        show(Console(highlight=False), view)
    else:
        Console(highlight=False).print(
            f"No stack runs here (state directory {escape(str(state_dir))}). Start one: moebius up",
            soft_wrap=True,
        )
    if not view.running:
        raise typer.Exit(1)


def show(console: Console, view: StackView) -> None:
    """Of a stack that runs."""
    assert view.gateway is not None
    ready = (
        "[green]ready[/green]"
        if view.gateway.ready
        else f"[red]not ready[/red] {escape(view.gateway.detail)}"
    )
    console.print(f"model       {escape(view.model)}", soft_wrap=True)
    console.print(f"gateway     {escape(view.gateway.url)}  {ready}  pid {view.gateway.pid}", soft_wrap=True)
    console.print(f"controller  pid {view.controller_pid}\n")
    table = Table("worker", "state", "pid", "engine", "running", "waiting", "KV pages", "restarts", box=None)
    for worker in view.workers:
        table.add_row(*_row(worker))
    console.print(table)
    for worker in view.workers:
        if worker.fallback_level:
            console.print(
                f"\n{worker.name}: runs on fallback level {worker.fallback_level} ({worker.fallback_name})"
            )
        if worker.last_fault:
            console.print(f"\n{worker.name}: last fault: {escape(worker.last_fault)}", soft_wrap=True)
            console.print(f"  log: {escape(worker.log)}", soft_wrap=True)
    console.print("\nwhat the controller did and why")
    for event in view.events[-SHOWN_EVENTS:]:
        when = time.strftime("%H:%M:%S", time.localtime(event.time))
        console.print(f"  {when}  {event.worker}  {event.what}: {escape(event.reason)}", soft_wrap=True)


def _row(worker: WorkerView) -> tuple[str, ...]:
    colour = _COLOURS.get(worker.state, "red")
    pages = f"{worker.kv_pages_used} used, {worker.kv_pages_cached} cached of {worker.kv_pages_total}"
    restarts = f"{worker.engine_restarts} engine, {max(0, worker.starts - 1)} process"
    return (
        worker.name,
        f"[{colour}]{worker.state}[/{colour}]",
        str(worker.pid or "-"),
        str(worker.engine_pid or "-"),
        f"{worker.running} of {worker.max_running}",
        str(worker.waiting),
        pages,
        restarts,
    )
