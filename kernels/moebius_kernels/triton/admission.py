"""A reason that several backends have to refuse a call."""

from moebius_kernels.registry import Query


def x_refusal(query: Query, fewest_tokens: int = 1) -> str | None:
    """Of calls whose x is not bf16, or that have fewer tokens throughout."""
    if (dtype := query.arguments["x"].dtype) != "bfloat16":
        return f"x is {dtype}, it takes bfloat16"
    if query.tokens.last < fewest_tokens:
        return f"it is for {fewest_tokens} tokens and more"
    return None
