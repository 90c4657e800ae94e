"""Decides which keys of a spec may change when a run is resumed: all keys on which the journal's rows do not depend.

Rows depend, for example, on the position of a prompt in the data, the size of a batch and the sampling distribution
(decision 0009). Held-out prompts stay, too, because a report compares accuracies before and after a resume.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.spec.problems import Problem, SpecError
from asyncrl_cli.spec.sections import ExperimentSpec

FIXED = {
    "name": "it is the prefix of the run's id",
    "seed": "it decides the order of prompts and the seeds of rollouts",
    "model": "checkpoints and recorded log-probs belong to this model",
    "task": "recorded rewards belong to this task",
    "data.train": "the journal records the position in this data",
    "data.shuffle": "the journal records the position in this order",
    "data.apply_chat_template": "recorded prompts were rendered like this",
    "data.special_tokens": "recorded prompts were tokenized like this",
    "rollout.group_size": "recorded groups have this size",
    "rollout.max_prompt_tokens": "it decides which prompts are skipped",
    "rollout.max_response_tokens": "recorded rollouts were truncated there",
    "rollout.sampling": "recorded log-probs belong to this distribution",
    "pipeline.groups_per_step": "recorded batches have this size",
    "stop.epochs": "the start counted them as stop.steps, which `asyncrl resume RUN --steps N` changes",
    "pipeline.publish_every": "it decides which steps have a version",
}
"""Keys that cannot change, including all keys below them, and why."""
EVALUATED = {
    "data.eval": "recorded accuracies belong to these prompts",
    "evaluation.temperature": "recorded accuracies belong to this temperature",
}
"""Keys that cannot change for a resume, although `asyncrl evaluate` may set them, and why."""
CHANGEABLE = re.compile(
    r"task\.(mix\.\d+\.)?(reward_timeout_s|reward_workers|reward_memory_mb|reward_concurrency|options\.sandbox"
    r"|tools\.mcp\.\w+\.(url|(headers|env)\..+|timeout_s))"
)
"""Keys below a fixed key that may still change: they say how rewards are computed and where tools run."""


def check_changes(
    recorded_spec: ExperimentSpec, resumed_spec: ExperimentSpec, references: Mapping[tuple[str, ...], str] | None = None
) -> list[str]:
    """Return the keys that changed, as `key=value`. Raises ``SpecError`` if one of them must not change.

    A value with an entry in ``references`` (``LoadedSpec.references``) is written as its reference.
    """
    recorded, resumed = flat_settings(recorded_spec), flat_settings(resumed_spec)
    changed = sorted(
        key for key in recorded.keys() | resumed.keys() if recorded.get(key) != resumed.get(key) and key != "runs_dir"
    )
    problems = [problem for key in changed if (problem := _problem(key)) is not None]
    hint = "add prompts as one of evaluation.sets, or use `asyncrl evaluate`"
    for key, why in ((key, why) for key in changed for parent, why in EVALUATED.items() if key.startswith(parent)):
        problems.append(Problem(key, f"cannot change for a recorded run: {why}", hint))
    for name in recorded_spec.evaluation.sets.keys() & resumed_spec.evaluation.sets.keys():
        for key in (key for key in changed if key.startswith(f"evaluation.sets.{name}.")):
            below = key.removeprefix(f"evaluation.sets.{name}.")
            if below != "every" and not CHANGEABLE.fullmatch(below):
                message = "cannot change for a recorded run: recorded accuracies belong to this set"
                problems.append(Problem(key, message, "give the changed set another name, or use `asyncrl evaluate`"))
    if resumed_spec.pipeline.max_staleness < recorded_spec.pipeline.max_staleness:
        message = f"cannot be lower than {recorded_spec.pipeline.max_staleness}: groups were admitted under that bound"
        problems.append(Problem("pipeline.max_staleness", message, "keep or raise it"))
    if problems:
        raise SpecError(problems)
    reference_texts = {".".join(path): text for path, text in (references or {}).items()}
    return [hide(f"{key}={reference_texts.get(key, resumed.get(key))}") for key in changed]


def kept_horizon(recorded_spec: ExperimentSpec, resumed_spec: ExperimentSpec) -> int | None:
    """Return `trainer.schedule.steps` for a resumed run with another `stop.steps`; None if the spec needs no change.

    The schedule keeps its length: stretched, it would give other rates to the steps that are trained again.
    """
    recorded, resumed = recorded_spec.trainer.schedule, resumed_spec.trainer.schedule
    if (
        recorded_spec.stop.total == resumed_spec.stop.total
        or "constant" in (recorded.kind, resumed.kind)
        or (recorded.steps, resumed.steps) != (None, None)
    ):
        return None
    return recorded_spec.stop.total


def training_changes(changed: str) -> list[str]:
    """Return the changes, out of a comma-separated list, that affect the weights when a batch is trained again.

    The last three keys decide for which tokens the trainer's log-prob replaces the engine's.
    """
    keys = r"(?:trainer|algorithm)\.[^=,]+|rollout\.dtype|pipeline\.weight_update|pipeline\.max_staleness"
    return re.findall(rf"(?:^|, )((?:{keys})=[^,]*)", changed)


def refuse_fixed(keys: Iterable[str]) -> None:
    """Raise ``SpecError`` for keys that must not change."""
    if problems := [problem for key in keys if (problem := _problem(key)) is not None]:
        raise SpecError(problems)


def is_fixed(key: str) -> bool:
    """True if a key must not change when a run is resumed."""
    return _problem(key) is not None


def _problem(key: str) -> Problem | None:
    for fixed, why in FIXED.items():
        subkey = key.removeprefix(fixed)
        if subkey != key and (not subkey or subkey[0] == ".") and not CHANGEABLE.fullmatch(key):
            return Problem(key, f"cannot change for a recorded run: {why}", "start a new run")
    return None


def flat_settings(spec: ExperimentSpec) -> dict[str, Any]:
    """Return the values of a spec by dotted key."""
    settings = flatten(spec.model_dump(mode="json"), index_lists=True)
    return {key: value for key, value in settings.items() if value != {}}
