"""The quantisation that a `config.json` declares."""

from collections.abc import Mapping
from typing import Any


def declared_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config's `quantization_config`, which multimodal models may have inside `text_config`."""
    text_config = config.get("text_config") or {}
    return config.get("quantization_config") or text_config.get("quantization_config") or None


def quantization_name(config: Mapping[str, Any]) -> str | None:
    """Such as "modelopt NVFP4", "compressed-tensors pack-quantized" or "awq 4-bit"; None without one."""
    declared = declared_quantization(config)
    if declared is None:
        return None
    bits = declared.get("bits")
    parts = (
        declared.get("quant_method", "unnamed"),
        declared.get("quant_algo") or declared.get("format") or (f"{bits}-bit" if bits else None),
    )
    return " ".join(str(part) for part in parts if part)
