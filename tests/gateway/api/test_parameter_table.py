"""docs/api.md says of every parameter whether it is honoured or refused, as the code has it."""

from pathlib import Path

from moebius_gateway.api.parameter_table import BODIES, rewritten, table
from moebius_gateway.api.strict import Strict

DOCUMENT = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_document_is_of_now() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert rewritten(document) == document, "run: python -m moebius_gateway.api.parameter_table docs/api.md"


def test_every_parameter_has_a_row() -> None:
    for body in BODIES.values():
        rows = [line.split("|")[1].strip() for line in table(body).splitlines()[2:]]
        names = [field.alias or name for name, field in body.model_fields.items()]
        assert sorted(rows) == sorted(f"`{name}`" for name in [*names, *body.neutral])


def test_what_a_row_says() -> None:
    class Body(Strict):
        size: int = 0
        neutral = {"colour": ("red", None), "shape": ()}  # noqa: RUF012

    assert table(Body).splitlines()[2:] == [
        "| `size` | honoured |  |",
        '| `colour` | refused | but for `"red"` and `null` |',
        "| `shape` | refused |  |",
    ]
