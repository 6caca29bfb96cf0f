"""Processes that cannot start: `moebius up` says why and where the log is, and ends, with all the others.

They are started all at once, since each takes the time of a start.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.running_up import RunningUp, mentioning, running_up

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Start:
    # What its last lines must say.
    words: tuple[str, ...]
    log: str = "worker-0.log"
    config: dict[str, object] = field(default_factory=dict)
    # The model's, when it is not usable.
    chat_template: str | None = None
    env: dict[str, str] = field(default_factory=dict)


STARTS = {
    "family": Start(
        ("architecture StrangeForCausalLM is not supported", "Supported are", "MixtralForCausalLM"),
        config={"architectures": ["StrangeForCausalLM"], "model_type": "strange"},
    ),
    "quantised": Start(
        ("quantised with hqq, which is not supported", "compressed-tensors"),
        config={"quantization_config": {"quant_method": "hqq"}},
    ),
    "setting": Start(
        ("--max-running: Input should be greater than 0",), env={"MOEBIUS_WORKER_MAX_RUNNING": "-1"}
    ),
    "gateway": Start(
        ("The gateway does not start", "--request-timeout: Input should be a valid number"),
        log="gateway.log",
        env={"MOEBIUS_GATEWAY_REQUEST_TIMEOUT": "soon"},
    ),
    "template": Start(
        ("The gateway cannot serve the model", "chat template"),
        log="gateway.log",
        chat_template="{% for x in %}",
    ),
}


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningUp]]:
    folder = tmp_path_factory.mktemp("failing")
    ups = {}
    with ExitStack() as exits:
        for name, start in STARTS.items():
            model = folder / name / "model"
            shutil.copytree(tiny_model, model)
            config = json.loads((model / "config.json").read_text()) | start.config
            (model / "config.json").write_text(json.dumps(config))
            if start.chat_template is not None:
                (model / "chat_template.jinja").write_text(start.chat_template)
            up = running_up(model, folder / name / "state", "--workers", "1", **start.env)
            ups[name] = exits.enter_context(up)
        yield ups


@pytest.mark.parametrize("name", STARTS)
def test_why_it_cannot_start(name: str, started: dict[str, RunningUp]) -> None:
    up, start = started[name], STARTS[name]
    assert up.ended(150) == 1
    said = re.search(r"^Error: (.*)\nIts log: (.*)\n\Z", up.output, re.MULTILINE)
    assert said, up.output
    for words in start.words:
        assert words in said[1]
    assert Path(said[2]) == up.state_dir / "logs" / start.log
    assert Path(said[2]).is_file()
    assert "Traceback" not in up.output
    assert not mentioning(up.state_dir.parent)
