"""The error of everything a user can get wrong about a task."""

from __future__ import annotations

from asyncrl_cli.runs.errors import UserError


class TaskError(UserError):
    """A task that cannot be loaded, or a reward that is not a number."""
