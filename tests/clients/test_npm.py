"""Packages of npm, each in a script of its own that tells as JSON what it got."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.asking import LOOP_SAID, SAID
from tests.clients.conftest import Api

FOLDER = Path(__file__).parent / "npm"


def told(script: str, package: str, api: Api) -> Any:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules" / package).is_dir():
        pytest.skip(f"{package} is not installed: npm ci --prefix {FOLDER}")
    done = subprocess.run(
        [node, FOLDER / script, api.url, api.model], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai(scripted: Api) -> None:
    assert told("openai.mjs", "openai", scripted) == {
        "said": SAID,
        "streamed": SAID,
        "loop": LOOP_SAID,
        "response": "You said: think",
        "last": "response.completed",
        "models": [scripted.model],
        "error": ["NotFoundError", 404, "model_not_found"],
    }


def test_anthropic(scripted: Api) -> None:
    assert told("anthropic.mjs", "@anthropic-ai/sdk", scripted) == {
        "blocks": ["thinking", "text"],
        "said": "You said: think",
        "signed": True,
        "streamed": "You said: think",
        "stop": "end_turn",
        "counted": True,
        "error": ["NotFoundError", 404],
    }


def test_ai_sdk(scripted: Api) -> None:
    assert told("ai.mjs", "ai", scripted) == {
        "said": "You said: think",
        "reasoning": "Let me see.",
        "streamed": SAID,
        "loop": LOOP_SAID,
        "steps": 5,
    }
