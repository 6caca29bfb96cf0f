"""schemathesis against GET /openapi.json: what it says is so, whatever is sent."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.clients.conftest import Api

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
# Else most requests would ask for a model that is not there, or generate for ever.
SMALL: dict[str, Any] = {
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "max_completion_tokens": {"type": "null"},
    "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "n": {"type": "integer", "minimum": 1, "maximum": 4},
}


def narrowed(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document, with the model that is served and answers that are short."""
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request"):
            small = {name: SMALL[name] for name in SMALL.keys() & schema["properties"].keys()}
            schema["properties"] |= small | {"model": {"const": model}}
            schema["required"] = sorted({*schema["required"], *small} - {"max_completion_tokens", "n"})
    return document


def test_the_document_is_honest(sim: Api, tmp_path: Path) -> None:
    document = narrowed(httpx.get(f"{sim.url}/openapi.json").json(), sim.model)
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
        env=os.environ | {"HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr
    [report] = tmp_path.glob("*.ndjson")
    assert len(re.findall(r'"status_code": ?200', report.read_text())) > 100, "nearly nothing was served"
