"""Artefacts by key: built once, by whoever comes first; seen by others whole or not at all."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE_DIR = "MOEBIUS_CACHE_DIR"

# Between two looks whether another builder of the same key is done.
_LOOK_SECONDS = 0.25


def cache_root() -> Path:
    """MOEBIUS_CACHE_DIR, or the user's cache directory."""
    if named := os.environ.get(CACHE_DIR):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moebius"


class ArtefactCache:
    """A directory of artefacts, each a directory of its own under its key.

    One is built beside its place and then renamed into it. A lock that the system drops with its owner,
    however that ends, keeps builders of a key apart; what a killed one left is cleared away by the next.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(
        self, key: str, build: Callable[[Path], None], waiting: Callable[[], None] = lambda: None
    ) -> Path:
        """The directory of `key`; if it is not there, `build` fills an empty one. `waiting` is called again
        and again while another builds it, however long that takes. Raises what both raise."""
        place = self.root / key
        if place.is_dir():
            return place
        self.root.mkdir(parents=True, exist_ok=True)
        with self._lock(key, waiting):
            # Somebody may have built it while this process waited.
            if place.is_dir():
                return place
            for left in self.root.glob(f".{key}-*"):
                shutil.rmtree(left, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=self.root))
            try:
                build(building)
                building.rename(place)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
        return place

    def remove(self, key: str) -> None:
        """Forgets what is kept under `key`, if anything is."""
        shutil.rmtree(self.root / key, ignore_errors=True)

    @contextmanager
    def _lock(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        path = self.root / f".{key}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                while not _locked(descriptor):
                    waiting()
                    time.sleep(_LOOK_SECONDS)
                # Its last owner has removed it: then it is no longer what others lock.
                if self._is_at(path, descriptor):
                    try:
                        yield
                    finally:
                        with contextlib.suppress(FileNotFoundError):
                            path.unlink()
                    return
            finally:
                os.close(descriptor)

    @staticmethod
    def _is_at(path: Path, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            return False


def _locked(descriptor: int) -> bool:
    """Locks the file, unless another has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
