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

_NO_FILTER = "sampling has no top-p, top-k, min-p or penalties: they would make the recorded log-probs wrong; remove it"
_NODES = "nodes are chosen by labels: `ray start --labels role=trainer`, and cluster.trainer.labels: {role: trainer}"
_WARM_START = "the warm start uses the trainer's optimizer: set model.warm_start.learning_rate and trainer.optimizer"
REMOVED = {
    "algorithm.reference_update_every": "the reference stays the initial model, or is reference_path; remove it",
    "data.curriculum": "order the rows yourself, and set data.shuffle: false",
    **dict.fromkeys(("cluster.trainer.nodes", "cluster.engines.nodes"), _NODES),
    **dict.fromkeys(("model.warm_start.matrix_learning_rate", "model.warm_start.weight_decay"), _WARM_START),
    "model.warm_start.warmup_steps": "set model.warm_start.schedule.warmup_updates",
    "model.warm_start.threads": "the warm start runs on the trainer's ranks: set trainer.threads_per_rank",
    "model.warm_start.clean_fraction": "tasks have no demonstrations: name your rows in model.warm_start.data",
    "rollout.speculative_tokens": "engines do not guess tokens: it was slower in every measured run; remove it",
    **dict.fromkeys(
        (f"rollout.sampling.{name}" for name in ("top_p", "top_k", "min_p", "repetition_penalty")), _NO_FILTER
    ),
    "tracking.system_metrics": "W&B and Ray measure machines (docs/watching.md); remove it",
    "tracking.register_model": "register RUN/model with mlflow.transformers.log_model after the run; remove it",
    "notify": "notify yourself with a monitor: set tracking.monitors (docs/watching.md has an example)",
}
"""Hints for keys that asyncrl had, or will not have."""


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
