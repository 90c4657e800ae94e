"""Errors that a user can fix: each has a message (what is wrong), a location (where) and a hint (what to do).

Every other exception is a bug and keeps its traceback. ``cli.app.main`` prints these errors as a diagnostic, with one
line each for message, location and hint. Like compilers' messages, the texts are short, begin in lower case and have no
full stop at the end.
"""

from __future__ import annotations

from typing import Literal

from asyncrl_cli.core.secrets import hide

Severity = Literal["error", "warning"]


class UserError(Exception):
    """Something the user can fix.

    ``message`` says what is wrong, ``location`` where (a file with its line, a run id, a host), ``hint`` what to do.
    Subclasses set ``exit_code``, the status the command ends with.
    """

    exit_code = 1

    def __init__(self, message: str, *, location: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.location = location
        self.hint = hint

    def __str__(self) -> str:
        """The error in one line, for logs and for messages that quote it: ``location: message (hint)``, without
        secrets."""
        located = f"{self.location}: {self.message}" if self.location else self.message
        return hide(f"{located} ({self.hint})" if self.hint else located)

    def diagnostic(self) -> str:
        """The lines that a command prints, without secrets."""
        return hide(diagnostic("error", message=self.message, location=self.location, hint=self.hint))


def first_cause(error: BaseException) -> BaseException:
    """The first error in a group, which may be nested. Another error is its own cause."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def diagnostic(severity: Severity, message: str, location: str = "", hint: str = "") -> str:
    """The lines of a diagnostic: message, location and hint, one line each; empty parts are omitted."""
    lines = [f"{severity}: {message}"]
    if location:
        lines.append(f" --> {location}")
    if hint:
        lines.append(f"hint: {hint}")
    return "\n".join(lines)


class ConfigError(UserError):
    """A mistake in the spec, or in what the spec names: files, models, data, functions, devices."""

    exit_code = 2


class DataError(ConfigError):
    """Prompts that cannot be read or made."""


class TaskError(ConfigError):
    """A task that cannot be loaded, or a reward that is not a number."""


class RunError(UserError):
    """A run that cannot be found, started or resumed, or that failed."""
