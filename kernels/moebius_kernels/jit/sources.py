"""What an artefact is made of, down to the last header, as a hash."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_INCLUDE = re.compile(rb'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def included(sources: Sequence[Path], directories: Sequence[Path]) -> dict[str, bytes]:
    """The contents of `sources` and of every header that they include, directly or not.

    Headers are sought beside the file that includes them and then in `directories`; those found nowhere are
    the compiler's own, for which its version stands. Conditions are not looked at: one header too many only
    means one key more. Keys are names as they are spelled, so that a tree may be moved.
    """
    found: dict[str, bytes] = {}
    waiting = [(source.name, source) for source in sources]
    seen: set[Path] = set()
    while waiting:
        name, path = waiting.pop()
        if (resolved := path.resolve()) in seen:
            continue
        seen.add(resolved)
        found[name] = content = path.read_bytes()
        for quoted, angled in _INCLUDE.findall(content):
            header = (quoted or angled).decode()
            places = [*([path.parent] if quoted else []), *directories]
            at = next((place / header for place in places if (place / header).is_file()), None)
            if at is not None:
                waiting.append((header, at))
    return found


def digest(parts: Mapping[str, bytes | str | Iterable[str]]) -> str:
    """Of named parts; each counts with its name and its length, so that no two mixtures look alike."""
    whole = hashlib.sha256()
    for name, part in sorted(parts.items()):
        for piece in (part,) if isinstance(part, bytes | str) else part:
            data = piece.encode() if isinstance(piece, str) else piece
            whole.update(f"{name}\0{len(data)}\0".encode())
            whole.update(data)
    return whole.hexdigest()[:32]


# All kernels and their tables.
KERNELS = Path(__file__).parents[1]


def package_digest(root: Path = KERNELS) -> str:
    """Of all sources and tables in a package: what a plan or a compiled kernel was made from."""
    files = (path for path in root.rglob("*") if path.suffix in {".py", ".cu", ".cuh", ".h", ".json"})
    return digest({str(path.relative_to(root)): path.read_bytes() for path in files})
