"""What FlashInfer's kernels are asked to compute. The reasons need no FlashInfer."""

from moebius_kernels.registry import Query
from moebius_kernels.triton import sampling
from moebius_kernels.triton.admission import pages_refusal, x_refusal
from moebius_kernels.triton.targets import ARCHITECTURES

# Its kernels are built for the device that is there, and its own tables of architectures are longer.
SUPPORTED = ARCHITECTURES
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
# Steps of fewer tokens are decodes, or gain no more than what the division of their work costs the host.
LEAST_TOKENS = 513


def attention_refusal(query: Query) -> str | None:
    """Prompts over pages whose keys and values are as the model computed them."""
    arguments = query.arguments
    q, pages = arguments["q"], arguments["kv_pages"]
    heads, _ = q.shape
    kv_heads = pages["keys"]["numbers"].shape[1]
    if query.tokens.last < LEAST_TOKENS:
        return f"it plans on the host, which is for prompts of {LEAST_TOKENS} tokens and more"
    if q.dtype not in DTYPES:
        return f"queries in {q.dtype}, it takes {' and '.join(DTYPES)}"
    if reason := pages_refusal(query, HEAD_DIMS):
        return reason
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads}"
    if arguments["sinks"] is not None:
        return "attention sinks"
    return None


def draw_refusal(query: Query) -> str | None:
    """Draws with top-k or top-p: without, there is nothing to select."""
    if not query.arguments["draws"]["truncated"]:
        return "nothing is selected without top-k and top-p"
    return sampling.admits(query)


def experts_refusal(query: Query) -> str | None:
    """Tiles of 128 tokens, so for prompts alone."""
    weights = query.arguments["weights"]
    if query.tokens.last < LEAST_TOKENS:
        return f"its tiles of 128 tokens are for {LEAST_TOKENS} tokens and more"
    if reason := x_refusal(query):
        return reason
    if len(weights["gate_up"]) > 1:
        return "gate and up are two matrices"
    if weights["gate_up_bias"] is not None:
        return "gate and up have biases"
    _, hidden, inner = weights["down"].shape
    if hidden % 8 or inner % 8:
        return f"rows of {hidden} and {inner} are no whole words of 16 bytes"
    return None
