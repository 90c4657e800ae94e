"""Errors that a user can fix. Every other exception is a bug and keeps its traceback.

``cli.app.main`` prints these errors as a diagnostic, with one line each for message, location and hint. Like a
compiler's messages, the texts are short, begin in lower case and have no full stop at the end.
"""

from __future__ import annotations

from typing import Literal

from asyncrl_cli.core.secrets import hide

Severity = Literal["error", "warning"]


class UserError(Exception):
    """An error that the user can fix.

    ``message`` names the problem, ``location`` the place (a file with its line, a run id, a host), ``hint`` the remedy.
    Subclasses set ``exit_code``, the command's exit status.
    """

    exit_code = 1

    def __init__(self, message: str, *, location: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.location = location
        self.hint = hint

    def __str__(self) -> str:
        """One line without secrets, for logs and for messages that quote it: ``location: message (hint)``."""
        located = f"{self.location}: {self.message}" if self.location else self.message
        return hide(f"{located} ({self.hint})" if self.hint else located)

    def diagnostic(self) -> str:
        """The lines that a command prints, without secrets."""
        return hide(diagnostic("error", message=self.message, location=self.location, hint=self.hint))


def first_cause(error: BaseException) -> BaseException:
    """The first error in a group, which may be nested; any other error is returned unchanged."""
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
    """A mistake in the spec or in a file, model, data set, function or device that it names."""

    exit_code = 2


class DataError(ConfigError):
    """Prompts that cannot be read or made."""


class TaskError(ConfigError):
    """A task that cannot be loaded, or a reward that is not a number."""


class RunError(UserError):
    """A run that cannot be found, started or resumed, or that failed."""


class RunArgumentError(RunError):
    """An argument that names no run, or no step, group or rollout of a run."""

    exit_code = 2
