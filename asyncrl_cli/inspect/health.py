"""Rules that find a bad run by its steps' metrics: pure, the same for the console, the journal, the report and others.

A rule looks for its symptom in each step. A finding begins after ``Rule.patience`` steps in a row with the symptom, and
ends after ``CALM_STEPS`` without it. Steps without the rule's metrics count for neither.

Invariant: once begun, a finding changes only in its last step, however many steps follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.resolved import setting, value_at
from asyncrl_cli.spec.algorithm import GROUP_BASELINES, RUNNING_BASELINE, TURN_BASELINES
from asyncrl_cli.spec.rules.base import argument_name
from asyncrl_cli.spec.rules.quantization import FP8_ENGINES

CALM_STEPS = 3
"""A finding ends after this many steps in a row without its symptom."""
FIRST_STEPS = 3
"""Steps that show where a run starts, and steps of the mean that is compared with an earlier one."""
CHANCE = 1e-3
"""Groups with equal rewards are a finding if so many in a row are less probable than this, by the run's own share of
equal groups."""
SOLVED = 0.95
"""Share of correct responses from which groups are equal because the task is solved. The quickstart ends above 0.9."""
NEARLY_SOLVED = 0.9
"""Share of correct responses from which a low entropy is healthy. The quickstart has 0.02 nats there."""
NEVER_CORRECT = 0.005
"""Mean of rewards of 0 or 1 below which a run has no reward to learn from. Sparse rewards that teach are above it."""
TRUNCATED, TRUNCATED_CALM = 0.2, 0.1
"""Share of truncated responses that begins and ends a finding. Measured in healthy runs: up to 0.004."""
UNKNOWN = 1e-3
"""Share of sampled tokens that the tokenizer does not have."""
KL, KL_CALM = 0.5, 0.25
"""KL(behaviour ‖ proximal) in nats. PPO (arXiv 1707.06347) aims at 0.003 to 0.03. Measured in runs that learn: up to
0.03 at a staleness of 2, and 0.35 at 8; in runs that collapse: 1 to 15."""
GAP_FLOAT32 = 1e-3
"""Largest log-prob gap of an engine in nats with float32 on both sides (``train.update.ROUNDING_NATS``)."""
GAP_BFLOAT16 = 0.01
"""Mean log-prob gap of an engine in nats with bfloat16 on either side. Measured in runs that learn: up to 0.006."""
CAPPED = 0.05
"""Share of tokens with a capped weight. Measured in runs that learn: up to 0.01 at a staleness of 2, and 0.037 at 8."""
EXCLUDED = 0.5
"""Share of tokens, sequences or rollouts that masks and rejections exclude."""
ENTROPY = 0.01
"""Entropy in nats per token below which a policy no longer explores."""
FALL, FALL_CALM = 0.5, 0.25
"""Share of the best reward (of its gain, if rewards are not 0 or 1) that a run has lost when its reward fell."""
LARGEST = 1e9
"""Larger numbers, such as an infinite KL, count as this."""
USUAL_STEPS = 50
"""Newest steps with the usual deviation of rewards, as their median."""
READ_RESPONSES = "read responses with `asyncrl inspect buffer`"
LOWER_RATE = "lower `trainer.optimizer.learning_rate`"
LOWER_RATE_OR_STALENESS = f"{LOWER_RATE} or `pipeline.max_staleness`"


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A symptom of a bad run, from ``first_step`` to ``last_step`` (from 1); the last step is None while it lasts.

    ``observation`` has the numbers when it began, ``remedy`` the key to change or the command that shows more. If it
    ``stops_learning``, the run learns nothing useful while it lasts, so its speed does not matter.
    """

    rule: str
    first_step: int
    last_step: int | None
    observation: str
    cause: str
    remedy: str
    stops_learning: bool

    @property
    def text(self) -> str:
        """The finding as one line, for people."""
        if self.last_step is not None:
            return f"{self.rule} has ended: it lasted from step {self.first_step} to step {self.last_step}"
        return (
            f"{self.observation}, since step {self.first_step}. Usual cause: {self.cause}. Remedy: {self.remedy} "
            f"({self.rule})"
        )

    @property
    def summary(self) -> str:
        """The finding as one line on a page about the entire run, also after its end."""
        if self.last_step is None:
            return self.text
        return f"steps {self.first_step} to {self.last_step}: {self.observation} ({self.rule})"


