"""GGUF's tensor names of the architecture `llama`, told in Hugging Face's names."""

import re
from dataclasses import dataclass

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
_EXPERTS = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class HuggingFaceName:
    """A tensor's name, and how GGUF has it otherwise.

    If it is `stacked`, it is all experts' tensors, one after another, and `name` has `{expert}` in it. If its
    rows are in llama.cpp's order, `rotated` is the key of the config that tells the number of heads.
    """

    name: str
    stacked: bool = False
    rotated: str | None = None


def hugging_face_name(name: str) -> HuggingFaceName | None:
    """The Hugging Face name of GGUF's `name`; None for a tensor that no Llama or Mixtral has."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return HuggingFaceName(f"{_TOP[part]}.{kind}") if part in _TOP else None
    prefix = f"model.layers.{layer}."
    if part in _EXPERTS and kind == "weight":
        return HuggingFaceName(
            f"{prefix}block_sparse_moe.experts.{{expert}}.{_EXPERTS[part]}.weight", stacked=True
        )
    if part in _LAYER:
        rotated = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)
        return HuggingFaceName(f"{prefix}{_LAYER[part]}.{kind}", rotated=rotated)
    return None
