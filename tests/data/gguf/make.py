"""Makes the files here: `python make.py LLAMA_CPP [FAMILY ...]`, a checkout with conversion/ and gguf-py/."""

import json
import lzma
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.worker.checkpoint.gguf_models import FAMILIES, original_config, original_model  # noqa: E402

# After that, since its tree has a package `tests` too.
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]

import gguf  # noqa: E402
from conversion import get_model_class  # noqa: E402


def convert(family: str, directory: Path) -> None:
    config = original_config(family)
    original_model(family).save_pretrained(directory)
    # As it was written, with what transformers does not keep.
    (directory / "config.json").write_text(json.dumps(config))
    # Gemma's converter reads the size of the vocabulary here.
    vocab = {str(index): index for index in range(config["vocab_size"])}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    converter = get_model_class(config["architectures"][0])
    without_vocab = {"set_vocab": lambda self: None, "model_arch": converter.model_arch}
    if hasattr(converter, "Ministral3Model"):
        converter.Ministral3Model.set_vocab = without_vocab["set_vocab"]
    # None of the models has layers that draft tokens.
    converter = type("Converter", (converter,), without_vocab | {"no_mtp": True})
    out = directory / "model.gguf"
    with torch.inference_mode():
        converter(directory, gguf.LlamaFileType.ALL_F32, out, eager=True).write()
    (HERE / f"{family}.gguf.xz").write_bytes(lzma.compress(out.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


for name in sys.argv[2:] or FAMILIES:
    with tempfile.TemporaryDirectory() as temporary:
        convert(name, Path(temporary))
