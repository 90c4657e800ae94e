"""Measures the accuracy on held-out prompts and further sets.

``measure`` makes one evaluation, also for `asyncrl evaluate`. During training, ``Evaluator`` makes them on the engines
that generate the training rollouts, among these.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from math import comb, nan
from typing import Any

from asyncrl_cli.core.errors import DataError, RunError
from asyncrl_cli.core.intervals import Interval, clustered_error, mean_interval, share_interval
from asyncrl_cli.core.seeds import derive_seed
from asyncrl_cli.data.prompt_encoder import Encoded, PromptEncoder
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.monitors.base import EvaluationKind, EvaluationResult
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator.episodes import Episodes
from asyncrl_cli.orchestrator.scoring import Scoring
from asyncrl_cli.records.generation import EVALUATION, Rollout, RolloutRequest, Sampling
from asyncrl_cli.records.groups import Opening
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.records.training import CORRECT
from asyncrl_cli.rollout.client import GenerationClient, GenerationFailed
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.workers.scoring import responses_of


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Prompts to evaluate on, with their token ids. ``scoring`` scores the responses; a task that calls the model
    itself has ``episodes`` instead."""

    prompts: Sequence[tuple[Prompt, Encoded]]
    scoring: Scoring
    episodes: Episodes | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """A series of comparable evaluations: the same prompts and sampling settings, after different steps."""

    kind: EvaluationKind
    held_out: HeldOut
    every: int
    """Steps between two evaluations; 0: only before and after training."""
    max_prompts: int | None
    """Number of prompts to use; None for all."""
    temperature: float
    """0 is greedy."""
    samples: int
    """Responses per prompt."""


@dataclass(frozen=True, slots=True)
class _Sample:
    prompt: Prompt
    rollout: Rollout | None
    score: Scored | RewardFailure

    @property
    def reward(self) -> float | None:
        """None if the reward failed, or the task cannot score the response."""
        return self.score.reward if isinstance(self.score, Scored) else None

    @property
    def versions(self) -> list[int]:
        """The weight versions of the sampled tokens, one entry per token."""
        sequences = self.rollout.sequences if self.rollout is not None else ()
        return [version for sequence in sequences for version in sequence.versions[sequence.sampled].tolist()]


def encoded(
    prompts: Sequence[Prompt], encoder: PromptEncoder, location: str, warn: Callable[[str], None]
) -> list[tuple[Prompt, Encoded]]:
    """The usable held-out prompts with their token ids. Warns about others; raises ``RunError`` if none is usable."""
    fitting: list[tuple[Prompt, Encoded]] = []
    reason = ""
    for row in range(len(prompts)):
        try:
            prompt = prompts[row]
            if (encoded_prompt := encoder.encode_with_images(prompt)) is not None:
                fitting.append((prompt, encoded_prompt))
        except DataError as error:
            reason = reason or f", or cannot be used: {error}"
    if not fitting:
        raise RunError(
            "every held-out prompt is longer than rollout.max_prompt_tokens, or unusable",
            location=location,
            hint="raise rollout.max_prompt_tokens",
        )
    if skipped := len(prompts) - len(fitting):
        text = (
            f"{skipped} of {len(prompts)} prompts are skipped: they are longer than rollout.max_prompt_tokens{reason}"
        )
        warn(f"{location}: {text}")
    return fitting


def series_of(spec: ExperimentSpec, held_out: HeldOut | None, sets: Mapping[str, HeldOut]) -> list[Series]:
    """All series of a spec: its held-out prompts (None if it has none), greedy and sampled, and its sets by name."""
    evaluation = spec.evaluation
    temperature = evaluation.temperature or spec.rollout.sampling.temperature
    all_series: list[Series] = []
    if held_out is not None:
        greedy = Series(
            "greedy", held_out, every=evaluation.every, max_prompts=evaluation.prompts, temperature=0.0, samples=1
        )
        samples = evaluation.samples
        every = evaluation.every if samples > 1 else 0
        sampled = replace(greedy, kind="sampled", every=every, temperature=temperature, samples=samples)
        all_series += [greedy, sampled]
    for name, set_spec in evaluation.sets.items():
        all_series.append(
            Series(
                f"{name}:greedy" if set_spec.greedy else f"{name}:sampled",
                sets[name],
                every=evaluation.every if set_spec.every is None else set_spec.every,
                max_prompts=None,
                temperature=0.0 if set_spec.greedy else temperature,
                samples=1 if set_spec.greedy else set_spec.samples,
            )
        )
    return all_series


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation. ``result`` is None if no response has a reward; ``warning`` counts responses without a reward."""

    result: EvaluationResult | None
    warning: str
    file: str  # path in a run's folder
    text: str  # JSON Lines: the result, then one row for each response


async def measure(
    series: Series,
    step: int,
    spec: ExperimentSpec,
    client: GenerationClient,
    on_response: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Generate and score the responses of one evaluation; ``on_response`` is called for each generated response.

    ``step``: the weights' step, which together with the spec's seed determines the random numbers. Raises ``RunError``
    if a rollout fails.
    """
    samples = await _samples(series, step=step, spec=spec, client=client, on_response=on_response)
    result = _result(series, step, samples)
    return Evaluation(
        result=result if result.prompts else None,
        warning=_failures(series, step, samples),
        file=f"evaluations/step-{step:06d}-{series.kind.replace(':', '-')}.jsonl",
        text=_text(result, samples),
    )


