"""The errors a user can mend: each says what is wrong, where, and what to do about it.

Every other exception is a bug and keeps its traceback; these are printed as one paragraph by ``cli.app.main``.
"""

from __future__ import annotations

import re

from asyncrl_cli.runs.secrets import hide

_SENTENCE = re.compile(r"(?:^|(?<=\? ))(?!pip )[a-z](?=[a-z]* )")
"""The first letter of a hint's sentence, unless a command, a key or a path begins it."""


class UserError(Exception):
    """Something the user can put right.

    ``message`` says what is wrong, ``place`` where (a file with its line, a run id, a host), ``mend`` what to do.
    Subclasses set ``exit_code``, the status the command ends with.
    """

    exit_code = 1

    def __init__(self, message: str, *, place: str = "", mend: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.mend = _SENTENCE.sub(lambda first: first[0].upper(), mend)

    def __str__(self) -> str:
        """One paragraph: ``place: message. mend.``, without secrets."""
        said = (sentence.rstrip(".") for sentence in (self.message, self.mend) if sentence)
        sentences = [sentence if sentence.endswith("?") else f"{sentence}." for sentence in said]
        return hide((f"{self.place}: " if self.place else "") + " ".join(sentences))


class ConfigError(UserError):
    """A mistake in the spec, or in what the spec names: files, models, data, functions, devices."""

    exit_code = 2
