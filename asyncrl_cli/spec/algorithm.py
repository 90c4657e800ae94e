"""The objective: an algorithm by name (`preset`), and a key for each of its choices.

A preset is a table of defaults; the spec's own keys take precedence over it (decision 0018).
docs/algorithms.md has the formulas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from asyncrl_cli.spec.base import (
    MODULE_NAME,
    Count,
    Fraction,
    LearningRate,
    NonNegative,
    Positive,
    Section,
    SystemPath,
    Text,
)

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gspo",
    "cispo",
    "sapo",
    "ppo",
    "distill",
    "single_rollout",
]
CorrectionName = Literal["truncated", "sequence_truncated", "icepop", "geometric", "decoupled", "off"]
GAE = "gae"
"""The advantage estimator that needs a critic."""
RUNNING_BASELINE = "running_baseline"
"""The advantage estimator that compares a rollout with its prompt's earlier rollouts; for groups of one."""
GROUP_BASELINES = ("group_norm", "group_mean", "leave_one_out")
"""Advantage estimators that compare a rollout with its group's other rollouts; 0 in a group with equal rewards."""
TURN_BASELINES = ("turn_norm", "turn_mean")
"""Advantage estimators that compare a turn with the same turn of the group's other rollouts."""

_ALL_GROUPS_TEACH = {"uniform_groups": "train"}
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_mean", "aggregation": "sequence_sum"},
    "dapo": {"clip_high": 0.28, "overlong_penalty": 1.0, "uniform_groups": "reject"},
    "rloo": {"advantage": "leave_one_out", "kl_estimator": "k1", "kl_placement": "reward"},
    "reinforce_pp": _ALL_GROUPS_TEACH
    | {"advantage": "none", "whiten_advantages": True, "kl_coef": 0.01, "kl_estimator": "k1", "kl_placement": "reward"},
    "reinforce_pp_baseline": _ALL_GROUPS_TEACH
    | {"advantage": "group_mean", "whiten_advantages": True, "kl_coef": 0.001, "kl_estimator": "k2"},
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    "ppo": _ALL_GROUPS_TEACH
    | {"advantage": GAE, "whiten_advantages": True, "kl_estimator": "k1", "kl_placement": "reward"},
    "distill": _ALL_GROUPS_TEACH
    | {"advantage": "none", "whiten_advantages": True, "gamma": 0.0, "reward_coef": 0.0}
    | {"kl_coef": 1.0, "kl_estimator": "k1", "kl_placement": "reward"},
    "single_rollout": _ALL_GROUPS_TEACH | {"advantage": RUNNING_BASELINE},
}
"""The keys that each algorithm preset sets; every other key has its field's default."""

CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "truncated": {"level": "token", "cap": 2.0},
    "sequence_truncated": {"level": "sequence", "cap": 2.0},
    "icepop": {"level": "token", "mask_low": 0.5, "mask_high": 5.0},
    "geometric": {"reject_by": "k1", "reject_low": 0.999, "reject_high": 1.001},
    "decoupled": {},
    "off": {"proximal": "behaviour"},
}
"""The keys that each correction preset sets; every other key has its field's default."""


def _by_preset(presets: Mapping[str, Mapping[str, Any]], key: str, default: Any, **field: Any) -> Any:
    """A field with the default of the section's ``preset``, or ``default`` if the preset does not name the key."""
    return Field(default_factory=lambda data: presets.get(data.get("preset", ""), {}).get(key, default), **field)


_algorithm = partial(_by_preset, PRESETS)
_correction = partial(_by_preset, CORRECTION_PRESETS)


class _Named:
    """Annotation for a text that is one of ``names`` or a user's `module:function`."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.names)}, {"type": "string", "pattern": "^[^:]+:[^:]+$"}]}

    def check(self, text: str) -> str:
        if text not in self.names and not re.fullmatch(MODULE_NAME, text):
            expected = ", ".join([*self.names, "module:function"])
            raise PydanticCustomError("named", "must be {expected}", {"expected": expected})
        return text


class CorrectionSpec(Section):
    """Off-policy correction. The policy that sampled a rollout differs from the trainer's, because its weights are
    older or because the engine's numerics differ.

    The importance weight is proximal / behaviour. An omitted key has the value of `preset`. See docs/algorithms.md.
    """

    preset: CorrectionName = "truncated"
    """`truncated`: token weights, truncated at 2. `sequence_truncated`: sequence weights, truncated at 2. `icepop`:
    tokens with a weight outside 0.5 to 5 are masked. `geometric`: sequences with a mean ratio outside 0.999 to 1.001
    are rejected. `decoupled`: no weights. `off`: the clipped ratio is relative to the behaviour policy."""
    proximal: Literal["recomputed", "behaviour"] = _correction("proximal", "recomputed")
    """The policy in the denominator of the clipped ratio. `recomputed`: the trainer's policy at the start of the step
    (decoupled PPO; one more forward pass if a step has several updates). `behaviour`: the policy that
    sampled the token."""
    level: Literal["token", "sequence", "geometric"] | None = _correction("level", None)
    """The importance weight of a token: the token's ratio, the product of its sequence's ratios, or their geometric
    mean. null: every weight is 1."""
    cap: float | None = _correction("cap", None, gt=0)
    """Larger weights are truncated to this value (truncated importance sampling)."""
    mask_low: float | None = _correction("mask_low", None, gt=0)
    """Tokens with a smaller weight are masked."""
    mask_high: float | None = _correction("mask_high", None, gt=0)
    """Tokens with a larger weight are masked."""
    reject_by: Literal["k1", "k2", "k3"] | None = _correction("reject_by", None)
    """Reject tokens or sequences by this estimate of the divergence between the two policies."""
    reject_over: Literal["token", "sequence_mean", "sequence_sum", "sequence_max"] = _correction(
        "reject_over", "sequence_mean"
    )
    """Reject single tokens, or whole sequences by the mean, sum or maximum over their tokens."""
    reject_low: float | None = _correction("reject_low", None, gt=0)
    """Lower bound for `k1`, as a ratio of probabilities. null: 1 / `reject_high`."""
    reject_high: float | None = _correction("reject_high", None, gt=0)
    """Upper bound: a ratio of probabilities for `k1`, nats for `k2` and `k3`."""


class CriticSpec(Section):
    """The value network of `advantage: gae`: a second model with the policy's architecture and initial weights, and a
    head that predicts one number per token. The trainer's ranks train it together with the policy."""

    learning_rate: LearningRate = 1e-5
    """Peak learning rate; the schedule is the policy's."""
    value_clip: float | None = Field(0.2, gt=0)
    """Values are clipped to this distance from the values at the start of the step (PPO2). null: no clipping."""
    warmup_steps: NonNegative = 0
    """Number of steps at the start that train only the critic."""


