"""schemathesis against GET /openapi.json: what it says is so, whatever is sent."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import ROOT, Api

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
# Not that all is served which the schemas allow: which parameters exclude each other they cannot say.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


def of_one_model(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document, with the model that is served: else most requests would ask for one that is not there."""
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"const": model}
            schema["required"] = sorted({*schema.get("required", ()), "model"})
    return document


@pytest.mark.timeout(420)
def test_the_document_is_honest(sim: Api, tmp_path: Path) -> None:
    document = of_one_model(httpx.get(f"{sim.url}/openapi.json").json(), sim.model)
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(document))
    done = subprocess.run(
        [
            SCHEMATHESIS,
            *("run", file, "--url", sim.url),
            *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", "25", "--seed", "1", "--request-timeout", "30", "--no-color"),
            *("--report", "ndjson", "--report-dir", tmp_path),
        ],
        cwd=tmp_path,
        env=os.environ
        | {
            "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "SCHEMATHESIS_HOOKS": "tests.clients.short_answers",
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr
    [report] = tmp_path.glob("*.ndjson")
    assert len(re.findall(r'"status_code": ?200', report.read_text())) > 100, "nearly nothing was served"
