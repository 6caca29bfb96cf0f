"""The `moebius` command: what a person types."""

import io
import sys

import typer

from moebius_cli.bench.command import bench
from moebius_cli.chat import chat
from moebius_cli.inspect import inspect
from moebius_cli.kernels import kernels
from moebius_cli.keys import keys
from moebius_cli.preflight import preflight
from moebius_cli.sim import sim
from moebius_cli.status import status
from moebius_cli.up import up
from moebius_cli.upcycle import upcycle

app = typer.Typer(
    help="Serve Mixture-of-Experts language models behind an API that never stops.\n\nStart with: moebius up",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _any_command() -> None:
    # Where a terminal's encoding lacks a character, the others are shown all the same; what comes from one is
    # taken as arguments are.
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


for command in (up, status, chat, inspect, upcycle, preflight):
    app.command()(command)
# Its flags are the workers' own.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(sim)
app.add_typer(bench, name="bench")
app.add_typer(kernels, name="kernels")
app.add_typer(keys, name="keys")
