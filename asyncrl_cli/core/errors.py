"""The errors a user can fix: each says what is wrong, where, and what to do about it.

Every other exception is a bug and keeps its traceback; these are printed as one paragraph by ``cli.app.main``.
"""

from __future__ import annotations

import re

from asyncrl_cli.core.secrets import hide

_SENTENCE = re.compile(r"(?:^|(?<=\? ))(?!pip )[a-z](?=[a-z]* )")
"""The first letter of a hint's sentence, unless a command, a key or a path begins it."""


class UserError(Exception):
    """Something the user can put right.

    ``message`` says what is wrong, ``location`` where (a file with its line, a run id, a host), ``hint`` what to do.
    Subclasses set ``exit_code``, the status the command ends with.
    """

    exit_code = 1

    def __init__(self, message: str, *, location: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.location = location
        self.hint = _SENTENCE.sub(lambda first: first[0].upper(), hint)

    def __str__(self) -> str:
        """One paragraph: ``location: message. hint.``, without secrets."""
        said = (sentence.rstrip(".") for sentence in (self.message, self.hint) if sentence)
        sentences = [sentence if sentence.endswith("?") else f"{sentence}." for sentence in said]
        return hide((f"{self.location}: " if self.location else "") + " ".join(sentences))


class ConfigError(UserError):
    """A mistake in the spec, or in what the spec names: files, models, data, functions, devices."""

    exit_code = 2


class DataError(ConfigError):
    """Prompts that cannot be read or made."""


class TaskError(ConfigError):
    """A task that cannot be loaded, or a reward that is not a number."""


class RunError(UserError):
    """A run that cannot be found, started or resumed, or that failed."""
