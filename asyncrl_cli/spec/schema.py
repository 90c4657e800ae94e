"""The JSON schema of a spec file, for editors. It accepts every file that `asyncrl validate-spec` accepts.

`python -m asyncrl_cli.spec.schema > specs/spec.schema.json` writes the copy that the repository's specs name in their
first line; a test compares it with the models. `asyncrl init` writes another copy next to the new spec.
"""

from __future__ import annotations

import json
from typing import Any

from asyncrl_cli.spec.keys import keys
from asyncrl_cli.spec.sections import ExperimentSpec

FILE = "spec.schema.json"
_VARIABLE = {
    "description": "A value with an environment variable, or a number with underscores, which YAML 1.2 reads as text.",
    "type": "string",
    "pattern": r"\$\{env:|^[-+]?[0-9]+_[0-9_.eE+-]*$",
}
_REFERENCE = {"$ref": "#/$defs/Variable"}
_ABOUT = ("description", "title", "default", "examples")


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12). A file that extends others has no required keys: the others may have them."""
    model = ExperimentSpec.model_json_schema()
    entries = _list_entries(model)
    for name, section in {"": model, **model["$defs"]}.items():
        if name not in entries:
            section.pop("required", None)
        section["properties"] = {key: _or_variable(value) for key, value in section["properties"].items()}
    text = {"type": "string"}
    model["properties"]["extends"] = {
        "description": "Specs to start from, relative to this file.",
        "anyOf": [text, {"type": "array", "items": text}],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:asyncrl:spec",
        **model,
        "$defs": {**model["$defs"], "Variable": _VARIABLE},
        "if": {"not": {"required": ["extends"]}},
        "then": _required(),
    }


def _list_entries(schema: dict[str, Any]) -> set[str]:
    """Sections that are entries of lists. Layers do not merge lists, so an entry always needs its required keys."""
    properties = [field for section in (schema, *schema["$defs"].values()) for field in section["properties"].values()]
    items = [field.get("items", {}).get("$ref", "") for field in properties]
    return {reference.rpartition("/")[2] for reference in items if reference}


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema extended to accept `${env:NAME}` for a scalar, and null for a section."""
    schema = dict(schema)
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            schema[keyword] = _or_variable(schema[keyword])
    if "patternProperties" in schema:
        schema["patternProperties"] = {key: _or_variable(value) for key, value in schema["patternProperties"].items()}
    if "prefixItems" in schema:
        schema["prefixItems"] = [_or_variable(item) for item in schema["prefixItems"]]
    if schema == {"type": "string"} or ("additionalProperties" in schema and schema["additionalProperties"] is True):
        return schema
    about = {name: schema.pop(name) for name in _ABOUT if name in schema}
    options = schema["anyOf"] if list(schema) == ["anyOf"] else [schema]
    null = [{"type": "null"}] if "$ref" in schema else []
    return {**about, "anyOf": [*options, *null, _REFERENCE]}


def _required() -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, key in keys().items():
        *sections, name = path.split(".")
        if not key.field.is_required() or "mix" in sections:
            continue
        schema = root
        for section in sections:
            inside = schema if section == "*" else schema.setdefault("properties", {})
            schema = inside.setdefault("additionalProperties" if section == "*" else section, {})
        schema.setdefault("required", []).append(name)
    return root


def schema_text() -> str:
    """Return the text of the schema file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