def health(steps: Iterable[Mapping[str, float]], spec: Mapping[str, Any]) -> list[HealthFinding]:
    """Return the findings of a run in the order in which they began.

    Args:
        steps: the metrics of every step so far in order, each with ``step`` (from 1), as in ``metrics.jsonl``.
        spec: the resolved spec as plain values.
    """
    return HealthWatch(spec, steps).findings


def teaching_groups(metrics: Mapping[str, float], spec: Mapping[str, Any]) -> str:
    """Return how many groups of a step teach, as a part of its line; empty if groups are not compared."""
    history = _History(spec)
    history.add(metrics)
    if "reward/uniform_groups" not in metrics or not history.compares_groups:
        return ""
    return f"  teach {history.teaching_groups}/{history.groups_per_step}"


class HealthWatch:
    """Judges a run step by step, after the steps of its ``history``."""

    def __init__(self, spec: Mapping[str, Any], history: Iterable[Mapping[str, float]] = ()) -> None:
        self.findings: list[HealthFinding] = []
        """The findings of all steps, in the order in which they began."""
        self.steps_without_learning = 0
        """Newest steps in a row in which nothing was learned (``stop.on_unhealthy``)."""
        self._idle_steps = 0
        self._history = _History(spec)
        self._series = {rule: _Series() for rule in RULES}
        for metrics in history:
            self.step(metrics)

    @property
    def open_findings(self) -> list[HealthFinding]:
        """The findings that have not ended."""
        return [finding for finding in self.findings if finding.last_step is None]

    @property
    def verdicts(self) -> list[str]:
        """Say at a run's end what it did not learn, and which findings last; empty for a healthy run."""
        history, steps, last_step = self._history, self.steps_without_learning, self._history.step
        verdicts = []
        if history.compares_groups and history.equal_groups and not history.teaching_groups:
            verdicts.append(f"0 of {history.equal_groups:,} groups had different rewards: nothing was learned")
        elif steps and steps == last_step:
            cause = "no weight changed" if self._idle_steps == steps else "all rewards were equal"
            verdicts.append(f"{cause} in {counted(steps, 'step')}: nothing was learned")
        elif steps >= FIRST_STEPS:
            verdicts.append(f"nothing was learned in steps {last_step - steps + 1} to {last_step}")
        return verdicts + [finding.text for finding in self.open_findings]

    def step(self, metrics: Mapping[str, float]) -> list[HealthFinding]:
        """Judge the next step. Returns the findings that began or ended with it."""
        self._history.add(metrics)
        self.steps_without_learning = self.steps_without_learning + 1 if self._history.learned_nothing else 0
        self._idle_steps = self._idle_steps + 1 if self._history.is_idle else 0
        return [finding for rule, series in self._series.items() for finding in self._judge(rule, series)]

    def _judge(self, rule: Rule, series: _Series) -> Iterable[HealthFinding]:
        if (value := self._history.value(rule.metric)) is None:
            return
        symptom = rule.symptom(self._history, value, series.finding is not None)
        if symptom:
            series.first_step = series.first_step if series.bad_steps else self._history.step
            series.bad_steps, series.calm_steps, series.last_step = series.bad_steps + 1, 0, self._history.step
        else:
            series.calm_steps += 1
        if series.finding is None:
            if not symptom:
                series.bad_steps = 0
            elif series.bad_steps >= (rule.patience or _equal_groups_patience(self._history)):
                finding = HealthFinding(rule.name, series.first_step, None, *symptom, rule.stops_learning)
                series.finding = len(self.findings)
                self.findings.append(finding)
                yield finding
        elif series.calm_steps >= CALM_STEPS:
            ended_finding = replace(self.findings[series.finding], last_step=series.last_step)
            self.findings[series.finding] = ended_finding
            self._series[rule] = _Series()
            yield ended_finding


@dataclass(slots=True)
class _Series:
    """A rule's newest steps with its symptom: ``bad_steps`` in a row, then ``calm_steps`` without it."""

    first_step: int = 0
    last_step: int = 0
    bad_steps: int = 0
    calm_steps: int = 0
    finding: int | None = None  # index of the open finding


