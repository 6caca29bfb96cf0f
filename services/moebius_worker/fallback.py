"""Fallback levels: settings of the engine that give up speed, step by step, so that the model is served.

Level 0 is as configured; level n has the settings of the first n entries of the list over it, in their order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class FallbackLevel(BaseModel):
    """One step down. `settings`: by name, as a TOML file has them.

    Limits are only ever lowered, what is excluded is added to, and groups (`sim`) are changed in part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    settings: dict[str, Any] = Field(min_length=1)


# What engines were reported to die of, the cheapest remedy first.
DEFAULT_LEVELS = (
    FallbackLevel(name="no-graphs", settings={"cuda_graphs": False}),
    FallbackLevel(name="reference-kernels", settings={"kernels": "reference"}),
    FallbackLevel(name="small-batch", settings={"max_running": 4}),
)
# What the front has used before it starts an engine, or what clients know the model by.
FRONT_SETTINGS = frozenset(
    {
        *("config", "listen", "metrics_listen", "tls_cert", "tls_key", "tls_client_ca", "log_format"),
        *("served_model_name", "drain_timeout", "stall_timeout", "load_stall_timeout"),
        *("restart_delay", "max_restart_delay", "healthy_after", "standby", "level_file", "fallback_levels"),
    }
)
_LIMITS = frozenset(
    {"max_running", "max_waiting", "max_step_tokens", "max_model_len", "kv_cache_memory", "threads"}
)


def overlaid(settings: Mapping[str, Any], levels: Sequence[FallbackLevel]) -> dict[str, Any]:
    """`settings` as JSON has them, with those of all `levels` over them. Raises ValueError for a name that no
    level can change; otherwise nothing is checked.
    """
    changed = dict(settings)
    for level in levels:
        for name, value in level.settings.items():
            if name in FRONT_SETTINGS or name not in settings:
                raise ValueError(f"level {level.name!r} cannot change {name!r}")
            changed[name] = _over(name, changed[name], value)
    return changed


def _over(name: str, before: Any, value: Any) -> Any:
    if name == "exclude_backends":
        return list(dict.fromkeys([*before, *value]))
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **value}
    if name in _LIMITS and isinstance(before, int) and isinstance(value, int):
        return min(before, value)
    return value
