"""A checkpoint: where it is and what its config says. `moebius_worker.engine.weights` reads its weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, Literal

from moebius_worker.checkpoint.errors import CheckpointError, understanding
from moebius_worker.checkpoint.gguf.config import gguf_config, gguf_generation_config
from moebius_worker.checkpoint.gguf.file import read_gguf
from moebius_worker.checkpoint.locate import Located, Progress, locate
from moebius_worker.checkpoint.quantization import declared_quantization

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this machine.

    `path` is a directory (safetensors) or a file (gguf). `config` has the keys of Hugging Face's
    `config.json` whatever the container, `architectures` and `model_type` always among them, and no defaults
    filled in. `name` is what it is called where nobody names it.
    """

    path: Path
    container: Literal["safetensors", "gguf"]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    name: str

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: as the generation config says or, if it does not, the config."""
        text_config = self.config.get("text_config") or {}
        for config in (self.generation_config, self.config, text_config):
            ids = config.get("eos_token_id")
            if ids is not None:
                with understanding(f"The eos_token_id {ids!r} of {self.name}"):
                    return tuple(map(index, [ids] if isinstance(ids, int) else ids))
        return ()


def open_checkpoint(location: str, *, download: bool = True, progress: Progress | None = None) -> Checkpoint:
    """Opens a directory, a `.gguf` file or a Hugging Face id (owner/name, or owner/name/FILE.gguf).

    An id is downloaded into the Hub's cache unless `download` is false; `progress` gets what is done and how
    many of how many bytes. Raises CheckpointError.
    """
    located = locate(location, download=download, progress=progress)
    if located.path.is_file():
        gguf = read_gguf(located.path)
        with understanding(f"The metadata of {located.path}"):
            config, generation_config = gguf_config(gguf), gguf_generation_config(gguf)
        return Checkpoint(located.path, "gguf", config, generation_config, located.name)
    return _open_directory(located)


def _open_directory(located: Located) -> Checkpoint:
    directory = located.path
    if not (directory / "config.json").is_file():
        hint = "It is not a checkpoint in the Hugging Face layout."
        if files := sorted(file.name for file in directory.glob("*.gguf")):
            hint = f"It holds GGUF files; give one of them: {', '.join(files)}."
        raise CheckpointError(f"{directory} has no config.json. {hint}")
    config = _read_json(directory / "config.json")
    if missing := [key for key in ("architectures", "model_type") if not config.get(key)]:
        raise CheckpointError(f"{directory / 'config.json'} does not say {' and '.join(missing)}.")
    quantization = directory / "hf_quant_config.json"
    with understanding(f"The quantisation that {directory} declares"):
        if declared_quantization(config) is None and quantization.is_file():
            # ModelOpt's older exports declare the quantisation here alone.
            config["quantization_config"] = {
                "quant_method": "modelopt",
                **_read_json(quantization).get("quantization", {}),
            }
    generation = directory / "generation_config.json"
    generation_config = _read_json(generation) if generation.is_file() else {}
    return Checkpoint(directory, "safetensors", config, generation_config, located.name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return content
