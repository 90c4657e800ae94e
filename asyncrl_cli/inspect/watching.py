"""Observes a run from outside: the panel's data, and rollouts one by one.

Invariant: a look costs the same for a run of any length. It reads the newest steps, the buffer, the evaluations and the
newest faults, each by an index, and never scans groups or rollouts.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from asyncrl_cli.core.terminal import counted, plain_text
from asyncrl_cli.inspect.dashboard import FAULTS, TREND_STEPS, TRENDS, Shown
from asyncrl_cli.inspect.decoding import (
    Decoder,
    TokenShown,
    content_text,
    images_of,
    open_decoder,
    reference_text,
    tokens_of,
)
from asyncrl_cli.inspect.pages import duration, moment, number
from asyncrl_cli.journal.events import metrics_of
from asyncrl_cli.journal.history import evaluations, failures, newest_batch, newest_health, newest_steps
from asyncrl_cli.journal.progress import progress
from asyncrl_cli.journal.queries import GroupRecord, due_groups, group_record, snapshot
from asyncrl_cli.journal.rollouts import RewardRange, RolloutIndex, newest_rollout, next_rollout
from asyncrl_cli.journal.schema import FILE, JournalError
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.records.training import CORRECT
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory, engines_text

if TYPE_CHECKING:
    from rich.text import Text

TOKENS_SHOWN = 1500
"""Largest number of tokens on a screen."""
UNLIKELY = ((0.9, "bold underline red"), (0.5, "underline dark_orange"), (0.1, "italic yellow"))
"""Styles of tokens with a probability of at most 1 minus the number. They differ even without colours."""
VERSION_STYLES = ("blue", "underline magenta", "bold green", "italic cyan", "bold underline yellow", "reverse red")
"""Styles by the version's age in the rollout."""

Colouring = Literal["log-prob", "weight version"]
Wanted = Literal["all", "right", "wrong"]
WANTED: dict[Wanted, RewardRange | None] = {"all": None, "right": (CORRECT, math.inf), "wrong": (-math.inf, CORRECT)}


def look(run: RunDirectory, now: float | None = None) -> Shown:
    """Return the state of the run at the Unix time ``now``."""
    at = time.time() if now is None else now
    phase, state = run.status, run.state
    reason = f": {state.reason}" if state.reason and phase not in ACTIVE else ""
    doing = f"{run.run_id}, {phase}{reason}"
    try:
        with snapshot(run.path / FILE) as connection:
            shown = _seen(connection, doing=doing, under_way=phase in ACTIVE, now=at)
            findings = [newest_health(connection, rule) for rule in state.findings]
    except JournalError as error:
        return Shown(doing if not (run.path / FILE).exists() else f"{doing}; {error}", steps=state.steps)
    return replace(shown, findings=findings, engines=engines_text(state) if phase in ACTIVE else "")


def _seen(connection: sqlite3.Connection, doing: str, under_way: bool, now: float) -> Shown:
    where = progress(connection)
    newest = newest_steps(connection, TREND_STEPS)
    recent = [metrics_of(one.metrics) for one in newest]
    metrics = recent[-1] if recent else {}
    accuracy: dict[str, list[float]] = {}
    for one in sorted(evaluations(connection), key=lambda one: one.kind):
        accuracy.setdefault(one.kind, []).append(one.accuracy)
    due = due_groups(connection, where)
    done = newest[-1].step if newest else where.first_step
    remaining_s = None
    if under_way and len(newest) > 1:
        first, last = newest[0], newest[-1]
        remaining_s = (last.at - first.at) / (last.step - first.step) * (where.settings.total_steps - done)
    return Shown(
        now=doing,
        step=done,
        steps=where.settings.total_steps,
        version=where.version,
        max_staleness=where.settings.max_staleness,
        metrics=metrics,
        trends={name: [one[name] for one in recent if name in one] for name in TRENDS},
        accuracy=accuracy,
        remaining_s=remaining_s,
        trainer=_trainer(connection, where.settings.total_steps, now) if under_way else "",
        counts=Counts(
            running=sum(one.running for one in due),
            finished=sum(one.finished for one in due),
            # These counts come from the newest step's metrics: counting here would scan all groups.
            **{
                name: int(metrics.get(f"buffer/groups_{name}", 0)) for name in ("taken", "rejected", "requeued", "late")
            },
        ),
        due=due,
        faults=[f"{moment(one.at)} {one.part}: {one.message}" for one in failures(connection, FAULTS)[::-1]],
    )


def _trainer(connection: sqlite3.Connection, steps: int, now: float) -> str:
    newest = newest_batch(connection)
    if newest is None:
        return ""
    step, taken_at, trained_at = newest
    if trained_at is None:
        return f"trains step {step + 1} for {duration(max(0.0, now - taken_at))}"
    return (
        f"waits for the batch of step {step + 2} for {duration(max(0.0, now - trained_at))}" if step + 1 < steps else ""
    )


