"""The pages of `asyncrl plan`: the prediction, its basis, and a comparison with a run."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import WIDTH, Page, number, table
from asyncrl_cli.journal.staleness import mean_age
from asyncrl_cli.plan.comparison import Line
from asyncrl_cli.plan.from_journal import Calibration
from asyncrl_cli.plan.prediction import Prediction, bound_text, changes_text, less, limit_text, savings_text
from asyncrl_cli.plan.scenario import Planned
from asyncrl_cli.plan.simulator import Outcome
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.manifest import SPEED

SAME_SPEED = 0.05
"""Smaller differences in processor speed are not reported."""
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


def plan_page(
    name: str, predicted: Prediction, by_length: Mapping[float, float], planned: Planned, reason: str = ""
) -> Page:
    """Show a prediction for the spec of this name.

    Args:
        by_length: seconds per step, by the factor on lengths.
        reason: why there is no advice.
    """
    title, scenario, guesses = f"{name}, predicted", planned.scenario, planned.guesses
    outcome = predicted.outcome
    settings = scenario.settings
    lengths = predicted.lengths
    lines = [
        title,
        f"runs     {counted(settings.groups_per_step, 'group')} of {settings.group_size} a step, max_staleness "
        f"{settings.max_staleness}, {counted(scenario.engines, 'engine')} of {counted(scenario.slots, 'rollout')}",
        f"lengths  mean {number(lengths['mean'])} tokens, 99 % below {number(lengths['p99'] + 1)}, longest "
        f"{number(lengths['longest'])}, {lengths['at_limit']:.1%} at the limit",
        "",
        f"step     {_seconds(outcome.step_s)}; with lengths "
        + ", ".join(f"{factor - 1:+.0%}: {_seconds(step_s)}" for factor, step_s in by_length.items()),
        f"tokens   {number(outcome.trained_tokens)} a second in batches, {number(outcome.generated_tokens)} generated",
        f"speed    {predicted.ratio_to_sync:.2f} times as fast as with max_staleness 0, where a step takes "
        f"{_seconds(predicted.sync.step_s)}",
        "",
        *table(("trainer", "s a step", "share"), _trainer_rows(outcome)),
        "",
        f"engines  {outcome.engines_idle:.0%} of their time idle, {outcome.engines_stalled:.0%} loading weights, "
        f"{number(outcome.running)} rollouts at a time",
        "stale    " + _staleness(outcome),
        f"bounds   {', '.join(f'{bound}: {_seconds(step_s)}' for bound, step_s in predicted.bounds.items())}",
    ]
    if reason:
        lines += ["", f"advice   none: {reason}"]
    else:
        lines += [
            f"         {bound_text(predicted)}",
            "",
            f"limit    {limit_text(predicted)}",
            f"         {savings_text(predicted)}",
            f"helps    {changes_text(predicted)}",
        ]
    lines += [f"guess    {guess}" for guess in guesses]
    document = {
        "title": title,
        "settings": asdict(settings),
        "outcome": outcome_document(outcome),
        "sync": outcome_document(predicted.sync),
        "ratio_to_sync": predicted.ratio_to_sync,
        "lengths": dict(lengths),
        "step_s_by_length_factor": {str(factor): step_s for factor, step_s in by_length.items()},
        "step_s_by_max_staleness": {str(bound): step_s for bound, step_s in predicted.bounds.items()},
        "least_free_max_staleness": predicted.free,
        "limit": None if reason else predicted.limit,
        "savings": dict(predicted.savings),
        "changes": [] if reason else [asdict(change) for change in predicted.changes],
        "no_advice": reason,
        "guesses": list(guesses),
    }
    return Page(document, _wrapped(lines))


def calibration_page(run_id: str, measured: Calibration, lines: Sequence[Line]) -> Page:
    """Show a run's measurements with residuals, and how well the simulation reproduces its steps."""
    costs, trainer = measured.costs, measured.trainer
    text = [f"measured in {run_id}, over {counted(measured.observed.steps, 'step')}"]
    if (engine := measured.engine) is not None:
        text.append(
            f"engine   an iteration takes {1e3 * engine.fixed_s:.2f} ms + {1e6 * engine.per_sequence_s:.0f} us a "
            f"sequence + {1e9 * engine.per_context_token_s:.2g} ns a token of context; residual {engine.residual:.0%} "
            f"of a request, over {number(engine.requests)}"
        )
        if engine.beside_trainer:
            text.append(f"         {engine.beside_trainer:.0%} longer while the trainer trains next to it")
    else:
        text.append("engine   not recorded: every rollout takes its recorded time, however many run next to it")
    text += [
        f"trainer  {trainer.per_step_s:.3g} s a step + {1e6 * trainer.per_token_s:.3g} us a token; residual "
        f"{trainer.residual:.0%} of a step, over {trainer.steps}",
        f"publish  the trainer is kept for {costs.publish.held_s:.3g} s, engines serve "
        f"{costs.publish.deliver_s:.3g} s later, stall {costs.publish.stall_s:.3g} s",
        f"besides  {costs.overheads.start_s:.3g} s until a group's requests start, "
        f"{costs.overheads.settle_s:.3g} s from its last token until it counts, "
        f"{costs.overheads.step_s:.3g} s between steps",
        "",
        *comparison_table("its own steps", lines),
    ]
    document = {
        "run": run_id,
        "steps": measured.observed.steps,
        "engine": asdict(engine) if engine is not None else None,
        "trainer": asdict(trainer),
        "publish": asdict(costs.publish),
        "overheads": asdict(costs.overheads),
        "reproduced": [asdict(line) | {"fits": line.fits} for line in lines],
    }
    return Page(document, _wrapped(text))


