"""The tokenizer of a checkpoint, as the files that a gateway needs to make it."""

import hashlib
import json
from collections.abc import Mapping

from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.errors import CheckpointError, understanding
from moebius_worker.checkpoint.gguf.file import read_gguf
from moebius_worker.checkpoint.gguf.tokenizer import gguf_tokenizer_files


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Contents by name: tokenizer.json, tokenizer_config.json, generation_config.json and, where the
    checkpoint has it, chat_template.jinja (else the template is in tokenizer_config.json, if there is one).

    Raises CheckpointError when there is no tokenizer, or none that can be read.
    """
    if checkpoint.container == "gguf":
        with understanding(f"The tokenizer in {checkpoint.path}"):
            files = gguf_tokenizer_files(read_gguf(checkpoint.path))
    else:
        files = _directory_files(checkpoint)
    files["generation_config.json"] = json.dumps(dict(checkpoint.generation_config), indent=2).encode()
    return files


def _directory_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    directory = checkpoint.path
    if not (directory / "tokenizer.json").is_file():
        only_slow = (directory / "tokenizer.model").is_file()
        raise CheckpointError(
            f"{directory} has no tokenizer.json"
            + (", and tokenizer.model alone is not read" if only_slow else "")
            + ". Put the model's tokenizer.json there; a tokenizer of transformers writes one."
        )
    files = {"tokenizer_config.json": b"{}"}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (directory / name).is_file():
            try:
                files[name] = (directory / name).read_bytes()
            except OSError as error:
                raise CheckpointError(f"Cannot read {directory / name}: {error}") from error
    return files


def tokenizer_hash(files: Mapping[str, bytes]) -> str:
    """SHA-256, in hex, over the names and contents of `files`, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()
