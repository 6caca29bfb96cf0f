"""The schema of the chart's values, from values.yaml.

A key's type is that of its default; nothing is allowed that is not there. Comments above a key say more:

    # -- What it is for.
    # @schema {enum: [a, b]}          JSON schema that is added to what the default says
    # @schema {settings: worker}      the settings of a service, by the names of its settings file
    # @schema {entries: worker}       any names, each with the keys of `worker`, none of them needed
"""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from moebius_common.settings import ServiceSettings
from moebius_controller.settings import ControllerSettings
from moebius_gateway.settings import GatewaySettings
from moebius_worker.settings import WorkerSettings

CHART = Path(__file__).parent / "moebius"
Schema = dict[str, Any]

# The settings of a service, and which of them the chart sets itself.
SERVICES: Mapping[str, tuple[type[ServiceSettings], str]] = {
    "gateway": (
        GatewaySettings,
        "config listen admin_listen workers discover_selector discover_namespace api_keys tls_cert tls_key "
        "log_format",
    ),
    "worker": (
        WorkerSettings,
        "config listen metrics_listen model served_model_name level_file log_format",
    ),
    "controller": (
        ControllerSettings,
        "config driver stack metrics_listen namespace selector lease_name state_configmap watch_nodes "
        "log_format",
    ),
}
ENTRY_NAME = r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"
OPEN = ("ecurityContext", "resources", "labels", "settings")
_KEY = re.compile(r"^( *)([\w.-]+):")


def schema() -> Schema:
    text = (CHART / "values.yaml").read_text()
    comments = annotations(text)
    values = yaml.safe_load(text)
    root = of_value(values, (), comments)
    for name, part in root["properties"].items():
        if (entries := part.pop("entries", None)) is not None:
            part["additionalProperties"] = {"$ref": f"#/properties/{entries}"}
            part["propertyNames"] = {"pattern": ENTRY_NAME}
            assert name != entries
    # Helm adds it where this chart is part of another.
    root["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of moebius", **root}


def of_value(value: object, path: tuple[str, ...], comments: Mapping[tuple[str, ...], Schema]) -> Schema:
    """The schema of a key from its default and what is written above it."""
    own = copy.deepcopy(comments.get(path, {}))
    if (service := own.pop("settings", None)) is not None:
        own |= of_settings(*SERVICES[service])
    found: Schema
    match value:
        case bool():
            found = {"type": "boolean"}
        case int():
            found = {"type": "integer"}
        case str():
            found = {"type": "string"}
        case list():
            found = {"type": "array"}
        case dict() if _is_closed(path, value):
            properties = {key: of_value(part, (*path, key), comments) for key, part in value.items()}
            found = {"type": "object", "properties": properties, "additionalProperties": False}
        case dict():
            found = {"type": "object"}
        case None:
            found = {}
        case _:
            raise ValueError(f"{path}: no type is known for {value!r}")
    return found | own


def _is_closed(path: tuple[str, ...], value: object) -> bool:
    """Whether the keys of a map are those of values.yaml. Maps of Kubernetes' own types are open, and maps of
    labels."""
    return bool(value) and not "".join(path[-1:]).endswith(OPEN)


def of_settings(settings: type[ServiceSettings], own: str) -> Schema:
    """Names, types and meanings of a service's settings without those that the chart sets itself."""
    left_out = own.split()
    parts = settings.model_json_schema()["properties"]
    names = [name for name in settings.model_fields if name not in left_out]
    return {
        "type": "object",
        "properties": {
            name: _types(parts[name]) | {"description": parts[name]["description"]} for name in names
        },
        "additionalProperties": False,
    }


def _types(part: Schema) -> Schema:
    """The types that a setting may have; a number may be written as text, as on the command line."""
    types = [one.get("type") for one in part.get("anyOf", [part])]
    if None in types or "object" in types:
        return {}
    return {"type": sorted({*types, "string"} - {"null"})}


def annotations(text: str) -> dict[tuple[str, ...], Schema]:
    """What is written above each key: its description, and the schema that is added."""
    found: dict[tuple[str, ...], Schema] = {}
    path: list[tuple[int, str]] = []
    about: list[str] = []
    more: Schema = {}
    for line in text.splitlines():
        comment = line.strip()
        if comment.startswith("# @schema "):
            more |= yaml.safe_load(comment.removeprefix("# @schema "))
        elif comment.startswith("# -- "):
            about = [comment.removeprefix("# -- ")]
        elif comment.startswith("# ") and about:
            about.append(comment.removeprefix("# "))
        elif match := _KEY.match(line):
            indent = len(match[1])
            path = [one for one in path if one[0] < indent] + [(indent, match[2])]
            found[tuple(key for _, key in path)] = more | ({"description": " ".join(about)} if about else {})
            about, more = [], {}
        else:
            about, more = [], {}
    return found


def as_text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