@dataclass(eq=False)
class Evaluator:
    """Evaluates during a run on its held-out prompts and on ``sets``; records and reports the results."""

    spec: ExperimentSpec
    write: Callable[[str, str], object]
    """Writes a file, given by name and text, in the run's folder."""
    client: GenerationClient
    buffer: Buffer
    reporter: Reporter
    opening: InitVar[Opening]
    held_out: InitVar[HeldOut | None]
    sets: InitVar[Mapping[str, HeldOut]]
    accuracies: dict[int, float] = field(init=False)
    """The greedy held-out accuracies, by step."""
    running: set[int] = field(default_factory=set)
    """The steps with a running evaluation."""

    def __post_init__(self, opening: Opening, held_out: HeldOut | None, sets: Mapping[str, HeldOut]) -> None:
        self.accuracies = dict(opening.evaluated)
        self._completed = set(opening.evaluations)  # (step, kind)
        self._series = series_of(self.spec, held_out, sets)

    def due(self, step: int) -> list[Series]:
        """The evaluations after this step that are not done yet, also if an earlier driver has begun them."""
        return [
            series
            for series in self._series
            if self._is_end(step) or (series.every and step % series.every == 0)
            if (step, series.kind) not in self._completed
        ]

    async def evaluate(self, step: int) -> None:
        """Make all evaluations that are due after this step. Raises ``RunError`` if a rollout fails."""
        self.running.add(step)
        await asyncio.gather(*(self._evaluate(series, step) for series in self.due(step)))
        self.running.discard(step)

    async def _evaluate(self, series: Series, step: int) -> None:
        full_series = replace(series, max_prompts=None) if self._is_end(step) else series
        evaluation = await measure(full_series, step, spec=self.spec, client=self.client)
        self.write(evaluation.file, evaluation.text)
        self._completed.add((step, series.kind))
        if evaluation.warning:
            self.reporter.warn(evaluation.warning)
            await self.buffer.failed("evaluation", series.kind, evaluation.warning)
        result = evaluation.result
        if result is None:
            self.reporter.unevaluated(series.kind)
            return
        if result.kind == "greedy":
            self.accuracies[step] = result.accuracy
        self.reporter.evaluated(result)
        await self.buffer.evaluated(asdict(result))

    def _is_end(self, step: int) -> bool:
        return step in (0, self.spec.stop.total)


async def _samples(
    series: Series, step: int, spec: ExperimentSpec, client: GenerationClient, on_response: Callable[[], None]
) -> list[_Sample]:
    prompts = series.held_out.prompts[: series.max_prompts]
    inputs = [prompt_input for prompt_input in prompts for _ in range(series.samples)]
    sampling = Sampling(
        temperature=series.temperature,
        max_tokens=spec.rollout.max_response_tokens,
        stop=tuple(spec.rollout.sampling.stop),
    )
    # -1 - step: training groups count from 0, so no training rollout has the same seed. Sets over the same prompts have
    # their own seeds: otherwise one would only repeat the other. `asyncrl evaluate` repeats the run's samples.
    set_name = series.kind.rpartition(":")[0].removeprefix("offline-")
    seed_parts = (spec.seed, -1 - step, *([] if set_name in ("", "offline") else [set_name]))
    requests = [
        RolloutRequest(
            f"{EVALUATION}{step}:{series.kind}:{index}",
            prompt_ids=encoded_prompt.ids,
            sampling=replace(sampling, seed=derive_seed(*seed_parts, index) if series.temperature else None),
            images=encoded_prompt.images,
        )
        for index, (_, encoded_prompt) in enumerate(inputs)
    ]
    if (episodes := series.held_out.episodes) is not None:

        async def play(prompt: Prompt, request: RolloutRequest) -> _Sample:
            rollout, score = await episodes.play(request.rollout_id, prompt, request.sampling)
            on_response()
            return _Sample(prompt, rollout, score)

        return await asyncio.gather(
            *(play(prompt, request) for (prompt, _), request in zip(inputs, requests, strict=True))
        )
    rollouts = await _generated(client, requests, on_response)
    scoring = series.held_out.scoring
    responses = []
    for index, (prompt, _) in enumerate(prompts):
        prompt_rollouts = rollouts[index * series.samples : (index + 1) * series.samples]
        responses += responses_of(prompt, prompt_rollouts, scoring.sees_group(prompt))
    scores = await scoring.score(responses)
    return [
        _Sample(prompt, rollout, score) for (prompt, _), rollout, score in zip(inputs, rollouts, scores, strict=True)
    ]


