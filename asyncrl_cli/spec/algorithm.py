"""The objective: which algorithm by name, and every choice in it by a key of its own.

A preset is a table of defaults. What the spec says beside it wins, so that an algorithm and a variation of it read
alike; docs/algorithms.md has the formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from asyncrl_cli.spec.base import MODULE_NAME, Count, Fraction, LearningRate, Positive, Section, Whole

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
]
CorrectionName = Literal[
    "truncated", "sequence_truncated", "icepop", "geometric", "decoupled", "decoupled_log_linear", "off"
]
GAE = "gae"
"""The advantage estimator that needs a critic."""

_CHOICES: dict[str, Any] = {
    "advantage": "group_norm",
    "whiten_advantages": False,
    "loss": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregation": "token_mean",
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_placement": "loss",
    "overlong_penalty": 0.0,
    "uniform_groups": "skip",
}
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
}
"""What each algorithm sets; all else is as in ``_CHOICES``."""

_CORRECTION: dict[str, Any] = {
    "proximal": "recomputed",
    "level": None,
    "cap": None,
    "mask_low": None,
    "mask_high": None,
    "reject_by": None,
    "reject_over": "sequence_mean",
    "reject_low": None,
    "reject_high": None,
}
CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "truncated": {"level": "token", "cap": 2.0},
    "sequence_truncated": {"level": "sequence", "cap": 2.0},
    "icepop": {"level": "token", "mask_low": 0.5, "mask_high": 5.0},
    "geometric": {"reject_by": "k1", "reject_low": 0.999, "reject_high": 1.001},
    "decoupled": {},
    "decoupled_log_linear": {"proximal": "log_linear", "level": "token", "cap": 2.0},
    "off": {"proximal": "behaviour"},
}
"""What each correction sets; all else is as in ``_CORRECTION``."""


def _preset(presets: Mapping[str, Mapping[str, Any]], others: Mapping[str, Any], key: str) -> Any:
    """A default that the section's ``preset`` decides."""

    def default(data: dict[str, Any]) -> Any:
        return presets.get(data.get("preset", ""), {}).get(key, others[key])

    make: Callable[[dict[str, Any]], Any] = default
    return make


def _algorithm(key: str) -> Any:
    return _preset(PRESETS, _CHOICES, key)


def _correction(key: str) -> Any:
    return _preset(CORRECTION_PRESETS, _CORRECTION, key)


class _Named:
    """Marks a text that is one of these names, or the user's own function."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.names)}, {"type": "string", "pattern": "^[^:]+:[^:]+$"}]}

    def check(self, text: str) -> str:
        if text not in self.names and not re.fullmatch(MODULE_NAME, text):
            known = ", ".join(self.names)
            raise PydanticCustomError("named", "must be {known}, or module:function", {"known": known})
        return text


class CorrectionSpec(Section):
    """What is done about rollouts that were sampled by another policy than the trainer starts the step with: older
    weights, or the same ones in the engine's arithmetic.

    The importance weight is proximal / behaviour. Left out, keys below `preset` are as it says. See
    docs/algorithms.md.
    """

    preset: CorrectionName = Field(
        "truncated",
        description="`truncated` (token weights, cut at 2), `sequence_truncated` (weights of whole sequences, cut at "
        "2), `icepop` (tokens with a weight outside 0.5 to 5 are left out), `geometric` (sequences whose mean ratio is "
        "outside 0.999 to 1.001 are left out), `decoupled` (no weights), `decoupled_log_linear` (`truncated`, "
        "without the extra forward pass), `off` (the clipped ratio is to the behaviour policy).",
    )
    proximal: Literal["recomputed", "log_linear", "behaviour"] = Field(
        default_factory=_correction("proximal"),
        description="What the clipped ratio is relative to: `recomputed` is the trainer's policy at the start of the "
        "step (decoupled PPO; one more forward pass where a step has several updates), `log_linear` interpolates it "
        "between behaviour and current policy by the token's age, `behaviour` is the policy that sampled.",
    )
    level: Literal["token", "sequence", "geometric"] | None = Field(
        default_factory=_correction("level"),
        description="The weight of a token: its own ratio, its sequence's product of ratios, or their geometric mean. "
        "null: 1.",
    )
    cap: float | None = Field(
        default_factory=_correction("cap"), gt=0, description="Weights are cut at this (truncated importance sampling)."
    )
    mask_low: float | None = Field(
        default_factory=_correction("mask_low"), gt=0, description="What weighs less is left out (masked)."
    )
    mask_high: float | None = Field(
        default_factory=_correction("mask_high"), gt=0, description="What weighs more is left out (masked)."
    )
    reject_by: Literal["k1", "k2", "k3"] | None = Field(
        default_factory=_correction("reject_by"),
        description="Leave tokens or sequences out by this estimate of how far the two policies are apart.",
    )
    reject_over: Literal["token", "sequence_mean", "sequence_sum", "sequence_max"] = Field(
        default_factory=_correction("reject_over"),
        description="Tokens one by one, or whole sequences by the mean, sum or maximum over their tokens.",
    )
    reject_low: float | None = Field(
        default_factory=_correction("reject_low"),
        gt=0,
        description="Lower bound of `k1`, as a ratio of probabilities (of the geometric mean, in the preset).",
    )
    reject_high: float | None = Field(
        default_factory=_correction("reject_high"),
        gt=0,
        description="Upper bound: a ratio for `k1`, nats for `k2` and `k3`.",
    )


class CriticSpec(Section):
    """The value network of `advantage: gae`: a second model of the policy's architecture and initial weights, with a
    head that gives one number per token. It is trained by the trainer's ranks beside the policy."""

    learning_rate: LearningRate = Field(1e-5, description="Peak learning rate; the schedule is the policy's.")
    value_clip: float | None = Field(
        0.2,
        gt=0,
        description="Values move no further than this from those at the start of the step (PPO2). null: free.",
    )
    warmup_steps: Whole = Field(0, description="Steps in which only the critic learns.")