# -- rollouts, one by one


class Pager:
    """Pages through a run's rollouts, from the newest to older ones."""

    def __init__(self, run: RunDirectory) -> None:
        self.colouring: Colouring = "log-prob"
        """The meaning of the tokens' colours."""
        self.wanted: Wanted = "all"
        self._run = run
        self._shown: RolloutIndex | None = None
        self._note = ""
        self._decoder: Decoder | None = None
        self._decoder_sought = False

    def turn(self, older: bool) -> None:
        """Go to the next older or newer wanted rollout; stay if there is none. Starts at the newest ended rollout."""
        self._find(
            lambda connection: next_rollout(connection, after=self._shown, older=older, rewards=WANTED[self.wanted])
        )

    def filter(self) -> None:
        """Switch between all, right and wrong rollouts, and go to the newest of them."""
        kinds = list(WANTED)
        self.wanted = kinds[(kinds.index(self.wanted) + 1) % len(kinds)]
        self._find(lambda connection: next_rollout(connection, after=None, older=True, rewards=WANTED[self.wanted]))

    def go_to(self, step: int) -> None:
        """Go to a wanted rollout of a step, counted from 1; stay if there is none."""
        self._find(lambda connection: newest_rollout(connection, step - 1, WANTED[self.wanted]), f"of step {step}")

    def _find(self, found_in: Callable[[sqlite3.Connection], RolloutIndex | None], where: str = "") -> None:
        with suppress(JournalError), snapshot(self._run.path / FILE) as connection:  # the panel shows this error
            found = found_in(connection)
            kind = "" if self.wanted == "all" else f"{self.wanted} "
            self._note = "" if found else f"there is no further {kind}rollout {where}".rstrip()
            self._shown = found or self._shown

    def recolour(self) -> None:
        self.colouring = "weight version" if self.colouring == "log-prob" else "log-prob"

    def page(self) -> Text:
        if self._shown is None:
            return plain_text(self._note if self.wanted != "all" else "no rollout has ended yet")
        if not self._decoder_sought:
            self._decoder, self._decoder_sought = open_decoder(self._run), True
        with snapshot(self._run.path / FILE) as connection:
            group = group_record(connection, self._shown[0])
        shown = "" if self.wanted == "all" else f"{self.wanted} rollouts only"
        text = rollout_text(group, index=self._shown, decoder=self._decoder, colouring=self.colouring)
        return text.append("".join(f"\n{line}" for line in (shown, self._note) if line), style="bold")


def rollout_text(group: GroupRecord, index: RolloutIndex, decoder: Decoder | None, colouring: Colouring) -> Text:
    """Show a rollout's facts, its prompt, and its tokens in colours."""
    name = training_rollout_id(*index)
    rollout = next(one for one in group.rollouts if one.rollout_id == name)
    unknown = "masked" if rollout.masked else "no reward"
    reward = unknown if rollout.reward is None else f"reward {number(rollout.reward)}"
    step = "" if group.row.step is None else f", step {group.row.step}"
    behind = "" if group.row.staleness is None else f", {counted(group.row.staleness, 'version')} behind"
    tokens = counted(rollout.tokens, "token")
    text = plain_text()
    text.append(f"rollout {name}, {group.row.state}: {reward}, {tokens}{step}{behind}\n", style="bold")
    about_images = images_of(replace(group, rollouts=(rollout,))).values()
    text.append(plain_text("\n".join([content_text(group.prompt.content), *about_images, "\n"]), "dim"))
    shown, left_out = tokens_of(rollout, decoder, TOKENS_SHOWN)
    for token in shown:
        text.append(plain_text(token.text, _style(token, colouring)))
    if not shown:
        text.append("(its tokens are no longer in the journal)")
    if left_out:
        text.append(f"\n({left_out} more tokens)")
    if reference := reference_text(group.prompt.fields):
        text.append("\n\nreference  ", style="dim").append(plain_text(reference))
    versions = dict.fromkeys((token.age, token.version) for token in shown if token.version is not None)
    text.append(f"\n\ncolours: {colouring}", style="dim")
    if colouring == "weight version":
        for age, version in versions:
            text.append("  ").append(f"version {version}", style=VERSION_STYLES[age % len(VERSION_STYLES)])
    else:
        for surprise, style in UNLIKELY:
            text.append("  ").append(f"probability up to {1 - surprise:.1f}", style=style)
    return text


def _style(token: TokenShown, colouring: Colouring) -> str:
    if token.version is None:
        return "dim italic"
    if colouring == "weight version":
        return VERSION_STYLES[token.age % len(VERSION_STYLES)]
    return next((style for surprise, style in UNLIKELY if token.surprise >= surprise), "")
