"""docs/models.md names what is there, and nothing else."""

import re
from pathlib import Path

from moebius_worker.checkpoint.gguf.families import FAMILIES
from moebius_worker.engine.models.registry import ARCHITECTURES
from moebius_worker.engine.weights.schemes.registry import DIALECTS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_every_architecture_is_on_the_page() -> None:
    assert set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", PAGE)) == set(ARCHITECTURES)


def test_every_gguf_architecture_is_on_the_page() -> None:
    table = PAGE[PAGE.index("## Families") : PAGE.index("## Formats")]
    columns = [line.split("|")[2] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([\w-]+)`", " ".join(columns))) == {family.architecture for family in FAMILIES}


def test_every_dialect_is_on_the_page() -> None:
    table = PAGE[PAGE.index("## Formats") : PAGE.index("## Memory")]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(DIALECTS)
