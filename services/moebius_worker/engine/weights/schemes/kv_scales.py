"""Factors of a quantised key-value cache that checkpoints carry, whatever their dialect."""

_NAMES = frozenset(
    {
        "k_scale",
        "v_scale",
        "q_scale",
        "kv_scale",
        "p_scale",
        "prob_scale",
        "prob_output_scale",
        "k_zero_point",
        "v_zero_point",
        "kv_cache_scaling_factor",
        # Of k_proj and v_proj.
        "output_scale",
        "output_zero_point",
    }
)


def is_kv_scale(name: str) -> bool:
    """Whether the tensor is left out: Moebius measures its own factors of the key-value cache."""
    return name.rpartition(".")[2] in _NAMES
