"""How a run stands, as far as its folder tells."""

from __future__ import annotations

from asyncrl_cli.runs.directory import RunDirectory

UNDER_WAY = ("starting", "running")
"""Phases of a run that somebody drives."""


def standing(run: RunDirectory) -> str:
    """The run's phase, or ``died`` where it says that it is under way and nobody drives it."""
    phase = run.state.phase
    return "died" if phase in UNDER_WAY and not run.is_driven else phase
