"""values.yaml and its schema."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.generate import generated, strangers
from tests.chart.matrix import EVERYTHING, MATRIX
from tests.chart.rendering import CHART, SIMULATED, RefusedError, Values, helm, merged, render


@pytest.mark.parametrize("path", generated(), ids=lambda path: path.name)
def test_what_is_generated_is_current(path: Path) -> None:
    assert path.exists(), "run `make chart`"
    assert path.read_text() == generated()[path], "run `make chart`"
    assert not strangers()


@pytest.mark.parametrize(
    "typo",
    [
        {"gatway": {}},
        {"gateway": {"replicaCount": 2}},
        {"gateway": {"replicas": "2"}},
        {"gateway": {"settings": {"drain_grac": 3}}},
        {"worker": {"settings": {"listen": "0.0.0.0:1"}}},
        {"worker": {"gpu": {"counts": 1}}},
        {"worker": {"cache": {"kind": "memory"}}},
        {"models": {"demo": {"replica": 2}}},
        {"models": {"demo": {"settings": {"max_runing": 2}}}},
        {"models": {"demo": {"source": {"hf": "a/b"}}}},
        {"models": {"Demo": {"settings": {"engine": "sim"}}}},
        {"models": {"d" * 41: {"settings": {"engine": "sim"}}}},
        {"controller": {"settings": {"stack": "a"}}},
        {"networkPolicy": {"apiServer": {"port": 443}}},
        {"serviceMonitor": {"enable": True}},
    ],
    ids=json.dumps,
)
def test_typos_are_refused(typo: Values) -> None:
    with pytest.raises(RefusedError, match="meet the specifications of the schema"):
        render(merged(SIMULATED, typo))


def test_helm_has_nothing_to_say() -> None:
    program = helm()
    assert program is not None
    done = subprocess.run(
        [program, "lint", "--strict", "--kube-version", "1.34.0", str(CHART), "--values", "-"],
        input=json.dumps(SIMULATED),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def _keys(value: Any, path: str = "") -> list[str]:
    if not isinstance(value, dict):
        return []
    return [f"{path}{key}" for key in value] + [
        inner for key, part in value.items() for inner in _keys(part, f"{path}{key}.")
    ]


def test_every_key_is_explained() -> None:
    """By a comment of its own or, for what belongs together, by that of the key before it."""
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]
    unexplained = []

    def look(name: str, part: dict[str, Any]) -> None:
        inner = part.get("properties")
        if inner is None and "description" not in part:
            unexplained.append(name)
        for key, one in (inner or {}).items():
            look(f"{name}.{key}", one)

    for name, part in properties.items():
        if name != "global":
            look(name, part)
    allowed = (
        ".key",
        ".ports",
        ".cidr",
        ".name",
        ".minReplicas",
        ".maxReplicas",
        "Seconds",
        ".failureThreshold",
    )
    assert not [name for name in unexplained if not name.endswith(allowed)]


def test_the_matrix_uses_every_switch() -> None:
    """A key `enabled` or `create` that no case turns from its default would be tested by nobody."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    switches = {key for key in _keys(defaults) if key.endswith((".enabled", ".create"))}
    turned = {
        key
        for _, values, _ in MATRIX
        for key in _keys(dict(values))
        if key in switches and _at(values, key) != _at(defaults, key)
    }
    assert switches - turned <= {"controller.serviceAccount.create", "controller.pdb.enabled"}
    assert EVERYTHING


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values
