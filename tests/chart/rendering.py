"""What the chart renders, as objects."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "moebius"
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Values = Mapping[str, Any]
Object = dict[str, Any]

# The least that can be installed.
SIMULATED: Values = {"models": {"demo": {"settings": {"engine": "sim"}}}}


class RefusedError(Exception):
    """Helm's message."""


def helm() -> str | None:
    """The program: beside this Python, or on PATH."""
    return shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def render(
    values: Values, *, release: str = "moebius", namespace: str = "default", kube: str = "1.34.0"
) -> list[Object]:
    """Raises RefusedError."""
    # Objects of their own, since tests may change them.
    return [
        one for one in yaml.load_all(_template(json.dumps(values), release, namespace, kube), Loader) if one
    ]


@cache
def _template(values: str, release: str, namespace: str, kube: str) -> str:
    program = helm()
    assert program is not None
    done = subprocess.run(
        [
            *(program, "template", release, str(CHART), "--namespace", namespace),
            *("--kube-version", kube, "--values", "-"),
        ],
        input=values,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def merged(*values: Values) -> dict[str, Any]:
    """As helm merges several files of values."""
    result: dict[str, Any] = {}
    for one in values:
        for key, value in one.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def the(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = (one for one in of_kind(objects, kind) if one["metadata"]["name"] == name)
    return found


def workloads(objects: Sequence[Object]) -> Iterator[Object]:
    """Everything with a pod template."""
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one


def container(workload: Object) -> Object:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def flag(workload: Object, name: str) -> str | None:
    """The value of a flag of the workload's program."""
    found = [
        arg.removeprefix(f"--{name}=") for arg in container(workload)["args"] if arg.startswith(f"--{name}=")
    ]
    return found[-1] if found else None


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A label selector with matchLabels and matchExpressions of `In`."""
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )
