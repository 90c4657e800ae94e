"""What of a spec may change when a run is resumed, and what may not.

Everything may, except what the journal's rows rest on: a prompt's place in the data, what a batch is, what a token
was sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.spec.problems import Problem, SpecError
from asyncrl_cli.spec.sections import ExperimentSpec

FIXED = {
    "name": "it begins the run's id",
    "seed": "the order of prompts and the seeds of rollouts follow from it",
    "model": "checkpoints and recorded log-probs are those of this model",
    "task": "recorded rewards are those of this task",
    "data.train": "the journal says how far the run is in this data",
    "data.curriculum": "the journal says how far the run is in it",
    "data.shuffle": "the journal says how far the run is in this order",
    "rollout.group_size": "recorded groups have this size",
    "rollout.max_prompt_tokens": "which prompts are left out follows from it",
    "rollout.max_response_tokens": "recorded rollouts were cut there",
    "rollout.sampling": "recorded log-probs are taken from this distribution",
    "pipeline.groups_per_step": "recorded batches have this size",
    "pipeline.publish_every": "versions are counted by it",
}
"""Keys that stay as they are, and why; a key stands for everything below it."""
ALLOWED = re.compile(
    r"task\.(mix\.\d+\.)?(reward_timeout_s|reward_workers|reward_memory_mb|reward_concurrency|options\.sandbox)"
)
"""Keys below a fixed one that may change all the same: how rewards are computed, not what they are."""


def check_changes(
    before: ExperimentSpec, after: ExperimentSpec, references: Mapping[tuple[str, ...], str] | None = None
) -> list[str]:
    """The keys that changed, as `key=value`; a value in ``references`` (``LoadedSpec.references``) is written as there.

    Raises ``SpecError`` when one of them may not.
    """
    old, new = _flat(before), _flat(after)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key != "runs_dir")
    problems = [problem for key in changed if (problem := _problem(key)) is not None]
    if after.pipeline.max_staleness < before.pipeline.max_staleness:
        problems.append(
            Problem(
                "pipeline.max_staleness",
                f"cannot fall from {before.pipeline.max_staleness}: groups were admitted under that bound",
                "keep it, or raise it",
            )
        )
    if problems:
        raise SpecError(problems)
    written = {".".join(path): text for path, text in (references or {}).items()}
    return [hide(f"{key}={written.get(key, new.get(key))}") for key in changed]


def is_fixed(key: str) -> bool:
    """Whether a key may not change when a run is resumed."""
    return _problem(key) is not None


def _problem(key: str) -> Problem | None:
    for fixed, why in FIXED.items():
        rest = key.removeprefix(fixed)
        if rest != key and (not rest or rest[0] == ".") and not ALLOWED.fullmatch(key):
            return Problem(key, f"cannot change for a recorded run: {why}", "start a new run for it")
    return None


def _flat(spec: ExperimentSpec) -> dict[str, Any]:
    settings = flatten(spec.model_dump(mode="json"), index_lists=True)
    return {key: value for key, value in settings.items() if value != {}}
