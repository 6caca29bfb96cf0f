"""From what a user writes to a path: a directory, a `.gguf` file, or an id on the Hugging Face Hub."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius_worker.checkpoint.errors import CheckpointError

# What is done, and how many of how many bytes.
Progress = Callable[[str, int, int], None]

# owner/name, or owner/name/FILE.gguf for one of a repository's GGUF files.
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?<!\.gguf)(/(?P<file>[^/].*\.gguf))?")
_WANTED = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
# Subdirectories and `consolidated` files repeat the weights in the layout of their authors.
_UNWANTED = ("*/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class Located:
    """Where a checkpoint lies on this machine, and what to call it."""

    path: Path
    name: str


def locate(location: str, *, download: bool = True, progress: Progress | None = None) -> Located:
    """Finds `location`, downloading it from the Hub if it is an id there and `download` is true.

    Raises CheckpointError, which says what was looked for and what to do.
    """
    path = Path(location).expanduser()
    if path.is_dir():
        return Located(path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is a file, but not a .gguf file. Give that, or a checkpoint's directory."
            )
        return Located(path, _gguf_name(path.name))
    match = _HUB_ID.fullmatch(location)
    if match is None:
        raise CheckpointError(
            f"There is no {location}. Give a checkpoint's directory, a .gguf file, or a Hugging Face id "
            "(owner/name)."
        )
    if match["file"] is None:
        return Located(_from_hub(match["id"], _WANTED, _UNWANTED, download, progress), match["id"])
    pattern = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", match["file"])
    directory = _from_hub(match["id"], (pattern,), (), download, progress)
    if not (directory / match["file"]).is_file():
        raise CheckpointError(
            f"The repository {match['id']} on the Hugging Face Hub has no file {match['file']}."
        )
    return Located(directory / match["file"], _gguf_name(match["file"]))


def _gguf_name(file: str) -> str:
    """What a GGUF file's model is called, one file or many."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", Path(file).name)


def _from_hub(
    hub_id: str,
    wanted: tuple[str, ...],
    unwanted: tuple[str, ...],
    download: bool,
    progress: Progress | None,
) -> Path:
    """The snapshot's directory in the Hub's cache. Without a connection, what the cache holds is taken."""
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {}
    if progress is not None:
        options["tqdm_class"] = _reporter(hub_id, progress)
    try:
        return Path(
            snapshot_download(
                hub_id,
                allow_patterns=list(wanted),
                ignore_patterns=list(unwanted),
                local_files_only=not download,
                **options,
            )
        )
    # The library's errors have no common base, and its HTTP client's errors come through.
    except Exception as error:
        raise CheckpointError(_why_not(hub_id, download, error)) from error


def _why_not(hub_id: str, download: bool, error: Exception) -> str:
    from huggingface_hub import errors

    local = f"There is no directory {hub_id} here either. If you meant one, check the path."
    if isinstance(error, errors.GatedRepoError):
        return f"{hub_id} is gated: accept its terms on its page on the Hugging Face Hub, and set HF_TOKEN."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"The Hugging Face Hub has no model {hub_id}, or it is private: then set HF_TOKEN. {local}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "the Hugging Face Hub cannot be reached" if download else "downloading is off"
        return (
            f"Cannot download {hub_id}: {why}, and the cache does not have all of it. Connect this machine "
            f"(and unset HF_HUB_OFFLINE), or copy the checkpoint here and give its directory. {local}"
        )
    return f"Cannot download {hub_id}: {type(error).__name__}: {error}"


def _reporter(hub_id: str, progress: Progress) -> type:
    """A progress bar for the Hub's library to drive, which draws nothing and reports the bytes that came."""
    from huggingface_hub.utils import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})
            self.done = 0

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            if self.in_bytes:
                progress(f"downloading {hub_id}", self.done, max(self.done, int(self.total or 0)))

    return Reporter
