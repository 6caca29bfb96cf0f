"""Lists of modules in configs: exact names, wildcards and regular expressions."""

import re
from collections.abc import Callable, Iterable

# The same module is called differently by producers that saw it within a multimodal model.
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")
_PREFIX = re.compile(r"(model\.language_model|language_model\.model|language_model|model)\.")


def spellings(module: str) -> tuple[str, ...]:
    """What a config may call a module: "model.layers.0", "model.language_model.layers.0", ..."""
    bare = _PREFIX.sub("", module, count=1) if _PREFIX.match(module) else module
    return tuple(prefix + bare for prefix in _PREFIXES)


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Tells whether one of the patterns names a module, or something that the module is in.

    A pattern is "re:" and a regular expression, matched from the name's beginning; or whole components of the
    name, such as "lm_head" or "layers.0.self_attn", with "*" for anything. Raises ValueError for a bad one.
    """
    literal, expressions = set(), []
    for pattern in patterns:
        if pattern.startswith("re:"):
            expressions.append(re.compile(pattern.removeprefix("re:")))
        elif "*" in pattern:
            wild = ".*".join(map(re.escape, pattern.split("*")))
            expressions.append(re.compile(rf"(.*\.)?{wild}(\..*)?$"))
        else:
            literal.add(pattern)

    def matches(module: str) -> bool:
        return any(
            not literal.isdisjoint(_runs(name)) or any(expression.match(name) for expression in expressions)
            for name in spellings(module)
        )

    return matches


def _runs(name: str) -> Iterable[str]:
    """All runs of whole components: of "a.b.c" a, a.b, a.b.c, b, b.c, c."""
    parts = name.split(".")
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])
