"""Every stored form that the kernels read, by a short name."""

import torch
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.e2m1_words import E2m1Words
from moebius_kernels.formats.format import Format
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.ggml import Ggml
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.pack import packed_format

_INT4 = {
    "int4": IntGroup(4, 128, False, torch.bfloat16),
    "int4_zero": IntGroup(4, 64, True, torch.float16),
    "int4_row": IntGroup(4, None, False, torch.float16),
}
_RARE = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ3_S", "TQ1_0", "Q1_0"]
_GGML = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
FORMATS: dict[str, Format] = {
    "bf16": Dense(torch.bfloat16),
    "nvfp4": Nvfp4(),
    "mxfp4": Mxfp4(),
    "nvfp4_words": E2m1Words(Nvfp4()),
    "mxfp4_words": E2m1Words(Mxfp4()),
    "fp8": Fp8(),
    "fp8_block": Fp8(128, 128),
    "fp8_row_groups": Fp8(1, 128),
    **_INT4,
    **{f"{name}_words": packed_format(form) for name, form in _INT4.items()},
    "int8": IntGroup(8, 128, False, torch.bfloat16),
    "int8_zero": IntGroup(8, 32, True, torch.float32),
    **{name.lower(): packed_format(Ggml(Type[name])) for name in (*_GGML, *_RARE)},
}
