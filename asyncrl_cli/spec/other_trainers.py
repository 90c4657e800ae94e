"""Other trainers' names for keys of a spec, from the tables of `asyncrl convert`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from asyncrl_cli.convert.table import table
from asyncrl_cli.spec.keys import keys

VALUES = {
    "spo": ("single_rollout", "running_baseline"),
    "reinforce_plus_plus": ("reinforce_pp",),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline",),
    "vanilla": ("clip",),
    "log_linear": ("recomputed",),
    "decoupled_log_linear": ("truncated",),
}
"""Values of other trainers, each with the values to use instead."""
CONVERTIBLE = dict.fromkeys(("actor_rollout_ref", "async_training"), "verl")
CONVERTIBLE |= dict.fromkeys(("model_name_or_path", "num_generations", "per_device_train_batch_size"), "trl")
"""Top-level keys that identify another trainer's complete configuration, which `asyncrl convert` can read."""


class OtherNames(NamedTuple):
    """Keys of a spec, likeliest first, and hints, by other trainers' names with or without their sections."""

    keys: dict[str, list[str]]
    hints: dict[str, str]


@cache
def other_names() -> OtherNames:
    """Read the tables. tables/names.yaml decides, and then verl's, TRL's and prime-rl's tables, in this order."""
    result = OtherNames({}, {})
    for trainer in ("names", "verl", "trl", "prime_rl"):
        answers: dict[str, list[str] | str] = {}
        for row_keys, row in table(trainer).rows.items():
            known_keys = [key for key in row_keys.split() if key in keys()]
            for name in row.names if known_keys else ():
                answers[name.lower()] = [*answers.get(name.lower(), ()), *known_keys]
        answers |= {name.lower(): loss.hint for loss in table(trainer).lost for name in loss.keys}
        for full_name, answer in answers.items():
            words = full_name.lstrip("*").split(".")
            ends = [".".join(words[start:]) for start in range(1 if trainer == "names" else len(words))]
            if "*" in "".join(words) or any(end in result.keys or end in result.hints for end in ends):
                continue
            # The last word alone, such as `path`, would mean too many keys. `.path` is only a top-level key.
            for end in ends if trainer == "names" else ends[:-1] or [f".{full_name}"]:
                if isinstance(answer, str):
                    result.hints[end] = answer
                else:
                    result.keys[end] = answer
    return result