class AlgorithmSpec(Section):
    """The objective: an algorithm by name, and what differs from it. Left out, keys below `preset` are as it says; a
    file or `--set` that sets the preset drops what files below it say of them. See docs/algorithms.md."""

    preset: AlgorithmName = Field(
        "grpo",
        description="`grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`, `gspo`, `cispo`, "
        "`sapo` or `ppo` (which has a critic).",
    )
    advantage: Annotated[str, _Named("group_norm", "group_mean", "leave_one_out", "none", GAE)] = Field(
        default_factory=_algorithm("advantage"),
        description="How much better than expected a rollout did: `group_norm` (GRPO), `group_mean` (Dr. GRPO), "
        "`leave_one_out` (RLOO), `none` (the reward itself), `gae` (by a critic), or `module:function` of "
        "rewards [groups, group_size].",
    )
    whiten_advantages: bool = Field(
        default_factory=_algorithm("whiten_advantages"),
        description="Shift and scale the advantages of all tokens of a batch to mean 0 and deviation 1.",
    )
    gamma: Fraction = Field(1.0, description="Discount per token, for `gae` and for a KL penalty in the reward.")
    gae_lambda: Fraction = Field(1.0, description="GAE's decay.")
    loss: Annotated[str, _Named("clip", "gspo", "cispo", "sapo")] = Field(
        default_factory=_algorithm("loss"),
        description="`clip` (PPO's), `gspo` (ratio of whole sequences), `cispo` (clipped weights, every token learns), "
        "`sapo` (soft gate), or `module:function`.",
    )
    clip_low: float = Field(
        default_factory=_algorithm("clip_low"), gt=0, le=1, description="The ratio is clipped below 1 - this."
    )
    clip_high: float = Field(
        default_factory=_algorithm("clip_high"), gt=0, description="The ratio is clipped above 1 + this."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="With `clip`: a negative advantage weighs no more than this many times (dual-clip PPO)."
    )
    sapo_temperatures: tuple[Positive, Positive] = Field(
        (1.0, 1.05), strict=False, description="With `sapo`: temperatures for positive and negative advantages."
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = Field(
        default_factory=_algorithm("aggregation"),
        description="`token_mean` weighs every sampled token of a minibatch alike; `sequence_mean` every sequence (a "
        "rollout of one turn is one, an episode is as many as it has conversations); `sequence_sum` adds up a "
        "sequence's tokens and divides by `sequence_divisor`.",
    )
    sequence_divisor: Count | None = Field(
        None, description="With `sequence_sum`: tokens to divide by; `rollout.max_response_tokens` when left out."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    kl_coef: float = Field(
        default_factory=_algorithm("kl_coef"),
        ge=0,
        description="Weight of the KL penalty to the reference model; 0 loads no reference.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default_factory=_algorithm("kl_estimator"), description="Estimate of the KL divergence on a sampled token."
    )
    kl_placement: Literal["loss", "reward"] = Field(
        default_factory=_algorithm("kl_placement"),
        description="Where the KL penalty goes: added to the loss, or subtracted from the rewards.",
    )
    reference_update_every: Whole = Field(
        0,
        description="Steps between two updates of the reference model to the policy; 0 keeps the initial model.",
    )
    correction: CorrectionSpec = Field(
        default_factory=CorrectionSpec, description="Between the rollouts' policy and the trainer's."
    )
    overlong_penalty: float = Field(
        default_factory=_algorithm("overlong_penalty"),
        ge=0,
        description="Taken off the reward of a response of `rollout.max_response_tokens`, and proportionally less in "
        "the buffer before (soft overlong punishment).",
    )
    overlong_buffer: Fraction = Field(0.2, description="The buffer's share of `rollout.max_response_tokens`.")
    mask_truncated: bool = Field(
        False, description="Exclude rollouts that were truncated at their limit from the loss (overlong filtering)."
    )
    uniform_groups: Literal["skip", "train", "reject"] = Field(
        default_factory=_algorithm("uniform_groups"),
        description="Groups whose rewards are all equal: `skip` leaves their tokens out of the loss, `train` keeps "
        "them (they count in the mean), `reject` replaces them by another prompt (dynamic sampling).",
    )
    critic: CriticSpec = Field(default_factory=CriticSpec, description="The critic of `advantage: gae`.")

    @property
    def needs_critic(self) -> bool:
        """Whether a critic estimates the advantages."""
        return self.advantage == GAE
