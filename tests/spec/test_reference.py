"""docs/spec.md is made from the models."""

from __future__ import annotations

from pathlib import Path

from asyncrl_cli.spec.catalogue import keys
from asyncrl_cli.spec.reference import json_schema, reference
from asyncrl_cli.spec.rules import RULES


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs/spec.md"
    assert page.read_text() == reference(), "run: python -m asyncrl_cli.spec.reference > docs/spec.md"


def test_every_key_and_rule_has_its_sentence() -> None:
    assert all(key.field.description for key in keys().values())
    assert all(rule.__doc__ for rule in RULES)


def test_the_schema_knows_extends_and_refuses_the_unknown() -> None:
    schema = json_schema()
    assert "extends" in schema["properties"] and schema["additionalProperties"] is False
