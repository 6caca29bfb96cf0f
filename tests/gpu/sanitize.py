"""A case or two of each kernel under NVIDIA's compute-sanitizer: `make gpu-sanitize`.

Prints a line for each tool, with the number of errors; what a tool said is in a file of its own. Cases are
tests of tiny shapes, run in one process for each tool. Before that they run without a tool and side by side,
which compiles what they need. Cases that a tool misjudges are left out for as long as it misjudges a small
program too that is right, its control.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.gpu import handed_over


@dataclass(frozen=True)
class Tool:
    """Its own flags; the files whose cases are left out, and the module that is misjudged as they are."""

    flags: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    control: str | None = None

    @property
    def cases(self) -> list[str]:
        return [case for case in CASES if not case.startswith(self.left_out)]


TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        # Errors of the API are PyTorch's business: it asks for what a driver may not have.
        "memcheck": Tool(("--report-api-errors", "no")),
        # Of kernels whose groups of warps divide their labour it reports what these hand over to each other
        # in shared memory: numbers, which one thread's arrival on an mbarrier gives back behind its group's
        # barrier; and what Triton tells the groups to do, between barriers of all. Both are in order, which
        # what the compiler makes of the kernels is held to (tests/kernels/triton/arrivals.py). NVIDIA's
        # release notes mend false reports of mbarriers from 2025.1 up to 2026.3: the control says when these
        # are gone too.
        "racecheck": Tool(
            left_out=("test_hopper_products.py", "test_prefill_attention_hopper.py"),
            control="tests.gpu.handed_over",
        ),
    }
)
# Of each kernel one or two.
CASES = (
    "test_small_operations.py::test_add_rms_norm[100-dtype1]",
    "test_small_operations.py::test_gated_rms_norm[silu-dtype1]",
    "test_small_operations.py::test_gated[shape0-activation0-dtype1]",
    "test_small_operations.py::test_rotate_and_write_kv[9-3-80-20-True-fp8-0]",
    "test_router.py::test_experts_and_how_many_are_chosen[dtype0-60-4]",
    "test_router.py::test_groups[48-3-2]",
    "test_align.py::test_alignment[few-True]",
    "test_align.py::test_alignment[chunks-False]",
    "test_experts.py::test_every_form[nvfp4]",
    "test_experts.py::test_every_form[fp8_block]",
    "test_experts.py::test_every_form[q4_k]",
    "test_experts.py::test_ragged_columns[int4]",
    "test_experts.py::test_ragged_columns[int4_words]",
    "test_experts.py::test_slots_and_pairs_that_do_not_exist[5]",
    "test_experts.py::test_all_tokens_on_one_expert[131]",
    "test_hopper_products.py::test_bf16",
    "test_hopper_products.py::test_words[320-nvfp4]",
    "test_hopper_products.py::test_words[320-mxfp4]",
    "test_hopper_products.py::test_words[320-int4 32]",
    "test_hopper_products.py::test_words[320-int4 128 centred]",
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
_WELL = "exit status 0"
# What pytest says last.
_PYTEST = r"^(?:=+ )?(\d+ (?:passed|failed|errors?)\b.* in [\d.]+s)"


def command(cases: Sequence[str], *flags: str) -> list[str]:
    """What runs the cases."""
    places = [f"{_FOLDER}/{case}" for case in cases]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, *places]


def errors_in(text: str) -> int | None:
    """What a tool counted; None if it came to no end."""
    found = [int(match[1]) for pattern in _SUMMARIES for match in pattern.finditer(text)]
    return sum(found) if found else None


def sanitize(name: str, folder: Path, seconds: float) -> bool:
    """Prints a line, and one before it for what is left out; whether nothing was found."""
    tool = TOOLS[name]
    known = tool.control is None or _misjudged(name, tool, folder, seconds)
    log = folder / f"{name}.log"
    began = time.monotonic()
    text, ended = _told(name, tool.flags, command(tool.cases, "--timeout=0"), log, seconds)
    errors = errors_in(text)
    passed = re.findall(_PYTEST, text, re.MULTILINE)
    counted = "no summary" if errors is None else f"{errors} errors"
    tests = passed[-1] if passed else "no test ended"
    print(f"{name}: {counted}, {tests}, {ended}, {time.monotonic() - began:.0f} s, {log}", flush=True)
    return known and ended == _WELL and errors == 0


def _misjudged(name: str, tool: Tool, folder: Path, seconds: float) -> bool:
    """Whether the tool still reports errors of its control, which is right."""
    log = folder / f"{name}-control.log"
    text, ended = _told(name, tool.flags, [sys.executable, "-m", str(tool.control)], log, seconds)
    errors = errors_in(text)
    if handed_over.RIGHT not in text or errors is None:
        print(f"{name}: its control came to no good end, {ended}, {log}", flush=True)
        return False
    if not errors:
        print(f"{name}: its control is not reported any more: put the cases back that are left out, {log}")
        return False
    left_out = f"{len(CASES) - len(tool.cases)} of {len(CASES)} cases left out"
    why = f"it does not follow what groups of warps hand over: its control is reported ({errors} errors)"
    print(f"{name}: {left_out}, {why}, {log}", flush=True)
    return True


def _told(
    name: str, flags: Sequence[str], program: Sequence[str], log: Path, seconds: float
) -> tuple[str, str]:
    """What the tool and a program under it print, and how that ended."""
    # Each tensor is an allocation of its own: what is beside it belongs to nobody.
    settings = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    line = ["compute-sanitizer", "--tool", name, *flags, "--error-exitcode", "9", *program]
    with log.open("w") as output:
        try:
            status = subprocess.run(
                line, env=settings, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
            ended = f"exit status {status}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds:.0f} s"
    return log.read_text(), ended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=[*TOOLS], help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize"), help="where the tools' logs go")
    parser.add_argument("--seconds", type=float, default=240.0, help="that a tool may take")
    options = parser.parse_args(arguments)
    options.logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    processes = str(min(8, os.cpu_count() or 1))
    if subprocess.run(command(CASES, "--numprocesses", processes), check=False).returncode:
        print("the tests fail without a tool: see above")
        return 1
    print(f"without a tool: {time.monotonic() - began:.0f} s", flush=True)
    clean = [sanitize(tool, options.logs, options.seconds) for tool in options.tools]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
