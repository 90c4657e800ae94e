"""From prompts to token ids, without those that are too long."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl_cli.buffer.records import Candidate
from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.runs.directory import RunError

MAX_SKIPS_IN_A_ROW = 10_000
"""So many over-long prompts one after another end the run instead of the search."""


class PromptEncoder:
    """Turns a prompt's text or messages into token ids."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def encode(self, prompt: Prompt) -> tuple[int, ...] | None:
        """Token ids, or None when there are too many. Raises ``RunError`` for messages without a template."""
        if isinstance(prompt.content, str):
            ids = self._tokenizer(prompt.content)["input_ids"]
        elif self._tokenizer.chat_template is None:
            raise RunError(
                f"prompt {prompt.uid} is a chat, and the model's tokenizer has no chat template",
                place="data",
                mend="Give prompts as text, or use a tokenizer with a chat template",
            )
        else:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt.content], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        return tuple(ids) if len(ids) <= self._max_tokens else None

    def decode(self, ids: Iterable[int]) -> str:
        """A response's text, as engines decode it."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class PromptSource:
    """The training prompts in their order; those given back by an interrupted run come first."""

    def __init__(self, loader: PromptLoader, encoder: PromptEncoder, first: Iterable[Prompt] = ()) -> None:
        self.loader = loader
        self.encoder = encoder
        self._first = deque(first)
        self.skipped = 0
        self._serial = 0

    def next(self) -> tuple[Prompt, tuple[int, ...]]:
        """The next prompt that is short enough. Raises ``RunError`` when there seems to be none."""
        for _ in range(MAX_SKIPS_IN_A_ROW):
            prompt = self._first.popleft() if self._first else self.loader.next()
            ids = self.encoder.encode(prompt)
            if ids is not None:
                return prompt, ids
            self.skipped += 1
        raise RunError(
            f"{MAX_SKIPS_IN_A_ROW} prompts in a row are longer than rollout.max_prompt_tokens",
            place="data.train",
            mend="Raise rollout.max_prompt_tokens or shorten the prompts",
        )

    def candidate(self) -> Candidate:
        """The next prompt, with where the loader stands after it."""
        prompt, ids = self.next()
        self._serial += 1
        return Candidate(self._serial, prompt, ids, self.loader.state())

    def resume(self, serial: int, loader: Mapping[str, int] | None) -> None:
        """Go on after the prompt ``serial``, from where the loader stood after it."""
        self._serial = serial
        if loader is not None:
            self.loader.restore(dict(loader))
