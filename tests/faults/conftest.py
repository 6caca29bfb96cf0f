from pathlib import Path

import pytest

from tests.tiny import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral: its steps take milliseconds, so that faults, not sums, fill the time."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny-mixtral", "mixtral")