class AlgorithmSpec(Section):
    """The objective: an algorithm by name, and the keys that differ from it. An omitted key has the value of `preset`.
    A file or `--set` that sets the preset also replaces the preset's keys in the files that it overrides. See
    docs/algorithms.md."""

    preset: AlgorithmName = "grpo"
    """The algorithm. `ppo` has a critic. `distill` (on-policy distillation) needs a teacher in `reference_path`: the
    reverse KL divergence to the teacher replaces the reward. `single_rollout` needs `rollout.group_size: 1`."""
    advantage: Annotated[str, _Named(*GROUP_BASELINES, *TURN_BASELINES, RUNNING_BASELINE, "none", GAE)] = _algorithm(
        "advantage", "group_norm"
    )
    """The advantage estimator: `group_norm` (GRPO), `group_mean` (Dr. GRPO), `leave_one_out` (RLOO), `turn_norm` and
    `turn_mean` (rewards from an environment's turn onwards, compared with the group's), `running_baseline` (a single
    rollout, compared with the prompt's earlier rewards, normalized over the step), `none` (the rewards that follow),
    `gae` (by a critic), or `module:function` of rewards, and of lengths and metrics if it has parameters with these
    names."""
    baseline_half_life: Positive = 5.0
    """With `running_baseline`: number of later visits to a prompt after which one of its rewards weighs half."""
    reward_parts: dict[Text, float] = Field(default_factory=dict)
    """Weights of a rollout's metrics by name; the reward is their weighted sum. `reward` is the task's own reward.
    Default: the task's own reward alone. Accuracies and evaluations always use the task's own reward."""
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How `reward_parts` are combined. `sum_then_normalize`: their weighted sum replaces the reward.
    `normalize_then_sum`: each part is normalized within its group, and then their weighted sum over the step's rollouts
    (GDPO)."""
    whiten_advantages: bool = _algorithm("whiten_advantages", False)
    """Normalize the advantages of all tokens of a batch to mean 0 and deviation 1."""
    gamma: Fraction = _algorithm("gamma", 1.0)
    """Discount per token with `none` and `gae`, per turn with `turn_norm` and `turn_mean`."""
    gae_lambda: Fraction = 1.0
    """The lambda of GAE."""
    loss: Annotated[str, _Named("clip", "gspo", "cispo", "sapo")] = _algorithm("loss", "clip")
    """The policy loss: `clip` (PPO), `gspo` (sequence ratios), `cispo` (clipped weights; every token has a gradient),
    `sapo` (soft gate), or `module:function`."""
    clip_low: float = _algorithm("clip_low", 0.2, gt=0, le=1)
    """The ratio is clipped to at least 1 - `clip_low`."""
    clip_high: float = _algorithm("clip_high", 0.2, gt=0)
    """The ratio is clipped to at most 1 + `clip_high`."""
    dual_clip: float | None = Field(None, gt=1)
    """With `clip`: upper bound of the ratio where the advantage is negative (dual-clip PPO)."""
    sapo_temperatures: tuple[Positive, Positive] = Field((1.0, 1.05), strict=False)
    """With `sapo`: temperatures for positive and negative advantages."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = _algorithm("aggregation", "token_mean")
    """`token_mean` gives every sampled token of a minibatch the same weight, `sequence_mean` every sequence (a rollout
    of one turn is one sequence, an episode one per conversation). `sequence_sum` adds up the tokens of a sequence and
    divides by `sequence_divisor`."""
    sequence_divisor: Count | None = None
    """With `sequence_sum`: tokens to divide by. Default: `rollout.max_response_tokens`."""
    reward_coef: float = _algorithm("reward_coef", 1.0, ge=0)
    """Weight of the task's reward. With 0 rewards are only shown, and the policy learns from the KL penalty alone."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_coef: float = _algorithm("kl_coef", 0.0, ge=0)
    """Weight of the KL penalty to the reference model; with 0 no reference is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = _algorithm("kl_estimator", "k3")
    """Estimator of the KL divergence on a sampled token."""
    kl_placement: Literal["loss", "reward"] = _algorithm("kl_placement", "loss")
    """Where the KL penalty goes: added to the loss, or subtracted from the rewards."""
    reference_path: Annotated[Text | None, SystemPath] = None
    """A saved model's folder (relative to this file) or hub id: the reference model, such as a teacher. Its tokenizer
    must give all tokens of the policy the same ids. null: the reference is the initial model."""
    correction: CorrectionSpec = Field(default_factory=CorrectionSpec)
    """Off-policy correction."""
    overlong_penalty: float = _algorithm("overlong_penalty", 0.0, ge=0)
    """Penalty on the reward of a response of `rollout.max_response_tokens` (soft overlong punishment). It rises from 0
    linearly over `overlong_buffer`."""
    overlong_buffer: Fraction = 0.2
    """The last part of `rollout.max_response_tokens`, as a fraction of it."""
    mask_truncated: bool = False
    """Exclude rollouts that were truncated at their limit from the loss (overlong filtering). With a KL penalty in the
    reward they have no penalty, so the baseline excludes them, too."""
    uniform_groups: Literal["skip", "train", "reject"] = _algorithm("uniform_groups", "skip")
    """Groups with equal rewards (with `normalize_then_sum`: equal in each part): `skip` excludes their tokens
    from the loss, `train` keeps them (they count in the mean), `reject` replaces the group with another prompt's
    (dynamic sampling)."""
    critic: CriticSpec = Field(default_factory=CriticSpec)
    """The critic of `advantage: gae`."""
    router_replay: bool = False
    """For a mixture of experts: the trainer uses the experts that the engine chose for each token (rollout routing
    replay, R3). It still computes their weights, so the router is trained. Each token takes one byte more for each
    expert that it uses in each layer. Engines on GPUs only."""

    @property
    def parts_apart(self) -> bool:
        """True if each part of the reward is normalized separately."""
        return bool(self.reward_parts) and self.reward_aggregation == "normalize_then_sum"

    @property
    def needs_critic(self) -> bool:
        """True if a critic estimates the advantages."""
        return self.advantage == GAE
