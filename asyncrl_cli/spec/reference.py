"""Generates the reference of the spec, docs/spec.md, from its models.

`python -m asyncrl_cli.spec.reference > docs/spec.md` writes the page; a test compares it with the models.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from pydantic_core import PydanticUndefined

from asyncrl_cli.spec.base import LARGEST, Section
from asyncrl_cli.spec.keys import Key, keys
from asyncrl_cli.spec.rules import RULES
from asyncrl_cli.spec.sections import ExperimentSpec

_INTRODUCTION = """\
# The experiment spec

One YAML file defines a run. `asyncrl validate-spec SPEC` checks it in half a second and reports every mistake with its
line; `--resolved` shows the spec with all defaults.

This page is generated from the models in `asyncrl_cli/spec` by `python -m asyncrl_cli.spec.reference`.

- **Layers.** `extends: base.yaml` (or a list; later files win) starts from other specs, relative to this file.
  Their names end in `.yaml`, `.yml` or `.json`.
  Mappings are merged key by key; lists and values replace. A key set to `null` removes the value of the base, as in
  `model: {path: ./saved, init: null}`; a section set to `null` has its defaults.
- **Environment.** `${env:NAME}` and `${env:NAME:-default}` are replaced by environment variables, as a whole value
  (then numbers, `true`, `false` and `null` have their types) or within a text. `$${env:` is a literal `${env:`. The
  run's folder, MLflow, reports and `--resolved` keep the reference, and `resume` reads the variable again: use this
  for secrets. Numbers, and keys that define the run (`model`, `data.train`), are written with their values.
- **Command line.** `--set pipeline.max_staleness=2` overrides one key. The value is YAML, and entries of lists have
  indices, as in `--set trainer.optimizer.betas.1=0.99`.
- **Paths** are relative to the file that contains them, and in `--set` to the current folder. `runs_dir` is always
  relative to the current folder.
- **YAML** is read as version 1.2: `1e-4` is a number, `no` and `2024-01-01` are text. Numbers in quotes are text.
- **Editors.** `asyncrl validate-spec --schema > spec.schema.json` writes a JSON schema. With
  `# yaml-language-server: $schema=spec.schema.json` as the first line of a spec, editors with the YAML language server
  complete, describe and check keys. `asyncrl init` writes both.
- **Limits.** A file may have 128 KiB, a spec 32 files. The largest whole number is 2147483647, unless a limit is given.
"""


def reference() -> str:
    """Return the text of docs/spec.md."""
    schema = ExperimentSpec.model_json_schema()
    sections: dict[type[Section], list[str]] = {ExperimentSpec: []}
    for path, key in keys().items():
        if key.opens:
            sections.setdefault(key.opens, []).append(f"{path}.*" if key.many else path)
    chapters = [_INTRODUCTION]
    for section, paths in sections.items():
        fields = schema if section is ExperimentSpec else schema["$defs"][section.__name__]
        chapters.append(_table(section, paths, fields["properties"]))
    rules = "\n".join(f"- {' '.join(inspect.getdoc(rule).split())}" for rule in RULES)  # type: ignore[union-attr]
    chapters.append(f"## Rules between keys\n\n{rules}\n")
    return "\n".join(chapters)


def _table(section: type[Section], paths: list[str], properties: dict[str, Any]) -> str:
    title = ", ".join(f"`{path}`" for path in paths) or "Top level"
    lines = [f"## {title}", "", inspect.getdoc(section) or "", "", "| key | type | default | meaning |", "|-|-|-|-|"]
    prefix = f"{paths[0]}." if paths else ""
    for name in section.model_fields:
        key = keys()[prefix + name]
        cells = (f"`{name}`", _type(properties[name]), _default(key), key.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _type(schema: dict[str, Any]) -> str:
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _choice([word for option in options for word in _values(option) or [_type(option)]])
    if _values(schema):
        return _choice(_values(schema))
    if "$ref" in schema:
        return "section"
    if schema.get("type") == "array":
        items = schema.get("prefixItems")
        return f"{len(items)} values, each a {_type(items[0])}" if items else f"list of {_type(schema['items'])}"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
    words |= {"object": "mapping", "null": "`null`"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[bound]}" for bound, sign in signs.items() if schema.get(bound, LARGEST) != LARGEST]
    return " ".join([words[schema["type"]], ", ".join(bounds)]).strip()


def _values(schema: dict[str, Any]) -> list[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return [f"`{value}`" for value in values]


def _choice(words: list[str]) -> str:
    return " or ".join(phrase for phrase in (", ".join(words[:-1]), words[-1]) if phrase)


def _default(key: Key) -> str:
    if key.follows:
        return "by `preset`" if "preset" in key.holder.model_fields else "see meaning"
    default = key.default
    if default is PydanticUndefined:
        return "**required**"
    if isinstance(default, Section):
        default = default.model_dump(exclude_unset=True)
        return f"`{json.dumps(default)}`" if default else "its keys' defaults"
    return f"`{json.dumps(default, default=str)}`"


if __name__ == "__main__":
    print(reference(), end="")