async def _generated(
    client: GenerationClient, requests: Sequence[RolloutRequest], on_response: Callable[[], None]
) -> list[Rollout]:
    async def generate(request: RolloutRequest) -> Rollout:
        rollout = await client.generate(request)
        on_response()
        return rollout

    try:
        return await asyncio.gather(*map(generate, requests))
    except GenerationFailed as error:
        raise RunError(f"an evaluation rollout failed: {error}", location="evaluation") from None


def _text(result: EvaluationResult, samples: Sequence[_Sample]) -> str:
    head = asdict(result) | ({} if result.prompts else {"accuracy": None, "mean_reward": None})
    lines = [json.dumps(head)]
    for index, sample in enumerate(samples):
        rollout, score = sample.rollout, sample.score
        row: dict[str, Any] = {
            "uid": sample.prompt.uid,
            "prompt": sample.prompt.content,
            "response": rollout.text if rollout is not None else "",
            "finished": rollout is not None and rollout.finished,
            "reward": sample.reward,
        }
        if (answer := sample.prompt.fields.get("answer")) is not None:
            row["answer"] = answer
        if result.samples > 1:
            row["sample"] = index % result.samples
        if isinstance(score, RewardFailure):
            row["failure"] = str(score)
        elif score.metrics:
            row["metrics"] = dict(score.metrics)
        if versions := sample.versions:
            row["oldest"], row["newest"] = min(versions), max(versions)
        lines.append(json.dumps(row))
    return "\n".join(lines) + "\n"


def _result(series: Series, step: int, samples: Sequence[_Sample]) -> EvaluationResult:
    """The result. If no response has a reward, ``prompts`` is 0, and ``accuracy`` and ``mean_reward`` are NaN."""
    versions = [version for sample in samples for version in sample.versions]
    if not versions:
        reason = next((sample.score.reason for sample in samples if isinstance(sample.score, RewardFailure)), "")
        raise RunError(f"every evaluation episode failed; the first: {reason}", location="evaluation")
    by_prompt = (samples[start : start + series.samples] for start in range(0, len(samples), series.samples))
    rewards = [[sample.reward for sample in group if sample.reward is not None] for group in by_prompt]
    rewards = [group for group in rewards if group]
    correct = [[float(reward >= CORRECT) for reward in group] for group in rewards]
    # pass@k needs all samples of a prompt.
    correct_counts = [int(sum(group)) for group in correct if len(group) == series.samples > 1]
    intervals: dict[str, Interval | None] = {}
    if rewards:
        intervals = {"accuracy": share_interval(correct), "mean_reward": mean_interval(rewards)}
    mean_pass_at: list[float] = []
    for k in range(1, series.samples + 1) if correct_counts else ():
        estimates = [[pass_at(k, series.samples, correct)] for correct in correct_counts]
        mean_pass_at.append(sum(estimate for (estimate,) in estimates) / len(estimates))
        intervals[f"pass_at_{k}"] = share_interval(estimates, answers=series.samples * len(correct_counts))
    task_metrics: dict[str, list[float]] = {}
    for sample in samples:
        if isinstance(sample.score, Scored):
            for name, value in sample.score.metrics.items():
                task_metrics.setdefault(name, []).append(value)
    return EvaluationResult(
        kind=series.kind,
        step=step,
        accuracy=clustered_error(correct)[0] if rewards else nan,
        mean_reward=clustered_error(rewards)[0] if rewards else nan,
        mean_length=len(versions) / len(samples),
        prompts=len(rewards),
        oldest=min(versions),
        newest=max(versions),
        samples=series.samples,
        pass_at=tuple(mean_pass_at),
        metrics={name: sum(values) / len(values) for name, values in sorted(task_metrics.items())},
        intervals={name: interval for name, interval in intervals.items() if interval is not None},
    )


def _failures(series: Series, step: int, samples: Sequence[_Sample]) -> str:
    """A warning about the responses without a reward; empty if there are none."""
    failures = [sample.score for sample in samples if isinstance(sample.score, RewardFailure)]
    masked = sum(sample.reward is None for sample in samples) - len(failures)
    if not (failures or masked):
        return ""
    counts = f"{len(failures)} of {len(samples)} rewards failed, {masked} were None; the accuracy counts the others"
    example = f"; the first failure: {failures[0]}" if failures else ""
    return f"held-out {series.kind} at step {step}: {counts}{example}"


def pass_at(k: int, samples: int, correct: int) -> float:
    """The unbiased estimate of pass@k from n = ``samples`` >= k responses with c = ``correct`` correct ones.

    It is 1 - C(n - c, k) / C(n, k): the share of all choices of k responses that include a correct one (Chen et al.
    2021, arXiv:2107.03374).
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
