"""What kernels ask of a call and the references in PyTorch do not: how many dimensions tensors have."""

from collections.abc import Callable
from typing import Any

from moebius_kernels.calls import named_arguments
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE, Operations

# As the kernels of moebius_kernels.triton take them. What is not here may have any number.
DIMENSIONS = {
    "routed_experts": {"x": 2},
    "topk_softmax": {"logits": 2},
    "softmax_topk": {"logits": 2},
    "sigmoid_topk": {"logits": 2},
    "add_rms_norm": {"x": 2, "residual": 2},
    "apply_rotary": {"x": 3},
    "write_kv": {"k": 3, "v": 3},
    "rotate_and_write_kv": {"q": 3, "k": 3, "v": 3},
    "paged_attention": {"q": 3},
    "causal_conv1d": {"x": 2},
    "gated_delta_rule": {"q": 3, "k": 3, "v": 3, "g": 2, "beta": 2},
    "draw_tokens": {"logits": 2},
}


def strict() -> Operations:
    """The references, which refuse what the kernels would. They raise AssertionError."""
    return Operations(**{name: _strict(name) for name in OPERATION_NAMES})


def _strict(operation: str) -> Callable[..., Any]:
    function = getattr(REFERENCE, operation)
    wanted = DIMENSIONS.get(operation)
    if wanted is None:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = named_arguments(operation, args, kwargs)
        for name, dimensions in wanted.items():
            if (tensor := arguments[name]) is not None:
                shape = tuple(tensor.shape)
                assert len(shape) == dimensions, (
                    f"{operation}({name}={shape}) instead of {dimensions} dimensions"
                )
        return function(*args, **kwargs)

    return call
