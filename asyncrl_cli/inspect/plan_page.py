"""The pages of `asyncrl plan`: the prediction and its basis."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import WIDTH, Page, number, table
from asyncrl_cli.journal.staleness import mean_age
from asyncrl_cli.plan.comparison import Line
from asyncrl_cli.plan.from_journal import Calibration
from asyncrl_cli.plan.prediction import Prediction, bound_text, limit_text, savings_text
from asyncrl_cli.plan.scenario import PlannedScenario
from asyncrl_cli.plan.simulator import SimulationResult

LABEL = 9
"""Width of a line's label in columns."""
TRAINER = {
    "training": "training",
    "publishing": "writing weights",
    "publish": "waiting for engines to load weights",
    "groups": "waiting for enough finished groups",
    "missing": "waiting for groups that are due",
    "other": "between steps",
}


def plan_page(name: str, predicted: Prediction, plan: PlannedScenario, reason: str = "") -> Page:
    """Show a prediction for the spec of this name.

    Args:
        reason: why there is no advice.
    """
    scenario, outcome, lengths = plan.scenario, predicted.outcome, predicted.lengths
    settings = scenario.settings
    groups = outcome.staleness.total()
    staleness = ", ".join(f"{age}: {count / groups:.0%}" for age, count in sorted(outcome.staleness.items()))
    trainer = [
        (TRAINER[activity], f"{seconds / outcome.steps:.3g}", f"{outcome.share(activity):.0%}")
        for activity, seconds in sorted(outcome.trainer.items(), key=lambda item: -item[1])
        if outcome.share(activity) >= 0.005
    ]
    lines = [
        f"{name}, predicted",
        f"runs     {counted(settings.groups_per_step, 'group')} of {settings.group_size} a step, max_staleness "
        f"{settings.max_staleness}, {counted(scenario.engines, 'engine')} of {counted(scenario.slots, 'rollout')}",
        f"lengths  mean {number(lengths['mean'])} tokens, 99 % below {number(lengths['p99'] + 1)}, longest "
        f"{number(lengths['longest'])}, {lengths['at_limit']:.1%} at the limit",
        "",
        f"step     {outcome.step_s:.3g} s",
        f"tokens   {number(outcome.trained_tokens)} a second in batches, {number(outcome.generated_tokens)} generated",
        f"speed    {predicted.ratio_to_sync:.2f} times as fast as with max_staleness 0, where a step takes "
        f"{predicted.sync.step_s:.3g} s",
        "",
        *table(("trainer", "s a step", "share"), trainer),
        "",
        f"engines  {outcome.engines_idle:.0%} of their time idle, {outcome.engines_stalled:.0%} loading weights, "
        f"{number(outcome.running)} rollouts at a time",
        f"stale    mean {mean_age(outcome.staleness):.2f} versions ({staleness})",
        f"bounds   {', '.join(f'{bound}: {step_s:.3g} s' for bound, step_s in predicted.bounds.items())}",
        f"advice   none: {reason}" if reason else f"         {bound_text(predicted)}",
    ]
    if not reason:
        lines += [f"limit    {limit_text(predicted)}", f"         {savings_text(predicted)}"]
    document = {
        "title": lines[0],
        "settings": asdict(settings),
        "outcome": _outcome_document(outcome),
        "sync": _outcome_document(predicted.sync),
        "ratio_to_sync": predicted.ratio_to_sync,
        "lengths": dict(lengths),
        "step_s_by_max_staleness": {str(bound): step_s for bound, step_s in predicted.bounds.items()},
        "least_free_max_staleness": predicted.free,
        "limit": None if reason else predicted.limit,
        "savings": dict(predicted.savings),
        "no_advice": reason,
        "guesses": list(plan.guesses),
    }
    return Page(document, _wrapped([*lines, *(f"guess    {guess}" for guess in plan.guesses)]))


def calibration_page(run_id: str, calibration: Calibration, lines: Sequence[Line]) -> Page:
    """Show a run's measurements with residuals, and how well the simulation reproduces its steps."""
    constants = {
        "engine": asdict(calibration.engine) if calibration.engine is not None else None,
        "trainer": asdict(calibration.trainer),
        "publish": asdict(calibration.costs.publish),
        "overheads": asdict(calibration.costs.overheads),
    }
    rows = [
        (part, name, f"{value:.3g}")
        for part, values in constants.items()
        for name, value in (values or {"not recorded": math.nan}).items()
    ]
    text = [
        f"measured in {run_id}, over {counted(calibration.observed.steps, 'step')}",
        "",
        *table(("part", "constant", "value"), rows, left_aligned=(0, 1)),
        "",
        *comparison_table("its own steps", lines),
    ]
    document = {
        "run": run_id,
        "steps": calibration.observed.steps,
        **constants,
        "reproduced": [asdict(line) | {"fits": line.fits} for line in lines],
    }
    return Page(document, _wrapped(text))


def comparison_table(title: str, lines: Sequence[Line]) -> list[str]:
    """Format predictions next to measurements, each with its unit."""
    rows = [(line.name, *_compared(line), "" if line.fits else "does not fit") for line in lines]
    return table((title, "predicted", "measured", "difference", ""), rows)


def _compared(line: Line) -> tuple[str, str, str]:
    match line.unit:
        case "s":
            return f"{line.predicted:.3g} s", f"{line.measured:.3g} s", f"{line.off:+.1%}"
        case "share":
            return f"{line.predicted:.1%}", f"{line.measured:.1%}", f"{100 * line.off:+.1f} points"
        case "versions":
            return f"{line.predicted:.2f}", f"{line.measured:.2f}", f"{line.off:+.2f} versions"


def _outcome_document(outcome: SimulationResult) -> dict[str, Any]:
    return asdict(outcome) | {
        "staleness": {str(age): groups for age, groups in sorted(outcome.staleness.items())},
        "mean_staleness": mean_age(outcome.staleness),
        "trainer_shares": {activity: outcome.share(activity) for activity in outcome.trainer},
    }


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Wrap long lines. Their continuation is indented past the label."""
    return [text for line in lines for text in textwrap.wrap(line, WIDTH, subsequent_indent=" " * LABEL) or [""]]
