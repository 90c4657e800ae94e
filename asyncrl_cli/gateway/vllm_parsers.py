"""vLLM's own parsers by name: of reasoning, and of tool calls.

vLLM takes twelve seconds and 700 MB to import, so names are checked without it, and a parser is loaded only where
asyncrl does not read its format.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.rollout.engine_settings import reasoning_parsers, tool_parsers


class ParserError(ConfigError):
    """The spec names no parser, or one that this model's tokenizer has no tokens for."""


@dataclass(frozen=True, slots=True)
class ParserKind:
    """One of vLLM's two kinds of parsers.

    Args:
        what: its name in messages.
        location: its key in the spec.
        names: the names of its parsers, without vLLM's import; None where this vLLM does not say.
    """

    what: str
    location: str
    names: Callable[[], Collection[str] | None]

    def check(self, name: str, own: Collection[str]) -> None:
        """Raise ``ParserError`` when neither asyncrl (``own``) nor vLLM has a parser of that name. Imports no vLLM."""
        known = None if name in own else self.names()
        if known is not None:
            self.check_registered(name, known)

    def check_registered(self, name: str, known: Collection[str]) -> None:
        """Raise ``ParserError`` when a name is none of those that vLLM has registered."""
        if name not in known:
            hint = did_you_mean(name, known, f"use one of {', '.join(sorted(known))}")
            raise ParserError(f"vLLM has no {self.what} {name!r}", location=self.location, hint=hint)

    @contextmanager
    def fits(self, name: str) -> Iterator[None]:
        """Raise ``ParserError`` when a parser of vLLM's cannot be made for the model's tokenizer in this block."""
        try:
            yield
        except Exception as error:
            raise ParserError(
                f"the {self.what} {name} does not fit this model's tokenizer: {error}",
                location=self.location,
                hint="name the parser of the model's own format",
            ) from error


REASONING = ParserKind("reasoning parser", "rollout.reasoning_parser", reasoning_parsers)
TOOLS = ParserKind("tool parser", "rollout.tool_parser", tool_parsers)


def quiet() -> None:
    """Keep vLLM's log lines out of the live view: it logs every malformed call of a model with its traceback. Call it
    before the first import of vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for package in ("vllm.reasoning", "vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(package).setLevel(logging.CRITICAL)
