"""docs/spec.md and the JSON schema are generated from the models."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from asyncrl_cli.spec.keys import keys
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.reference import reference
from asyncrl_cli.spec.rules import RULES
from asyncrl_cli.spec.schema import FILE, json_schema, schema_text
from tests.spec.conftest import SMALLEST

ROOT = Path(__file__).parents[2]
VALIDATOR = Draft202012Validator(json_schema())


def test_the_page_is_current() -> None:
    page = ROOT / "docs/spec.md"
    assert page.read_text() == reference(), "run: python -m asyncrl_cli.spec.reference > docs/spec.md"


def test_every_key_and_rule_has_a_description() -> None:
    assert all(key.description for key in keys().values())
    assert all(rule.__doc__ for rule in RULES)


def test_the_schema_is_current() -> None:
    page = ROOT / "specs" / FILE
    assert page.read_text() == schema_text(), f"run: python -m asyncrl_cli.spec.schema > specs/{FILE}"


def test_specs_are_valid_and_they_and_templates_name_the_schema() -> None:
    for spec in ROOT.glob("specs/*.yaml"):
        load_spec(spec)
    for spec in [*ROOT.glob("specs/*.yaml"), *ROOT.glob("templates/*/spec.yaml")]:
        line = spec.read_text().partition("\n")[0]
        assert line.startswith("# yaml-language-server: $schema=")
        assert (spec.parent / line.partition("=")[2]).resolve() == ROOT / "specs" / FILE


@pytest.mark.parametrize(
    "text",
    [
        "extends: base.yaml\nname: x\n",
        "extends: base.yaml\nmodel: {init: {config: {hidden_size: 8}}}\nstop: {}\n",
        "extends: base.yaml\nevaluation: {sets: {a: {greedy: true}}, every: '${env:EVERY}'}\n",
        f"{SMALLEST}trainer: {{ranks: '${{env:RANKS:-1}}', dtype: '${{env:DTYPE}}', packing: '${{env:PACKING}}'}}\n",
        f"{SMALLEST}trainer: {{optimizer: {{betas: ['${{env:BETA}}', 0.9]}}}}\n",
        f"{SMALLEST}trainer:\ndata: null\n",
        f"{SMALLEST}algorithm: {{loss: 'mine:loss', advantage: gae}}\n",
    ],
)
def test_the_schema_takes_partial_files_variables_and_empty_sections(text: str) -> None:
    assert [*VALIDATOR.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    "text",
    [
        "name: x\n",
        f"{SMALLEST}trainers: {{}}\n",
        f"{SMALLEST}trainer: {{ranks: two}}\n",
        f"{SMALLEST}algorithm: {{loss: best}}\n",
        "extends: base.yaml\ntask: {mix: [{name: a}]}\n",
        "model: {init: {}}\ntask: {use: math}\nstop: {steps: 1}\n",
    ],
)
def test_the_schema_refuses_mistakes(text: str) -> None:
    assert [*VALIDATOR.iter_errors(yaml.safe_load(text))]


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(json_schema())
    assert json_schema()["$id"] and json_schema()["additionalProperties"] is False
