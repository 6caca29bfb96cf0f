"""Lists of modules in configs: exact names, wildcards and regular expressions."""

import re
from collections.abc import Callable, Iterable, Iterator

from moebius_worker.checkpoint.errors import CheckpointError

# The same module is called differently by producers that saw it within a multimodal model.
_PREFIX = re.compile(r"(model\.language_model|language_model\.model|language_model|model)\.")
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_TOP_PREFIXES = ("", "language_model.")  # of what is not within the model, such as lm_head


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Tells whether one of the patterns names a module, or something that the module is in.

    A pattern is "re:" and a regular expression, matched from the name's beginning; or whole components of the
    name, such as "lm_head" or "layers.0.self_attn", with "*" for anything. Raises CheckpointError.
    """
    literal, wild, expressions = set(), [], []
    for pattern in patterns:
        if pattern.startswith("re:"):
            expressions.append(expression(pattern.removeprefix("re:")))
        elif "*" in pattern:
            wild.append(".*".join(map(re.escape, _bare(pattern).split("*"))))
        else:
            literal.add(_bare(pattern))
    # One expression of all, since there may be a pattern a layer, and thousands of modules in each.
    wildcards = re.compile(rf"(?:^|\.)(?:{'|'.join(wild)})(?:\.|$)") if wild else None

    def matches(module: str) -> bool:
        bare = _bare(module)
        if not literal.isdisjoint(_runs(bare)) or (wildcards is not None and wildcards.search(bare)):
            return True
        return any(found.match(name) for name in spellings(module) for found in expressions)

    return matches


def spellings(module: str) -> tuple[str, ...]:
    """What a config may call a module: "model.layers.0", "model.language_model.layers.0", ..."""
    bare = _bare(module)
    return tuple(prefix + bare for prefix in (_PREFIXES if bare != module else _TOP_PREFIXES))


def expression(pattern: str) -> re.Pattern[str]:
    """Raises CheckpointError for what is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"The config has {pattern!r}, which is no regular expression: {error}."
        ) from error


def _bare(name: str) -> str:
    match = _PREFIX.match(name)
    return name[match.end() :] if match else name


def _runs(name: str) -> Iterator[str]:
    """All runs of whole components: of "a.b.c" a, a.b, a.b.c, b, b.c, c."""
    parts = name.split(".")
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])
