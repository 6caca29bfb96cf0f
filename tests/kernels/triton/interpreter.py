"""Mends Triton 3.6's interpreter where it differs from what compiled kernels do, or wastes time."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}


def mend() -> None:
    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        # A number that was loaded is an array with one element, of which numpy makes no int from 2.4 on.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def converted(values, source, target, rounding_mode):
        """The original rounds halves up, and loses what is carried into the exponent."""
        if source not in _TORCH_TYPES or target not in _TORCH_TYPES:
            return convert(values, source, target, rounding_mode)
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}
        raw = torch.from_numpy(np.ascontiguousarray(values).view(bits[values.dtype.itemsize]))
        wide = raw.view(_TORCH_TYPES[source]).float()
        target_type = _TORCH_TYPES[target]
        return wide.to(target_type).view(getattr(torch, f"uint{8 * target_type.itemsize}")).numpy()

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        """The original takes the bits of bf16 for integers."""
        x, y = (
            converted(one.data, one.dtype.scalar, tl.float32, None).view(np.float32)
            if one.dtype.scalar == tl.bfloat16
            else one.data
            for one in (a, b)
        )
        return interpreter.TensorHandle(np.matmul(x, y, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor, interpreter._convert_float = patched, converted
    interpreter.InterpreterBuilder.create_dot = dot
    _save_time()


def _save_time():
    """Most of it goes not into what kernels compute, but into what the language makes of types."""
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    numpy_type = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda one: (
        np.dtype(np.uint64) if one.scalar.is_ptr() else numpy_type(one.scalar)
    )
    # Each sum and product of integers would be computed once more, in 64 bits: the tests' numbers are small.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    new_block, new_tensor = tl.block_type.__init__, tl.tensor.__init__
    blocks = {}

    def make_block(self, element, shape):
        if type(self) is not tl.block_type or element.is_ptr():
            new_block(self, element, shape)
            return
        key = (element.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            new_block(self, element, shape)
            # Itself, not a copy: what make_tensor puts there is for the later ones too.
            blocks[key] = self.__dict__
        self.__dict__.update(blocks[key])

    def make_tensor(self, handle, type):
        kept = type.__dict__.get("of_tensors")
        if kept is None:
            new_tensor(self, handle, type)
            type.of_tensors = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = kept

    tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor


def _once_a_launch(patch_lang):
    """The original puts its own functions in the language's place with each function that a kernel calls."""
    everywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    nothing = interpreter._LangPatchScope()
    patched = []

    def restore_all():
        while patched:
            patched.pop().restore()

    def patch(_):
        if patched:
            return nothing
        patched.append(patch_lang(everywhere))
        return SimpleNamespace(restore=restore_all)

    return patch