def comparison_page(run_id: str, lines: Sequence[Line], parts: Mapping[str, float], own_s: float) -> Page:
    """Compare a prediction with a run's measurements.

    ``parts``: how the step's seconds change if one part is replaced by its measurement. ``own_s``: seconds of the step
    if all parts are replaced.
    """
    measured_s = lines[0].measured
    rows = [(name, f"{seconds:+.3f} s") for name, seconds in parts.items() if name != "together"]
    rows.append(("not in the model", f"{measured_s - own_s:+.3f} s"))
    text = [*comparison_table(f"against {run_id}", lines), "", *table(("if this had been as measured", "step"), rows)]
    document = {
        "run": run_id,
        "lines": [asdict(line) | {"fits": line.fits} for line in lines],
        "error_parts_s": dict(parts),
        "not_in_the_model_s": measured_s - own_s,
    }
    return Page(document, text)


def machine_page(calibration: RunDirectory, now: object, step_s: float) -> Page:
    """Compare the processors' speed with their speed when ``calibration`` ran.

    Args:
        now: their speed now, in the manifest's unit; not known if it is not a float.
        step_s: seconds of the predicted step.
    """
    then, host = calibration.manifest.get(SPEED), calibration.manifest.get("host")
    document: dict[str, Any] = {"then": then, "now": now, "step_s": None}
    if not isinstance(then, float) or not isinstance(now, float):
        text = "the speed of the processors was not recorded, so it may have changed since the run was measured"
    elif host != platform.node():
        text = f"the run was measured on {host}, and this machine may be faster or slower"
    else:
        slower = then / now
        document["step_s"] = slower * step_s
        text = f"the processors are as fast as when the run was measured, within {SAME_SPEED:.0%}"
        if abs(slower - 1) > SAME_SPEED:
            text = (
                f"the processors take {less(1 - slower)} time for the same work than when the run was measured: expect "
                f"a step of about {_seconds(slower * step_s)} instead of {_seconds(step_s)}"
            )
    return Page(document, _wrapped([f"machine  {text}"]))


def comparison_table(title: str, lines: Sequence[Line]) -> list[str]:
    """Format predictions next to measurements, each with its unit."""
    rows = [(line.name, *_compared(line), "" if line.fits else "does not fit") for line in lines]
    return table((title, "predicted", "measured", "difference", ""), rows)


def _compared(line: Line) -> tuple[str, str, str]:
    match line.unit:
        case "s":
            return _seconds(line.predicted), _seconds(line.measured), f"{line.off:+.1%}"
        case "share":
            return f"{line.predicted:.1%}", f"{line.measured:.1%}", f"{100 * line.off:+.1f} points"
        case "versions":
            return f"{line.predicted:.2f}", f"{line.measured:.2f}", f"{line.off:+.2f} versions"


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome's facts for JSON."""
    return asdict(outcome) | {
        "staleness": {str(age): groups for age, groups in sorted(outcome.staleness.items())},
        "mean_staleness": mean_age(outcome.staleness),
        "trainer_shares": {part: outcome.share(part) for part in outcome.trainer},
    }


def _trainer_rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    return [
        (TRAINER[part], f"{seconds / outcome.steps:.3g}", f"{outcome.share(part):.0%}")
        for part, seconds in sorted(outcome.trainer.items(), key=lambda item: -item[1])
        if outcome.share(part) >= 0.005
    ]


def _staleness(outcome: Outcome) -> str:
    total = outcome.staleness.total()
    shares = ", ".join(f"{age}: {groups / total:.0%}" for age, groups in sorted(outcome.staleness.items()))
    return f"mean {mean_age(outcome.staleness):.2f} versions ({shares})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Wrap long lines. Their continuation is indented past the label."""
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent=" " * LABEL) or [""]]
