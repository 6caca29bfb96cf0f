"""Reasons that several backends have to refuse a call."""

from collections.abc import Collection

from moebius_kernels.registry import Query


def x_refusal(query: Query, fewest_tokens: int = 1) -> str | None:
    """Of calls whose x is not bf16, or that have fewer tokens throughout."""
    if (dtype := query.arguments["x"].dtype) != "bfloat16":
        return f"x is {dtype}, it takes bfloat16"
    if query.tokens.last < fewest_tokens:
        return f"it is for {fewest_tokens} tokens and more"
    return None


def pages_refusal(query: Query, dims: Collection[int]) -> str | None:
    """Of attention over pages whose keys and values are not as the model computed them, or not both of one of
    these dimensions."""
    pages = query.arguments["kv_pages"]
    dim = query.arguments["q"].shape[-1]
    if pages["values"] is None:
        return "values lie in the keys"
    if pages["keys"]["format"] != "model":
        return f"keys and values are kept as {pages['keys']['format']}, with scales that it does not know"
    if dim not in dims or pages["value_dim"] != dim:
        known = ", ".join(map(str, dims))
        return f"keys of {dim} and values of {pages['value_dim']}, it takes both of one of {known}"
    return None
