"""Every key a spec can have, by dotted path: what suggestions and the reference are made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl_cli.spec.sections import ExperimentSpec, Section


@dataclass(frozen=True, slots=True)
class Key:
    """One key: the section class that holds it, its field, and the section class it opens (if it opens one)."""

    holder: type[Section]
    field: FieldInfo
    opens: type[Section] | None

    @property
    def follows(self) -> bool:
        """Whether the default follows from other keys."""
        return bool(self.field.default_factory_takes_validated_data)

    @property
    def default(self) -> Any:
        """The value when the key is left out; ``PydanticUndefined`` when there is none, or it follows from others."""
        return PydanticUndefined if self.follows else self.field.get_default(call_default_factory=True)


@cache
def keys() -> dict[str, Key]:
    """All keys in the order of the sections."""
    found: dict[str, Key] = {}

    def visit(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            opens = next(filter(_is_section, (field.annotation, *get_args(field.annotation))), None)
            found[prefix + name] = Key(section, field, opens)
            if opens:
                visit(opens, f"{prefix}{name}.")

    visit(ExperimentSpec, "")
    return found


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
