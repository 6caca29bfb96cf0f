"""What an endpoint serves, which parameters it takes, and how long its prompts must be."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import httpx

from moebius_cli.bench.connections import Connections
from moebius_cli.bench.prompts import WORDS
from moebius_cli.bench.result import LengthControl
from moebius_cli.bench.stream import RequestError, Stream, Tally, ask, refusal
from moebius_cli.errors import CliError

# What an endpoint answers to a parameter that it does not know.
UNKNOWN_PARAMETER = (400, 422)


@dataclass(frozen=True)
class Dialect:
    """Which parameters the endpoint takes."""

    length_control: LengthControl = "ignore_eos"
    # Whether it tells token counts at the end of a stream.
    usage: bool = True
    limit: str = "max_tokens"

    def body(self, model: str, prompt: str, output_tokens: int) -> bytes:
        """Of a request for exactly so many tokens, as far as the endpoint can be told so."""
        fields: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            self.limit: output_tokens,
        }
        if self.usage:
            fields["stream_options"] = {"include_usage": True}
        if self.length_control == "ignore_eos":
            fields["ignore_eos"] = True
        elif self.length_control == "min_tokens":
            fields["min_tokens"] = output_tokens
        return json.dumps(fields).encode()


# The fullest first.
CONTROLS: tuple[LengthControl, ...] = ("ignore_eos", "min_tokens", "none")
DIALECTS = tuple(
    Dialect(control, usage, limit)
    for limit, usage, control in itertools.product(
        ("max_tokens", "max_completion_tokens"), (True, False), CONTROLS
    )
)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt of n words: `overhead` (the chat template) + n * `per_word`."""

    per_word: float = 1.0
    overhead: float = 0.0

    def words(self, tokens: int) -> int:
        """How many words make a prompt of so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.per_word))


@dataclass(frozen=True)
class Endpoint:
    model: str
    dialect: Dialect
    # None: the endpoint does not tell how long prompts are.
    lengths: Lengths | None


async def examine(connections: Connections, model: str | None, limit: float) -> Endpoint:
    """Asks the endpoint a few short questions, each for at most `limit` seconds.

    Raises CliError in its words if it does not answer them.
    """
    async with connections.one() as client:
        model = model or await first_model(client)
        dialect = await _find_dialect(client, model, limit)
        asked = [await _probe(client, dialect, model, rounds, limit) for rounds in (1, 2)]
    return Endpoint(model, dialect, fitted(asked[0].input_tokens, asked[1].input_tokens))


def fitted(once: int | None, twice: int | None) -> Lengths | None:
    """From the tokens of the prompts that have every word once and twice."""
    if once is None or twice is None or twice <= once:
        return None
    return Lengths((twice - once) / len(WORDS), 2 * once - twice)


async def first_model(client: httpx.AsyncClient) -> str:
    """Raises CliError if the endpoint names none."""
    try:
        response = await client.get("models", timeout=60.0)
        if response.is_error:
            said = refusal(response.status_code, response.content)
            raise CliError(
                f"{response.url} answers {said.kind}: {said}. "
                "If it has no list of models, name one with --model."
            )
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise CliError(f"Nobody answers at {client.base_url}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CliError(f"{client.base_url}models lists no model: name one with --model.") from error


async def _find_dialect(client: httpx.AsyncClient, model: str, limit: float) -> Dialect:
    for dialect in DIALECTS:
        stream = await ask(client, dialect.body(model, "Hello!", 1), limit, Tally())
        if stream.error is None or stream.error.status not in UNKNOWN_PARAMETER:
            break
    _check(client, stream.error)
    return dialect


async def _probe(
    client: httpx.AsyncClient, dialect: Dialect, model: str, rounds: int, limit: float
) -> Stream:
    body = dialect.body(model, " ".join(WORDS * rounds), 1)
    stream = await ask(client, body, limit, Tally())
    _check(client, stream.error)
    return stream


def _check(client: httpx.AsyncClient, error: RequestError | None) -> None:
    """One token may well be without text; the rest of the answer is all that is wanted here."""
    if error is not None and error.kind != "no text":
        raise CliError(f"{client.base_url}chat/completions cannot be measured: {error.kind}: {error}")
