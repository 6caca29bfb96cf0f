"""Random weights of sane scale in a form of choice: what measures speed without a checkpoint's weights.

The scales keep the tokens of a prompt apart, so that routers spread them over the experts as trained ones do:
with the usual small embeddings, layers' outputs soon outweigh what the tokens differ in.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.ggml import Ggml
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.models.parameters import Matrix, Slots
from moebius_worker.engine.weights.load import Fill, Loading, LoadProgress
from moebius_worker.engine.weights.scheme import StoredForm

FORMS: Mapping[str, Format] = MappingProxyType(
    {
        "bf16": Dense(torch.bfloat16),
        "fp8": Fp8(128, 128, rounds_activations=True),
        "nvfp4": Nvfp4(),
        "mxfp4": Mxfp4(),
        "int4": IntGroup(4, 128, False, torch.bfloat16),
        "q4_0": Ggml(Type.Q4_0),
        "q4_k": Ggml(Type.Q4_K),
    }
)

# Root mean squares of the codes, each as likely as any other: of E2M1, and of 0 to 15 around their middle.
_E2M1_RMS = 2.93
_INT4_RMS = 4.64
# FP8 codes are spread over so much.
_FP8_STD = 32.0
# Of Q4_K: factor and minimum of each group of 32, in units of the block's.
_Q4_K_STEPS = 15

_FLOATING = ("embed_tokens", "lm_head", ".gate.", ".router.", "shared_expert_gate")


class DummyWeights:
    """Reader and scheme of a checkpoint that is not there: each read makes random numbers on `device`."""

    def __init__(self, slots: Slots, form: Format, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.name = f"dummy {form.name}"
        self._form = form
        self.tensors = {
            name: TensorInfo(slot.shape, "BF16", "nowhere", 2 * math.prod(slot.shape))
            for name, slot in slots.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """A vector."""
        shape = self.slots[name].shape
        if "norm" in name or "scale" in name or "scalar" in name:
            return torch.ones(shape)
        return 0.02 * torch.randn(shape)

    def form(self, weight: str, tensors: Mapping[str, TensorInfo]) -> StoredForm:
        """Embeddings, head and routers are floating-point, and so is what the form cannot store."""
        shape = self.slots[weight].shape
        form: Format = self._form
        if any(part in weight for part in _FLOATING) or shape[-1] % form.column_block:
            form = Dense(torch.bfloat16)
        return StoredForm(form, shape, (weight,), lambda _: self._parts(form, shape, _std(weight, shape)))

    def _parts(self, form: Format, shape: tuple[int, ...], std: float) -> Mapping[str, torch.Tensor]:
        matrix = StoredMatrix.empty(form, shape, self.device)
        _FILL[type(form)](matrix, std)
        return matrix.parts


def fill_whole(loading: Loading, progress: LoadProgress) -> None:
    """As `loading.fill`, of dummy weights. Matrices that are kept in their form are filled where they are,
    all experts of a layer at once."""
    fills: dict[Matrix, list[Fill]] = {}
    for fill in loading.fills:
        owner = fill.slot.owner
        if isinstance(owner, Matrix):
            fills.setdefault(owner, []).append(fill)
    whole = {matrix for matrix, mine in fills.items() if all(_is_kept(loading, fill) for fill in mine)}
    for done, matrix in enumerate(whole):
        first = fills[matrix][0]
        for block in matrix.blocks:
            _FILL[type(block.format)](block, _std(first.name, first.slot.shape))
        progress(first.name, done, len(whole))
    rest = [fill for fill in loading.fills if fill.slot.owner not in whole]
    replace(loading, fills=rest).fill(progress=progress)


def _is_kept(loading: Loading, fill: Fill) -> bool:
    assert fill.form is not None
    assert isinstance(fill.slot.owner, Matrix)
    return loading.forms[fill.slot.owner][fill.slot.part] == fill.form.format


def _std(name: str, shape: tuple[int, ...]) -> float:
    for part, std in (("embed_tokens", 1.0), ("o_proj", 0.002), ("down_proj", 0.005), ("w2", 0.005)):
        if part in name:
            return std
    return shape[-1] ** -0.5


def _random_bytes(part: torch.Tensor) -> None:
    part.view(torch.uint8).random_(0, 256)


def _dense(matrix: StoredMatrix, std: float) -> None:
    matrix.parts["data"].normal_(0, std)


def _fp8(matrix: StoredMatrix, std: float) -> None:
    data = matrix.parts["data"]
    data.copy_(torch.randn(data.shape, device=data.device) * _FP8_STD)
    matrix.parts["scale"].fill_(std / _FP8_STD)


def _nvfp4(matrix: StoredMatrix, std: float) -> None:
    _random_bytes(matrix.parts["data"])
    matrix.parts["scale"].copy_(torch.ones((), device=matrix.parts["scale"].device))
    matrix.parts["row_scale"].fill_(std / _E2M1_RMS)


def _mxfp4(matrix: StoredMatrix, std: float) -> None:
    _random_bytes(matrix.parts["data"])
    matrix.parts["scale"].fill_(127 + round(math.log2(std / _E2M1_RMS)))


def _either_sign(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """1 and -1: codes around their middle reach a step further down than up, and of a mean that is not 0
    layers would make all tokens alike."""
    return 1 - 2 * torch.randint(2, shape, device=device)


def _int_group(matrix: StoredMatrix, std: float) -> None:
    _random_bytes(matrix.parts["data"])
    scale = matrix.parts["scale"]
    scale.copy_(_either_sign(scale.shape, scale.device) * (std / _INT4_RMS))


def _ggml(matrix: StoredMatrix, std: float) -> None:
    assert isinstance(matrix.format, Ggml)
    data = matrix.parts["data"]
    _random_bytes(data)
    blocks = data.unflatten(-1, (-1, GGML_QUANT_SIZES[matrix.format.type][1]))
    factors = torch.tensor([std / _INT4_RMS], device=data.device)
    if matrix.format.type is Type.Q4_K:
        factors = torch.tensor([1.0, 7.5], device=data.device) * (std / _INT4_RMS / _Q4_K_STEPS)
        # Six bits for each factor and minimum: the first four of each, then all others' low halves.
        blocks[..., 4:12] = _Q4_K_STEPS
        blocks[..., 12:16] = _Q4_K_STEPS | _Q4_K_STEPS << 4
    heads = (_either_sign(blocks[..., :1].shape, data.device) * factors).half().view(torch.uint8)
    blocks[..., : heads.shape[-1]] = heads


_FILL: Mapping[type, Callable[[StoredMatrix, float], None]] = MappingProxyType(
    {
        Dense: _dense,
        Fp8: _fp8,
        Nvfp4: _nvfp4,
        Mxfp4: _mxfp4,
        IntGroup: _int_group,
        Ggml: _ggml,
    }
)
