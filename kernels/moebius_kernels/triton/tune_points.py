"""What there is to measure: the shapes of a model's products, as tables know them, with token counts."""

from collections.abc import Sequence

from moebius_kernels.triton.dense_tiling import DenseShape, by_library
from moebius_kernels.triton.expert_tiling import ExpertShape
from moebius_kernels.triton.layouts import layout_of
from moebius_kernels.triton.tune_candidates import dense_candidates, expert_candidates
from moebius_kernels.tuning import DenseProduct, Point, Product


def points_of(products: Sequence[Product], tokens: Sequence[int]) -> list[Point]:
    """Each shape with each token count, once."""
    shapes: dict[object, tuple[Product, ExpertShape | DenseShape | str]] = {}
    for product in products:
        shape = shape_of(product)
        # Forms that tables do not tell apart are measured as one.
        shapes.setdefault(product if isinstance(shape, str) else shape, (product, shape))
    return [_point(product, shape, count) for product, shape in shapes.values() for count in tokens]


def _point(product: Product, shape: ExpertShape | DenseShape | str, tokens: int) -> Point:
    reason, candidates = "", 0
    match shape:
        case str(reason):
            pass
        case ExpertShape():
            groups = expert_candidates(shape, tokens)
            candidates = 1 + sum(len(gate_ups) + len(downs) - 1 for gate_ups, downs in groups)
        case DenseShape() if isinstance(product, DenseProduct):
            few = dense_candidates(shape, tokens)
            if by_library(tokens, product.format, (product.rows, product.columns)):
                reason = "PyTorch's product is faster"
            elif not few:
                reason = "no step has so many tokens"
            else:
                candidates = len(few) + 2
    return Point(product, _title(product, shape), tokens, candidates, reason)


def shape_of(product: Product) -> ExpertShape | DenseShape | str:
    """As tables know it, or why kernels do not read it."""
    if isinstance(product, DenseProduct):
        layout = layout_of(product.format, product.columns)
        return layout if isinstance(layout, str) else DenseShape(layout.code, product.rows, product.columns)
    gate_up, down = layout_of(product.gate_up, product.hidden), layout_of(product.down, product.inner)
    if isinstance(gate_up, str) or isinstance(down, str):
        return gate_up if isinstance(gate_up, str) else str(down)
    sizes = product.experts, product.top_k, product.hidden, product.inner
    return ExpertShape(gate_up.code, down.code, *sizes)


def _title(product: Product, shape: ExpertShape | DenseShape | str) -> str:
    if isinstance(product, DenseProduct):
        code = shape.code if isinstance(shape, DenseShape) else product.format.name
        return f"dense {code} {product.rows}x{product.columns}"
    codes = (shape.gate_up, shape.down) if isinstance(shape, ExpertShape) else (product.gate_up.name,)
    sizes = f"{product.experts}/{product.top_k}/{product.hidden}/{product.inner}"
    return f"experts {'/'.join(dict.fromkeys(codes))} {sizes}"
