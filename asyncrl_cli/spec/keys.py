"""All keys of a spec by dotted path, for suggestions, the reference and the schema.

In a path, `*` stands for a user-defined name or a list index: `evaluation.sets.*.data`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl_cli.spec.base import Section, descriptions
from asyncrl_cli.spec.sections import ExperimentSpec


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the spec.

    ``holder`` is the section class that has the key, and ``opens`` the section class of its value, if the value is a
    section. ``many``: the value is a mapping or a list of such sections.
    """

    holder: type[Section]
    name: str
    field: FieldInfo
    opens: type[Section] | None
    many: bool

    @property
    def description(self) -> str:
        """The key's description in docs/spec.md."""
        return descriptions(self.holder).get(self.name, "")

    @property
    def follows(self) -> bool:
        """True if the default depends on other keys."""
        return bool(self.field.default_factory_takes_validated_data)

    @property
    def default(self) -> Any:
        """The value of an omitted key. ``PydanticUndefined`` if the key is required or its default depends on other
        keys."""
        return PydanticUndefined if self.follows else self.field.get_default(call_default_factory=True)


@cache
def keys() -> dict[str, Key]:
    """All keys in the order of the sections."""
    all_keys: dict[str, Key] = {}

    def visit(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            opens, many = _opened(field.annotation)
            all_keys[prefix + name] = Key(section, name=name, field=field, opens=opens, many=many)
            if opens:
                visit(opens, f"{prefix}{name}.*." if many else f"{prefix}{name}.")

    visit(ExperimentSpec, "")
    return all_keys


def general(path: str) -> str:
    """Return a path with `*` in place of user-defined names and list indices."""
    general_names: list[str] = []
    for name in path.split("."):
        section_key = keys().get(".".join(general_names))
        general_names.append("*" if section_key is not None and section_key.many else name)
    return ".".join(general_names)


def _opened(annotation: Any) -> tuple[type[Section] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    for argument in get_args(annotation):
        opens, many = _opened(argument)
        if opens:
            return opens, many or get_origin(annotation) in (list, dict)
    return None, False
