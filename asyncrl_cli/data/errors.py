"""The error of everything a user can get wrong about prompts."""

from __future__ import annotations

from asyncrl_cli.runs.errors import UserError


class DataError(UserError):
    """Prompts that cannot be read or made."""
