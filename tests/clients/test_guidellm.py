"""guidellm, a benchmark client, offline: its tokenizer is a folder, and all its requests are answered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import PYTHON, ROOT, Api

GUIDELLM = Path(sys.executable).with_name("guidellm")
REQUESTS, OUTPUT_TOKENS = 16, 12
WRITE = "import sys, pathlib, tests.tiny; tests.tiny.write_tokenizer(pathlib.Path(sys.argv[1]))"


@pytest.mark.timeout(240)
def test_a_benchmark(sim: Api, tmp_path: Path) -> None:
    if not GUIDELLM.exists():
        pytest.skip("guidellm is not installed")
    tokenizer, report = tmp_path / "tokenizer", tmp_path / "report.json"
    subprocess.run([PYTHON, "-c", WRITE, tokenizer], cwd=ROOT, check=True)
    done = subprocess.run(
        [
            *(GUIDELLM, "run", "--backend", f"kind=openai_http,target={sim.url}"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
        ],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"]
    assert len(requests["successful"]) == REQUESTS
    for request in requests["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["time_to_first_token_ms"] > 0
