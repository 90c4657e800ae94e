"""Recorded token ids as text, with the tokenizer that the run's engines start from.

Needs the ``tokenizers`` library alone. Invariant: the parts that ``parts`` returns make up the text of all ids, also
where a cut goes through a character or where a token's text depends on the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl_cli.runs.directory import RunDirectory

CONTEXT = 8
"""Tokens before one that its text may depend on: no character of UTF-8 has more than four bytes."""
BROKEN = "\ufffd"
"""What a decoder shows for bytes that are no character (yet)."""


class Decoder:
    """A tokenizer, for reading only. Special tokens are shown."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: a ``tokenizers.Tokenizer``."""
        self._tokenizer = tokenizer

    def parts(self, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
        """The text of all ids, cut at token indices that rise to ``len(ids)``.

        A character that tokens share belongs to the part that completes it.
        """
        texts, start = [], 0
        for cut in cuts:
            texts.append(self._text(ids, start, cut, whole=cut == len(ids)))
            start = cut
        return texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return self.parts(ids, range(1, len(ids) + 1))

    def _text(self, ids: Sequence[int], start: int, end: int, whole: bool) -> str:
        known = list(ids[max(0, start - CONTEXT) : start])
        before = self._decode(known).rstrip(BROKEN) if known else ""
        text = self._decode([*known, *ids[start:end]])
        return text[len(before) :] if whole else text[len(before) :].rstrip(BROKEN)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def open_decoder(run: RunDirectory) -> Decoder | None:
    """The decoder for a run's tokens; None when neither its folder nor the model it names has a ``tokenizer.json``."""
    for path in _candidates(run):
        if path.is_file():
            from tokenizers import Tokenizer

            try:
                return Decoder(Tokenizer.from_file(str(path)))
            except Exception:  # the library raises nothing narrower for a file that it cannot read
                continue
    return None


def _candidates(run: RunDirectory) -> Iterator[Path]:
    yield run.model_stub / "tokenizer.json"
    import yaml

    try:  # a saved model is used where it lies, and has no model stub
        saved = yaml.safe_load((run.path / "spec.yaml").read_text())["model"]["path"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return
    if isinstance(saved, str):
        yield Path(saved) / "tokenizer.json"