Symptom = tuple[str, str, str] | tuple[()]
"""Observation, cause and remedy; empty if the step has no symptom."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule about a ``metric``. ``symptom`` judges the newest step by the metric's value; its last argument is True if
    a finding is open, which ends only at a lower limit. ``patience``: steps in a row with the symptom after which a
    finding begins; 0: as many as equal groups need."""

    name: str
    metric: str
    symptom: Callable[[_History, float, bool], Symptom]
    stops_learning: bool
    patience: int = 1


class _History:
    """The metrics of a run's steps that rules compare with each other, and the keys of its spec that they read."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        self.step = 0
        self.metrics: Mapping[str, float] = {}
        self.rewards: list[float] = []
        self.deviations: list[float] = []
        self.correct: list[float] = []
        # Before the newest step: the highest mean of FIRST_STEPS steps, and the lowest of one step.
        self.best_reward, self.lowest_reward = -math.inf, math.inf
        self.is_binary = True  # every reward so far was 0 or 1
        self.equal_groups = self.teaching_groups = 0
        self.equal_in_a_row = 0
        self.groups_per_step = max(1, setting(spec, "pipeline.groups_per_step", 1))
        self.rollouts_per_step = self.groups_per_step * max(1, setting(spec, "rollout.group_size", 1))
        # Such a model must first learn to end its responses.
        self.has_random_weights = value_at(spec, "model.init") is not None and not value_at(spec, "model.warm_start")
        self.critic_warmup = setting(spec, "algorithm.critic.warmup_steps", 0)
        # A distilled policy does not learn from rewards.
        self.has_rewards = value_at(spec, "algorithm.reward_coef") != 0
        # Otherwise the algorithm compares other numbers than a step's recorded rewards, which may all be equal.
        uniform, estimator = (value_at(spec, f"algorithm.{key}") for key in ("uniform_groups", "advantage"))
        self.compares_recorded_rewards = (
            estimator not in (*TURN_BASELINES, RUNNING_BASELINE)
            and ":" not in (estimator or "")
            and not any(value_at(spec, f"algorithm.{key}") for key in ("reward_parts", "overlong_penalty"))
        )
        self.compares_groups = self.has_rewards and (uniform != "train" or estimator in (None, *GROUP_BASELINES))
        # Otherwise different steps have different kinds of prompts.
        prompts_change = value_at(spec, "data.filter")
        self.is_comparable = self.has_rewards and not prompts_change and uniform != "reject"

    def add(self, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics
        self.step = int(metrics.get("step", self.step + 1))
        if len(self.rewards) >= FIRST_STEPS:
            self.best_reward = max(self.best_reward, fmean(self.rewards[-FIRST_STEPS:]))
        self.lowest_reward = min([self.lowest_reward, *self.rewards[-1:]])
        reward, deviation, correct = map(self.value, ("reward/mean", "reward/std", "reward/correct"))
        self.rewards += [] if reward is None else [reward]
        self.deviations += [] if deviation is None else [deviation]
        self.correct += [] if correct is None else [correct]
        self.is_binary &= reward is not None and correct is not None and abs(reward - correct) < 1e-6
        share = self.value("reward/uniform_groups")
        equal = round(min(max(share or 0.0, 0.0), 1.0) * self.groups_per_step)
        self.equal_groups += equal
        self.teaching_groups += 0 if share is None else self.groups_per_step - equal
        self.equal_in_a_row = self.equal_in_a_row + equal if share == 1.0 else 0

    @property
    def noise(self) -> float:
        """Three standard errors of a step's mean reward. They count twice, because a group's rewards are alike."""
        deviations = self.deviations[-USUAL_STEPS:]
        return 6 * median(deviations) / math.sqrt(self.rollouts_per_step) if deviations else math.inf

    def value(self, name: str) -> float | None:
        """The newest step's metric, at most ``LARGEST``; None if the step has none or it is not a number."""
        value = self.metrics.get(name)
        return None if value is None or math.isnan(value) else max(-LARGEST, min(value, LARGEST))

    @property
    def is_solved(self) -> bool:
        """True if the policy has learned to give correct responses: then equal rewards and low entropy are healthy."""
        return (self.value("reward/correct") or 0.0) >= SOLVED > fmean(self.correct[:FIRST_STEPS])

    @property
    def has_equal_rewards(self) -> bool:
        """True if no two rewards that the algorithm compares differ in the newest step."""
        if not self.has_rewards:
            return False
        recorded_are_equal = self.compares_recorded_rewards and self.value("reward/std") == 0.0
        return recorded_are_equal or (self.compares_groups and self.value("reward/uniform_groups") == 1.0)

    @property
    def learned_nothing(self) -> bool:
        """True if the newest step changed no weight, or its rewards could teach nothing."""
        if self.step <= self.critic_warmup or self.is_solved:
            return False
        return self.is_idle or self.has_equal_rewards

    @property
    def is_idle(self) -> bool:
        """True if the newest step changed no weight."""
        return 0.0 in (self.value("train/updates"), self.value("train/gradient_norm"))


