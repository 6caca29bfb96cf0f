"""`moebius chat`: talks to the stack from the terminal."""

import asyncio
import sys
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from moebius_cli.api import Message, client, served_model, stream_chat
from moebius_cli.errors import CliError, shown
from moebius_cli.options import StateDirOption
from moebius_cli.state_dir import StateDir


def chat(
    state_dir: StateDirOption,
    question: Annotated[
        str | None, typer.Argument(help="One question; left out, a conversation begins.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Of a gateway elsewhere. Left out: of the stack that runs here.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Where the gateway needs one.", envvar="MOEBIUS_API_KEY")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Left out: the first that is served.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Limit on each answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
) -> None:
    """Talk to the model. Answers appear as they are generated.

    Examples: moebius chat "What is the capital of France?"

    moebius chat --system "Answer in one sentence."

    In a conversation: Ctrl-D or an empty line leaves, Ctrl-C stops an answer.
    """
    parameters: dict[str, object] = {"temperature": temperature}
    if max_tokens is not None:
        parameters["max_tokens"] = max_tokens
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    with shown():
        url = url or _running_url(StateDir(state_dir))
        if question is not None:
            messages.append({"role": "user", "content": question})
            asyncio.run(_answer(client(url, api_key), model, messages, parameters))
            return
        console = Console(stderr=True, highlight=False)
        console.print(f"[dim]Talking to {url}. Ctrl-D or an empty line leaves.[/dim]")
        while (asked := _ask(console)) is not None:
            messages.append({"role": "user", "content": asked})
            try:
                said = asyncio.run(_answer(client(url, api_key), model, messages, parameters))
            except KeyboardInterrupt:
                # The answer is dropped, and with it the question, so that the conversation stays whole.
                messages.pop()
                console.print("\n[dim](stopped)[/dim]")
                continue
            except CliError as error:
                # As well: what was too much or too long may be asked again.
                messages.pop()
                console.print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True)
                continue
            messages.append({"role": "assistant", "content": said})


def _running_url(state_dir: StateDir) -> str:
    record = state_dir.running()
    if record is None:
        raise CliError(f"No stack runs here (state directory {state_dir.path}). Start one: moebius up")
    return record.url


def _ask(console: Console) -> str | None:
    """What the user asks next; None when done."""
    try:
        return console.input("[bold]> [/bold]").strip() or None
    except EOFError:
        return None


async def _answer(
    gateway: httpx.AsyncClient, model: str | None, messages: list[Message], parameters: dict[str, object]
) -> str:
    """Prints the answer as it comes, and returns it."""
    said = []
    async with gateway:
        model = model or await served_model(gateway)
        async for text in stream_chat(gateway, model, messages, **parameters):
            said.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(said)
