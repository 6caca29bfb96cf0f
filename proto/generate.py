"""Generates proto/moebius_proto from proto/moebius. Run by `make proto`; a test compares the result.

The `=` in the include path maps proto/moebius onto the import path moebius_proto, so that the generated
modules import each other by the paths at which they lie.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent


def generate(out: Path) -> None:
    """Writes the generated package below `out`. Raises RuntimeError when protoc refuses a source."""
    sources = sorted((HERE / "moebius").rglob("*.proto"))
    names = [f"moebius_proto/{path.relative_to(HERE / 'moebius')}" for path in sources]
    # Only the public protocol has a service, so only it needs a gRPC module.
    services = [name for name, path in zip(names, sources, strict=True) if "\nservice " in path.read_text()]
    include = f"-Imoebius_proto={HERE / 'moebius'}"
    for args in (
        [f"--python_out={out}", f"--pyi_out={out}", *names],
        [f"--grpc_python_out={out}", *services],
    ):
        if protoc.main(["protoc", include, *args]) != 0:
            raise RuntimeError(f"protoc failed on {', '.join(names)}")
    for name in names:
        for folder in Path(name).parents:
            if folder != Path():
                (out / folder / "__init__.py").touch()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
