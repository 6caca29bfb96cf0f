"""Chat templates as checkpoints bring them, and text models as a whole."""

import asyncio
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from moebius_gateway.text.conversation import Conversation, Message
from moebius_gateway.text.errors import PromptError, TextError
from moebius_gateway.text.model import INLINE_CHARACTERS, SamplingDefaults, TextModel
from moebius_gateway.text.template import ChatTemplate
from tests.tiny import write_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def conversation(messages: list[dict[str, Any]] | None = None, **more: Any) -> Conversation:
    return Conversation(tuple(Message(**message) for message in messages or HELLO), **more)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def with_config(files: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    config = json.loads(files["tokenizer_config.json"]) | changes
    return files | {"tokenizer_config.json": json.dumps(config).encode()}


def render(source: str, messages: list[dict[str, str]] | None = None, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(conversation(messages))


def test_renders_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = (
        "{{- bos_token }}\n"
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'system' %}{% continue %}{% endif %}\n"
        "    {{- '<' + message['role'] + '>' + message['content'] | trim }}\n"
        "    {% if loop.last %}\n"
        "last <&> {{ message | tojson }}\n"
        "    {% endif %}\n"
        "{%- endfor %}\n"
        "{% if add_generation_prompt %}{% generation %}<assistant>{% endgeneration %}{% endif %}"
        "{% if tools %}tools{% endif %}"
    )
    messages = [{"role": "system", "content": "x"}, *HELLO, {"role": "user", "content": " <ünï> "}]
    write_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert render(source, messages, bos_token="<|im_start|>") == theirs


def test_what_a_template_raises_is_what_the_client_is_told() -> None:
    with pytest.raises(PromptError, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="cannot render these messages"):
        render("{{ messages[0].content + 1 }}")
    with pytest.raises(PromptError, match="no element 7"):
        render("{{ messages[7].content }}")


def test_a_template_can_harm_nothing() -> None:
    with pytest.raises(PromptError, match="unsafe"):
        render("{{ messages.__class__.__base__.__subclasses__() }}")
    with pytest.raises(PromptError, match="unsafe"):
        render("{{ messages.append(1) }}")
    with pytest.raises(PromptError, match=r"[Rr]ange too big"):
        render("{% for i in range(10**9) %}{% endfor %}")


def test_a_template_that_is_no_template_is_an_error_of_the_model() -> None:
    with pytest.raises(TextError, match="cannot be compiled"):
        render("{% for %}")


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    known = "{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}"
    assert render(known, messages) == "developer"


async def test_special_tokens_are_added_once(files: dict[str, bytes]) -> None:
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    start = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    tokenizer.enable_truncation(4)
    model = TextModel(files | {"tokenizer.json": tokenizer.to_str().encode()})
    chat = (await model.encode_chat(conversation())).ids
    assert chat[0] == start
    assert chat[1] != start
    [plain] = await model.encode(["The capital of France is Paris, and what else"])
    assert plain.count(start) == 1
    assert plain[0] == start
    assert len(plain) > 4, "a tokenizer's own limit on length must not cut prompts"


async def test_long_prompts_are_the_same_in_a_thread(files: dict[str, bytes]) -> None:
    model = TextModel(files)
    text = "The quick brown fox. " * (INLINE_CHARACTERS // 20)
    assert len(text) > INLINE_CHARACTERS
    expected = Tokenizer.from_buffer(files["tokenizer.json"]).encode(text).ids
    assert await model.encode([text, "x"]) == [tuple(expected), *await model.encode(["x"])]
    chat = (await model.encode_chat(conversation([{"role": "user", "content": text}]))).ids
    assert "".join(map(chr, expected)) in "".join(map(chr, chat))


@pytest.mark.parametrize(
    "changed",
    [
        {
            "chat_template": [
                {"name": "rag", "template": "no"},
                {"name": "default", "template": "{{ bos_token }}"},
            ]
        },
        {
            "chat_template": "{{ bos_token }}",
            "bos_token": {"content": "<|im_start|>", "__type": "AddedToken"},
        },
    ],
)
async def test_where_the_template_and_its_tokens_come_from(
    files: dict[str, bytes], changed: dict[str, object]
) -> None:
    model = TextModel(with_config(files, **changed))
    assert (await model.encode_chat(conversation())).ids == (model.special_token_id("<|im_start|>"),)


@pytest.mark.timed
async def test_long_prompts_do_not_stop_the_event_loop(files: dict[str, bytes]) -> None:
    model = TextModel(files)
    encoding = asyncio.create_task(model.encode(["The quick brown fox. " * 30_000]))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10


async def test_a_template_file_comes_before_the_config(files: dict[str, bytes]) -> None:
    model = TextModel(files | {"chat_template.jinja": b"{{ eos_token }}"})
    assert (await model.encode_chat(conversation())).ids == (model.special_token_id("<|im_end|>"),)


async def test_without_a_template_chat_is_refused_and_plain_text_is_not(files: dict[str, bytes]) -> None:
    model = TextModel(with_config(files, chat_template=None))
    with pytest.raises(PromptError, match="no chat template"):
        await model.encode_chat(conversation())
    assert await model.encode(["Hello"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.json": b"{"}, "tokenizer.json cannot be loaded"),
        ({"tokenizer_config.json": b"nonsense"}, "tokenizer_config.json is not JSON"),
        ({"generation_config.json": b"[]"}, "generation_config.json is not a JSON object"),
        ({"generation_config.json": b'{"top_k": 1.5}'}, "top_k is 1.5"),
        ({"generation_config.json": b'{"temperature": "hot"}'}, "temperature is 'hot'"),
        ({"chat_template.jinja": b"{% if %}"}, "chat template"),
    ],
)
def test_unusable_files_are_named(files: dict[str, bytes], change: dict[str, bytes], message: str) -> None:
    with pytest.raises(TextError, match=message):
        TextModel(files | change)


def test_a_missing_tokenizer_is_said() -> None:
    with pytest.raises(TextError, match=r"tokenizer\.json is missing"):
        TextModel({})


def test_sampling_defaults_are_the_authors(files: dict[str, bytes]) -> None:
    assert TextModel(files).defaults == SamplingDefaults()
    config = b'{"do_sample": true, "temperature": 0.6, "top_k": 20, "min_p": null, "eos_token_id": 2}'
    assert TextModel(files | {"generation_config.json": config}).defaults == SamplingDefaults(0.6, 20)


def test_only_special_tokens_are_special(files: dict[str, bytes]) -> None:
    model = TextModel(files)
    assert model.special_token_id("<|im_end|>") is not None
    assert model.special_token_id("a") is None
    assert model.special_token_id("no such token") is None
