"""No kernel is compiled in somebody's request: the steps of a preflight meet all that other steps launch."""

import json
from pathlib import Path

import pytest

from tests.without_interpreter import told

pytest.importorskip("triton")

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


# Eight experts a token, where sizes are powers of two; ten, of so few that Hopper's products serve; windows
# and biases; FP8 products of rows with twelve groups, of which two tokens' and their sixteen pairs are
# multiples of other powers of two. Of each, what many tokens have: products, attention where Hopper's serves.
@pytest.mark.parametrize(
    ("name", "form", "changes", "others"),
    [
        ("Qwen3-30B-A3B", "nvfp4", {}, {"_words_gemm", "_prefill_hopper"}),
        ("Qwen3-Next-80B-A3B", "bf16", {"num_experts": 128}, {"_bf16_gemm"}),
        ("gpt-oss-20b", "mxfp4", {}, {"_words_gemm", "_prefill_hopper"}),
        ("Qwen3-30B-A3B", "q4_k", {}, {"_words_gemm", "_prefill_hopper"}),
        ("Qwen3-30B-A3B", "fp8", {"hidden_size": 1536}, {"_fp8_gemm", "_prefill_hopper"}),
    ],
)
@pytest.mark.timeout(180)
def test_other_steps_launch_no_other_kernels(
    name: str, form: str, changes: dict[str, int], others: set[str], tmp_path: Path
) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    found = told("tests.worker.preflight.launched", str(tmp_path), form, cache=tmp_path / "triton")
    usual = {"grouped_gemm", "_align_few", "_decode", "_prefill", "_draw_in_block"}
    assert usual | others <= set(found["met"])
    assert found["late"] == []
    # They are known without being compiled.
    assert not list((tmp_path / "triton").rglob("*.cubin"))
