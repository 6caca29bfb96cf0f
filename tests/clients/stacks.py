"""The stacks that clients are shown against, as processes: run with the product's own Python.

    python -m tests.clients.stacks scripted|sim|real

prints the URL of the API on the first line, and serves until its standard input ends.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.clients.scripted_worker import ScriptedWorker
from tests.gateway.api.chatty import TEMPLATE
from tests.gateway.worker_standin import Plan, serving
from tests.ports import free_port
from tests.stack import stack
from tests.tiny import write_checkpoint, write_tokenizer
from tests.waiting import until

# Calls tools, and has reasoned already: a model that says random words would never find the end of that.
CALLING = (
    '{% if tools %}<tools>{{ tools | tojson }}</tools> call in <tool_call> with "arguments"\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
SIM = '{"ttft": 0.002, "itl": 0.001, "answer_tokens": 24}'


@asynccontextmanager
async def child(module: str, *arguments: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=sys.stderr, env=os.environ
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def gateway(worker: str) -> AsyncIterator[str]:
    """Its URL, when it is ready."""
    address = f"127.0.0.1:{free_port()}"
    async with child("moebius_gateway", "--listen", address, "--workers", worker, "--drain-grace", "1"):
        url = f"http://{address}"
        await until(lambda: _ready(url), "the gateway is ready")
        yield url


async def _ready(url: str) -> bool:
    try:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{url}/readyz")).status_code == 200
    except httpx.TransportError:
        return False


def _chatty_tokenizer(folder: Path) -> None:
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _checkpoint(folder: Path) -> Path:
    write_checkpoint(folder)
    (folder / "chat_template.jinja").write_text(CALLING)
    return folder


@asynccontextmanager
async def scripted(folder: Path) -> AsyncIterator[str]:
    """A worker that says what is scripted."""
    _chatty_tokenizer(folder)
    files = tuple((file.name, file.read_bytes()) for file in sorted(folder.iterdir()))
    plan = Plan(rate=2000, model="clerk", max_model_len=8192, tokenizer=files)
    async with (
        serving(ScriptedWorker(plan, folder / "tokenizer.json")) as port,
        gateway(f"127.0.0.1:{port}") as url,
    ):
        yield url


@asynccontextmanager
async def sim(folder: Path) -> AsyncIterator[str]:
    """A simulated engine: it keeps to grammars, and says random words."""
    checkpoint = _checkpoint(folder / "tiny")
    worker = f"127.0.0.1:{free_port()}"
    flags = ("--engine", "sim", "--sim", SIM, "--model", str(checkpoint), "--listen", worker)
    async with child("moebius_worker", *flags), gateway(worker) as url:
        yield url


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[str]:
    """`moebius up` with a small random MoE that is really computed."""
    checkpoint = _checkpoint(folder / "tiny")
    async with stack(checkpoint, folder / "state", workers=1) as running:
        yield running.url


STACKS = {"scripted": scripted, "sim": sim, "real": real}


async def main(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with STACKS[kind](Path(folder)) as url:
            print(url, flush=True)  # noqa: T201
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