def _equal_groups(history: _History, _: float, __: bool) -> Symptom:
    if not history.has_equal_rewards or history.is_solved:
        return ()
    reward, groups = history.value("reward/mean") or 0.0, history.groups_per_step
    remedy = f"{READ_RESPONSES}, and change the reward or `data.train`"
    cause = "the reward gives every response to a prompt the same value"
    if history.teaching_groups > history.equal_in_a_row:
        cause, remedy = "the policy has collapsed to equal responses, or to wrong ones", f"{LOWER_RATE}; {remedy}"
    elif history.is_binary and reward == 0.0:
        cause = "no response is right: the prompts are too hard, or the reward does not recognize right answers"
    elif history.is_binary and reward == 1.0:
        cause = "every response is right: the prompts are too easy, or the reward accepts everything"
    return f"{groups} of {groups} groups had equal rewards (mean {reward:.3g})", cause, remedy


def _equal_groups_patience(history: _History) -> int:
    """Steps until so many equal groups in a row are less probable than ``CHANCE``."""
    earlier_equal = history.equal_groups - history.equal_in_a_row
    share = (earlier_equal + 1) / (earlier_equal + history.teaching_groups + 2)  # Laplace's rule of succession
    return max(FIRST_STEPS, math.ceil(math.log(CHANCE) / math.log(share) / history.groups_per_step))


def _no_updates(history: _History, updates: float, _: bool) -> Symptom:
    if not history.learned_nothing or history.has_equal_rewards:
        return ()
    if history.value("train/updates_skipped"):
        return "no weight changed", "no update was finite", LOWER_RATE
    if updates:
        return "the gradient was 0", "the advantage of every token is 0", "check `algorithm.advantage` and the reward"
    return (
        "no weight changed",
        "no rollout with a reward counts: all are masked, rejected or truncated",
        "see `reward/masked_rollouts`, `algorithm.mask_truncated` and `algorithm.correction`",
    )


def _updates_skipped(_: _History, skipped: float, __: bool) -> Symptom:
    if not skipped:
        return ()
    return (
        f"{skipped:.0f} of the step's updates were skipped, because a loss or a gradient was not finite",
        "the learning rate is too high, or the numbers exceed the range of `trainer.dtype`",
        LOWER_RATE,
    )


def _truncated(history: _History, share: float, has_begun: bool) -> Symptom:
    if history.has_random_weights or share <= (TRUNCATED_CALM if has_begun else TRUNCATED):
        return ()
    limit = setting(history.spec, "rollout.max_response_tokens", 0)
    return (
        f"{share:.0%} of the responses were truncated at {limit} tokens",
        "the limit is shorter than the task's responses, or the policy no longer ends them",
        "raise `rollout.max_response_tokens`; if it began late, lower `trainer.optimizer.learning_rate`",
    )


def _unknown_tokens(_: _History, share: float, __: bool) -> Symptom:
    if share <= UNKNOWN:
        return ()
    return (
        f"{share:.1%} of the sampled tokens have no text",
        "the model samples ids that its tokenizer does not have",
        "use the tokenizer that belongs to the model, or train the model on texts first",
    )


def _policy_moved(_: _History, kl: float, has_begun: bool) -> Symptom:
    if kl <= (KL_CALM if has_begun else KL):
        return ()
    return (
        f"KL to the policy that sampled the responses is {kl:.2g} nats, above {KL:g}",
        "updates are too large: the learning rate, or the staleness, is too high",
        LOWER_RATE_OR_STALENESS,
    )


