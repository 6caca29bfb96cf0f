"""Prints, as JSON, how many of our kernels' functions there are, and the constants of two modules that one of
them knows by one name: with different values.

A program of its own: where Triton's interpreter is on, functions have no keys.
"""

import json
import sys
from collections import defaultdict
from importlib import import_module
from pkgutil import iter_modules

from triton.language.core import constexpr

from moebius_kernels import triton as kernels


def conflicts(function: object) -> list[str]:
    """Triton's key of a compiled kernel has the values in an order that hangs on the addresses of modules."""
    _ = function.cache_key
    values = defaultdict(set)
    for (name, _), (value, _) in function.used_global_vals.items():
        if isinstance(value, constexpr):
            values[name].add(repr(value))
    return sorted(name for name, found in values.items() if len(found) > 1)


def main() -> None:
    found = {}
    for module in iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(import_module(module.name)).items():
            if hasattr(value, "used_global_vals"):
                found[f"{module.name.rpartition('.')[2]}.{name}"] = conflicts(value)
    json.dump(
        {"functions": len(found), "conflicts": {name: some for name, some in found.items() if some}},
        sys.stdout,
    )


if __name__ == "__main__":
    main()
