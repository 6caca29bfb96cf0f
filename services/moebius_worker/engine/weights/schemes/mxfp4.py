"""MXFP4 as gpt-oss's checkpoints declare it: blocks and powers of two of the experts."""

from collections.abc import Mapping
from typing import Any

from moebius_worker.engine.weights.schemes.declared import DeclaredScheme
from moebius_worker.engine.weights.schemes.mxfp4_layout import Mxfp4Layout
from moebius_worker.engine.weights.schemes.patterns import matcher

_LAYOUT = Mxfp4Layout("weight_blocks", "weight_scales", blocks=True)


def mxfp4_scheme(config: Mapping[str, Any]) -> DeclaredScheme:
    excluded = matcher(config.get("modules_to_not_convert") or ())
    return DeclaredScheme("mxfp4", lambda module: None if excluded(module) else _LAYOUT)
