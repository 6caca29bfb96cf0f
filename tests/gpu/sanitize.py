"""A case or two of each kernel under NVIDIA's compute-sanitizer: `make gpu-sanitize`.

Prints a line for each tool, with the number of errors; what a tool said is in a file of its own. Cases are
tests of tiny shapes, run in one process for each tool. Before that they run without a tool and side by side,
which compiles what they need.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

# With its own flags. Errors of the API are PyTorch's business: it asks for what a driver may not have.
TOOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
)
# Of each kernel one or two.
CASES = (
    "test_small_operations.py::test_add_rms_norm[100-dtype1]",
    "test_small_operations.py::test_gated_rms_norm[silu-dtype1]",
    "test_small_operations.py::test_gated[shape0-activation0-dtype1]",
    "test_small_operations.py::test_rotate_and_write_kv[9-3-80-20-True-fp8]",
    "test_router.py::test_experts_and_how_many_are_chosen[dtype0-60-4]",
    "test_router.py::test_groups[48-3-2]",
    "test_align.py::test_alignment[few-True]",
    "test_align.py::test_alignment[chunks-False]",
    "test_experts.py::test_every_form[nvfp4]",
    "test_experts.py::test_every_form[fp8_block]",
    "test_experts.py::test_every_form[q4_k]",
    "test_experts.py::test_ragged_columns[int4]",
    "test_experts.py::test_slots_and_pairs_that_do_not_exist[5]",
    "test_experts.py::test_all_tokens_on_one_expert[131]",
    "test_hopper_products.py::test_bf16",
    "test_hopper_products.py::test_words[320-nvfp4]",
    "test_hopper_products.py::test_words[320-mxfp4]",
    "test_hopper_products.py::test_products_of_rounded_activations[False]",
    "test_linear.py::test_every_form[q6_k]",
    "test_linear.py::test_shares_of_the_columns",
    "test_attention.py::test_mixed_batch[6-2-16]",
    "test_attention.py::test_sliding_window[scores1-33]",
    "test_attention.py::test_results_of_splits_are_put_together[3]",
    "test_attention.py::test_quantised_pages_are_read_as_the_reference_reads_them[64-False-int8]",
    "test_prefill_attention_hopper.py::test_prompts[pieces0]",
    "test_write_kv.py::test_rows_that_are_slices_of_a_wider_tensor",
    "test_states.py::test_delta_rule_of_other_sizes[sizes1]",
    "test_states.py::test_convolution[False-4-3]",
    "test_sampling.py::test_the_same_tokens_as_the_reference[2500-200-truncated]",
)
_FOLDER = "tests/kernels/triton"
_SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, \d+ warnings?\)"),
)
# What pytest says last.
_PYTEST = r"^(?:=+ )?(\d+ (?:passed|failed|errors?)\b.* in [\d.]+s)"


def command(*flags: str) -> list[str]:
    """What runs the cases."""
    cases = [f"{_FOLDER}/{case}" for case in CASES]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, *cases]


def errors_in(text: str) -> int | None:
    """What a tool counted; None if it came to no end."""
    found = [int(match[1]) for pattern in _SUMMARIES for match in pattern.finditer(text)]
    return sum(found) if found else None


def sanitize(tool: str, folder: Path, seconds: float) -> bool:
    """Prints a line; whether nothing was found."""
    # Each tensor is an allocation of its own: what is beside it belongs to nobody.
    settings = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    log = folder / f"{tool}.log"
    line = [
        "compute-sanitizer",
        "--tool",
        tool,
        *TOOLS[tool],
        "--error-exitcode",
        "9",
        *command("--timeout=0"),
    ]
    began = time.monotonic()
    with log.open("w") as output:
        try:
            status = subprocess.run(
                line, env=settings, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
            ended = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, ended = -1, f"stopped after {seconds:.0f} s"
    text = log.read_text()
    errors = errors_in(text)
    passed = re.findall(_PYTEST, text, re.MULTILINE)
    counted = "no summary" if errors is None else f"{errors} errors"
    tests = passed[-1] if passed else "no test ended"
    print(f"{tool}: {counted}, {tests}, {ended}, {time.monotonic() - began:.0f} s, {log}", flush=True)
    return status == 0 and errors == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=[*TOOLS], help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize"), help="where the tools' logs go")
    parser.add_argument("--seconds", type=float, default=240.0, help="that a tool may take")
    options = parser.parse_args(arguments)
    options.logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    processes = str(min(8, os.cpu_count() or 1))
    if subprocess.run(command("--numprocesses", processes), check=False).returncode:
        print("the tests fail without a tool: see above")
        return 1
    print(f"without a tool: {time.monotonic() - began:.0f} s", flush=True)
    clean = [sanitize(tool, options.logs, options.seconds) for tool in options.tools]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
