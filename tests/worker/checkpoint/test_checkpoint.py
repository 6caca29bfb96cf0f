"""Opening checkpoints, their tokenizer files, and that none of it needs torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from moebius_worker.checkpoint.quantization import quantization_name
from moebius_worker.checkpoint.tokenizer import tokenizer_files, tokenizer_hash
from tests.tiny import CHAT_TEMPLATE, CORPUS, write_checkpoint, write_tokenizer
from tests.worker.checkpoint.gguf_files import write_llama_gguf

CONFIG = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def directory(tmp_path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    for name, content in ({"config": CONFIG if config is None else config} | files).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_a_directory_opens_with_its_config_untouched(tmp_path: Path) -> None:
    config = CONFIG | {"text_config": {"model_type": "inner", "eos_token_id": 9}, "unknown": [1, {"a": None}]}
    checkpoint = open_checkpoint(str(directory(tmp_path, config)))
    assert checkpoint.config == config
    assert checkpoint.generation_config == {}
    assert checkpoint.container == "safetensors"
    assert checkpoint.eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [2, 3]}, (2, 3)),
        ({"eos_token_id": 1}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 1}, {}, (1,)),
        ({"eos_token_id": [4, 5]}, {"eos_token_id": None}, (4, 5)),
        ({}, {}, ()),
    ],
)
def test_the_generation_config_says_what_ends_a_text(
    tmp_path: Path, config: dict, generation: dict, ids: tuple
) -> None:
    path = directory(tmp_path, CONFIG | config, generation_config=generation)
    assert open_checkpoint(str(path)).eos_token_ids == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"Cannot read .*config\.json"),
        ("[]", "holds no JSON object"),
        ("{}", "does not say architectures and model_type"),
        ('{"architectures": ["A"]}', "does not say model_type"),
    ],
)
def test_a_config_that_says_nothing_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path))


def test_a_directory_without_config_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json. It is not a checkpoint"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model-Q4_0.gguf").touch()
    with pytest.raises(CheckpointError, match=r"give one of them: model-Q4_0\.gguf"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        (None, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "compressed-tensors pack-quantized",
        ),
        ({"quant_method": "awq", "bits": 4}, "awq 4-bit"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ],
)
def test_quantisations_have_names(declared: dict | None, name: str | None) -> None:
    assert quantization_name({"quantization_config": declared}) == name
    assert quantization_name({"text_config": {"quantization_config": declared}}) == name


def test_modelopts_older_declaration_is_found(tmp_path: Path) -> None:
    path = directory(tmp_path, hf_quant_config={"producer": {}, "quantization": {"quant_algo": "FP8"}})
    assert quantization_name(open_checkpoint(str(path)).config) == "modelopt FP8"


def test_tokenizer_files_of_a_directory(tmp_path: Path) -> None:
    write_tokenizer(directory(tmp_path, generation_config={"eos_token_id": 2}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    files = tokenizer_files(open_checkpoint(str(tmp_path)))
    assert sorted(files) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in files.keys() - {"generation_config.json"}:
        assert files[name] == (tmp_path / name).read_bytes()
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": 2}
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizer_files(open_checkpoint(str(tmp_path)))["tokenizer_config.json"] == b"{}"


def test_a_tokenizer_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(directory(tmp_path))
    checkpoint = open_checkpoint(str(tmp_path))

    def fail(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*Input/output error"):
        tokenizer_files(checkpoint)


def test_a_missing_tokenizer_is_an_error_that_helps(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(directory(tmp_path)))
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        tokenizer_files(checkpoint)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"tokenizer\.model alone is not read"):
        tokenizer_files(checkpoint)


def test_a_gguf_file_opens_like_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "hf", "mixtral")
    template = {"tokenizer.chat_template": CHAT_TEMPLATE}
    file = write_llama_gguf(tmp_path / "tiny-Q8_0.gguf", source, metadata=template)
    made, original = open_checkpoint(str(file)), open_checkpoint(str(source))
    assert (made.container, made.name, made.path) == ("gguf", "tiny-Q8_0", file)
    assert made.config["architectures"] == original.config["architectures"]
    # GGUF names one end; the end of the text, <|endoftext|>, is one too.
    assert made.eos_token_ids == (*original.eos_token_ids, 0)
    files = tokenizer_files(made)
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == CHAT_TEMPLATE
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2, 0]
    tokenizer, reference = (
        Tokenizer.from_str(content.decode())
        for content in (files["tokenizer.json"], (source / "tokenizer.json").read_bytes())
    )
    for text in (*CORPUS, "<|im_start|>user\nhello<|im_end|>"):
        assert tokenizer.encode(text).ids == reference.encode(text).ids


def test_the_hash_is_over_names_and_contents() -> None:
    files = {"a": b"1", "b": b"2"}
    assert tokenizer_hash(files) == tokenizer_hash(dict(reversed(files.items())))
    others = [{"a": b"1"}, {"a": b"2", "b": b"1"}, {"a": b"1", "c": b"2"}, {"a1": b"", "b": b"2"}]
    assert len({tokenizer_hash(one) for one in (files, *others)}) == 5
    assert len(tokenizer_hash(files)) == 64


def test_checkpoints_are_opened_without_torch(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "hf", "llama")
    file = write_llama_gguf(tmp_path / "m.gguf", source)
    code = (
        "import sys\n"
        "from moebius_worker.checkpoint.checkpoint import open_checkpoint\n"
        "from moebius_worker.checkpoint.tokenizer import tokenizer_files\n"
        "from moebius_worker.checkpoint.locate import CheckpointError\n"
        "for location in sys.argv[1:]:\n"
        "    assert tokenizer_files(open_checkpoint(location))['tokenizer.json']\n"
        "try:\n"
        "    open_checkpoint('nobody/nothing', download=False)\n"
        "except CheckpointError:\n"
        "    pass\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(source), str(file)], check=True, timeout=60)
