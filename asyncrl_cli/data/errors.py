"""The error of everything a user can get wrong about prompts."""

from __future__ import annotations

from asyncrl_cli.runs.errors import ConfigError


class DataError(ConfigError):
    """Prompts that cannot be read or made."""
