"""Pages through a run's rollouts, one by one, each found by an index."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from asyncrl_cli.core.terminal import counted, plain_text
from asyncrl_cli.inspect.decoding import (
    Decoder,
    TokenShown,
    content_text,
    open_decoder,
    reference_text,
    tokens_of,
)
from asyncrl_cli.inspect.pages import number
from asyncrl_cli.journal.queries import GroupRecord, group_record, snapshot
from asyncrl_cli.journal.rollouts import RewardRange, RolloutIndex, next_rollout
from asyncrl_cli.journal.schema import FILE, JournalError
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.training import CORRECT
from asyncrl_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.text import Text

PAGE_TOKENS = 1500
"""Largest number of tokens on a screen."""
UNLIKELY = ((0.9, "bold underline red"), (0.5, "underline dark_orange"), (0.1, "italic yellow"))
"""Styles of tokens with a probability of at most 1 minus the number. They differ even without colours."""

Filter = Literal["all", "right", "wrong"]
REWARDS: dict[Filter, RewardRange | None] = {"all": None, "right": (CORRECT, math.inf), "wrong": (-math.inf, CORRECT)}


class Pager:
    """Pages through a run's rollouts, from the newest to older ones."""

    def __init__(self, run: RunDirectory) -> None:
        self.filter: Filter = "all"
        self._run = run
        self._index: RolloutIndex | None = None
        self._note = ""
        self._decoder: Decoder | None = None
        self._has_decoder = False

    def turn(self, older: bool) -> None:
        """Go to the next older or newer rollout; stay if there is none. Starts at the newest ended rollout."""
        self._go(self._index, older)

    def next_filter(self) -> None:
        """Switch between all, right and wrong rollouts, and go to the newest of them."""
        filters = list(REWARDS)
        self.filter = filters[(filters.index(self.filter) + 1) % len(filters)]
        self._go(None, older=True)

    def _go(self, start: RolloutIndex | None, older: bool) -> None:
        with suppress(JournalError), snapshot(self._run.path / FILE) as connection:  # the panel shows this error
            index = next_rollout(connection, start=start, older=older, rewards=REWARDS[self.filter])
            adjective = "" if self.filter == "all" else f"{self.filter} "
            self._note = "" if index else f"there is no further {adjective}rollout"
            self._index = index or self._index

    def page(self) -> Text:
        if self._index is None:
            return plain_text(self._note if self.filter != "all" else "no rollout has ended yet")
        if not self._has_decoder:
            self._decoder, self._has_decoder = open_decoder(self._run), True
        with snapshot(self._run.path / FILE) as connection:
            group = group_record(connection, self._index[0])
        filter_note = "" if self.filter == "all" else f"{self.filter} rollouts only"
        text = rollout_text(group, index=self._index, decoder=self._decoder)
        return text.append("".join(f"\n{line}" for line in (filter_note, self._note) if line), style="bold")


def rollout_text(group: GroupRecord, index: RolloutIndex, decoder: Decoder | None) -> Text:
    """Show a rollout's facts, its prompt, and its tokens coloured by log-prob."""
    name = training_rollout_id(*index)
    rollout = next(rollout for rollout in group.rollouts if rollout.rollout_id == name)
    no_reward = "masked" if rollout.masked else "no reward"
    reward = no_reward if rollout.reward is None else f"reward {number(rollout.reward)}"
    step = "" if group.row.step is None else f", step {group.row.step}"
    staleness = "" if group.row.staleness is None else f", {counted(group.row.staleness, 'version')} behind"
    facts = f"{reward}, {counted(rollout.tokens, 'token')}{step}{staleness}"
    text = plain_text()
    text.append(f"rollout {name}, {group.row.state}: {facts}\n", style="bold")
    text.append(plain_text(f"{content_text(group.prompt.content)}\n\n", "dim"))
    tokens, omitted_count = tokens_of(rollout, decoder, PAGE_TOKENS)
    for token in tokens:
        text.append(plain_text(token.text, _style(token)))
    if not tokens:
        text.append("(its tokens are no longer in the journal)")
    if omitted_count:
        text.append(f"\n({omitted_count} more tokens)")
    if reference := reference_text(group.prompt.fields):
        text.append("\n\nreference  ", style="dim").append(plain_text(reference))
    text.append("\n\ncolours:", style="dim")
    for surprise, style in UNLIKELY:
        text.append("  ").append(f"probability up to {1 - surprise:.1f}", style=style)
    return text


def _style(token: TokenShown) -> str:
    if token.version is None:
        return "dim italic"
    return next((style for surprise, style in UNLIKELY if token.surprise >= surprise), "")
