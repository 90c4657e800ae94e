"""The errors a user can mend: each says what is wrong, where, and what to do about it.

Every other exception is a bug and keeps its traceback; these are printed as one paragraph by ``cli.app.main``.
"""

from __future__ import annotations

from asyncrl_cli.runs.secrets import hide


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
        self.mend = mend

    def __str__(self) -> str:
        """One paragraph: ``place: message. mend.``, without secrets."""
        said = (sentence.rstrip(".") for sentence in (self.message, self.mend) if sentence)
        sentences = [sentence if sentence.endswith("?") else f"{sentence}." for sentence in said]
        return hide((f"{self.place}: " if self.place else "") + " ".join(sentences))
