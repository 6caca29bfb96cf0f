"""API keys as a file has them: a hash and a name each, and what the client may have. Pure text and data.

Two forms. TOML, as `moebius keys add` writes it:

    [[keys]]
    name = "team-a"
    hash = "sha256:..."
    priority = "high"
    max_concurrent = 8
    requests_per_minute = 600
    tokens_per_minute = 100000

and, without limits, one a line: `team-a sha256:...`.
"""

import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moebius_gateway.admission.limits import Client, ClientLimits, Priority

# Makes keys recognisable, above all where they should not be: in logs.
PREFIX = "sk-moebius-"
HASH = re.compile(r"sha256:[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


class KeysError(ValueError):
    """The text is no list of keys; the message says where and why, without quoting what may be a key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`hash`: "sha256:" and the digest in hex."""

    hash: str
    client: Client


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    hash: Annotated[str, Field(pattern=f"^{HASH.pattern}$")]
    priority: Literal["high", "normal", "low"] = "normal"
    max_concurrent: Annotated[int, Field(gt=0)] | None = None
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None

    def key(self) -> ApiKey:
        limits = ClientLimits(
            Priority[self.priority.upper()],
            self.max_concurrent,
            self.requests_per_minute,
            self.tokens_per_minute,
        )
        return ApiKey(self.hash, Client(self.name, limits))


def new_key() -> str:
    """256 bits that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    # Keys are random, not chosen by people: a fast hash without salt cannot be turned back either.
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Raises `KeysError`."""
    entries = _from_toml(text) if re.search(r"^\s*\[\[", text, re.MULTILINE) else _from_lines(text)
    for what in ("name", "hash"):
        values = [getattr(entry, what) for entry in entries]
        twice = [number for number, value in enumerate(values, 1) if value in values[: number - 1]]
        if twice:
            raise KeysError(f"key {twice[0]} has the {what} of one before it")
    return tuple(entry.key() for entry in entries)


def written(keys: Iterable[ApiKey]) -> str:
    """The text that `parse_keys` reads, in TOML."""
    return "\n".join(_written(key) for key in keys)


def _written(key: ApiKey) -> str:
    limits = key.client.limits
    values: dict[str, Any] = {
        "name": key.client.name,
        "hash": key.hash,
        "priority": limits.priority.name.lower(),
        "max_concurrent": limits.max_concurrent,
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
    }
    # Of such plain values JSON and TOML have the same spelling.
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
    return "\n".join(["[[keys]]", *lines, ""])


def _from_toml(text: str) -> Sequence[_Entry]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KeysError(f"not TOML: {error}") from None
    if unknown := content.keys() - {"keys"}:
        raise KeysError(f"there is {sorted(unknown)[0]!r} beside 'keys'")
    return [_entry(f"key {number}", values) for number, values in enumerate(content["keys"], 1)]


def _from_lines(text: str) -> Sequence[_Entry]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise KeysError(
                f"line {number} is not 'NAME sha256:HASH'; `moebius keys add` makes keys and their hashes"
            )
        entries.append(_entry(f"line {number}", {"name": words[0], "hash": words[1]}))
    return entries


def _entry(where: str, values: Any) -> _Entry:
    try:
        return _Entry.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        what = ".".join(map(str, fault["loc"]))
        raise KeysError(f"{where}: {what}: {fault['msg']}") from None