def _logprob_gap(history: _History, largest: float, _: bool) -> Symptom:
    dtypes = [value_at(history.spec, f"{section}.dtype") for section in ("trainer", "rollout")]
    exact = dtypes == ["float32", "float32"]
    mean = history.value("engine/logprob_gap_mean") or 0.0
    name, gap, limit = ("max", largest, GAP_FLOAT32) if exact else ("mean", mean, GAP_BFLOAT16)
    if gap <= limit:
        return ()
    text = f"for equal weights, log-probs of engine and trainer differ by {gap:.2g} nats ({name}), more than {limit:g}"
    if exact:
        return text, "the engine's kernels differ", "compare `rollout.engine_args` and `trainer.attention`"
    arguments = value_at(history.spec, "rollout.engine_args")
    for argument, value in arguments.items() if isinstance(arguments, Mapping) else ():
        if value in FP8_ENGINES.get(argument_name(argument), ()):
            return text, "FP8 is too coarse for this model", f"remove `rollout.engine_args.{argument}`"
    return text, "bfloat16 is too coarse for this model", "set `rollout.dtype` and `trainer.dtype` to float32"


def _limited_weights(history: _History, capped: float, _: bool) -> Symptom:
    names = ("importance_masked_fraction", "rejected_token_fraction", "rejected_row_fraction")
    excluded = max(history.value(f"correction/{name}") or 0.0 for name in names)
    if capped <= CAPPED and excluded <= EXCLUDED:
        return ()
    text = f"{capped:.0%} of the importance weights were capped"
    if excluded > EXCLUDED:
        text = f"`algorithm.correction` excluded {excluded:.0%} of the tokens"
    return text, "the policy has moved far from the one that sampled the responses", LOWER_RATE_OR_STALENESS


def _entropy(history: _History, entropy: float, _: bool) -> Symptom:
    if entropy >= ENTROPY or (history.value("reward/correct") or 0.0) >= NEARLY_SOLVED:
        return ()
    return (
        f"entropy is {entropy:.2g} nats per token",
        "the policy gives nearly the same response each time, so it explores nothing",
        "raise `rollout.sampling.temperature` or `algorithm.entropy_coef`, or lower `trainer.optimizer.learning_rate`",
    )


def _reward_from_start(history: _History, reward: float, _: bool) -> Symptom:
    if not (history.has_rewards and history.compares_recorded_rewards and history.is_binary):
        return ()
    # If all groups are equal, ``equal_groups`` speaks.
    if history.has_equal_rewards:
        return ()
    rewards = [*history.rewards[:FIRST_STEPS], reward]
    if max(rewards) <= NEVER_CORRECT:
        cause = "the prompts are too hard, or the reward does not recognize right answers"
    elif min(rewards) >= 1 - NEVER_CORRECT:
        cause = "the prompts are too easy, or the reward accepts everything"
    else:
        return ()
    text = f"the mean reward was never further than {NEVER_CORRECT:g} from {round(reward)}"
    return text, cause, f"{READ_RESPONSES}, and change `data.train` or the reward"


def _reward_fell(history: _History, reward: float, has_begun: bool) -> Symptom:
    best, lowest = history.best_reward, 0.0 if history.is_binary else history.lowest_reward
    if not history.is_comparable or best == -math.inf:
        return ()
    if best - reward <= max((FALL_CALM if has_begun else FALL) * (best - lowest), history.noise):
        return ()
    return (
        f"the mean reward fell from {best:.3g} to {reward:.3g}",
        "updates are too large, or the policy exploits something that the reward no longer pays",
        f"{LOWER_RATE}; resume from an earlier checkpoint",
    )


RULES = (
    Rule("equal_groups", "reward/uniform_groups", _equal_groups, True, 0),
    Rule("no_updates", "train/updates", _no_updates, True, 3),
    Rule("updates_skipped", "train/updates_skipped", _updates_skipped, False),
    Rule("truncated_responses", "response/truncated_ratio", _truncated, True, 2),
    Rule("unknown_tokens", "response/unknown_tokens", _unknown_tokens, False),
    Rule("policy_moved", "correction/kl_behaviour", _policy_moved, True),
    Rule("logprob_gap", "engine/logprob_gap_max", _logprob_gap, False),
    Rule("limited_weights", "correction/importance_capped_fraction", _limited_weights, False, 3),
    Rule("entropy", "train/entropy", _entropy, False, 3),
    Rule("reward_from_start", "reward/mean", _reward_from_start, True, 3),
    Rule("reward_fell", "reward/mean", _reward_fell, True, 3),
)
"""All rules. The names are stable: reports, journals and programs have them."""
