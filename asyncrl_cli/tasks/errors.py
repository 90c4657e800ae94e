"""The error of everything a user can get wrong about a task."""

from __future__ import annotations

from asyncrl_cli.runs.errors import ConfigError


class TaskError(ConfigError):
    """A task that cannot be loaded, or a reward that is not a number."""
