"""The generated code that is checked in is what `make proto` would make now."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_code_is_current(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    generate.generate(tmp_path)
    package = Path("moebius_proto") / "worker"
    assert _files(ROOT / "proto" / package) == _files(tmp_path / package), "run `make proto`"


def _files(package: Path) -> dict[str, str]:
    # `make proto` leaves the packages' own docstrings alone.
    sources = (file for file in package.rglob("*.py*") if file.suffix in (".py", ".pyi"))
    return {
        str(file.relative_to(package)): file.read_text() for file in sources if file.name != "__init__.py"
    }
