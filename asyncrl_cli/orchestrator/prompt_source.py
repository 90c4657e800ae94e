"""Gives the training prompts in order, and skips prompts that are too long. Prompts of outside programs come first."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from asyncrl_cli.core.errors import DataError, RunError
from asyncrl_cli.data.loader import PromptFilter, PromptLoader
from asyncrl_cli.data.prompt_encoder import Encoded, PromptEncoder
from asyncrl_cli.orchestrator.outside_sessions import OutsideSessions
from asyncrl_cli.records.groups import Candidate
from asyncrl_cli.records.prompt import Prompt

MAX_SKIPS_IN_A_ROW = 10_000
"""The run ends after this many consecutive prompts that are too long or unusable."""
SKIPPED_NAMED = 5
"""Number of skipped prompts that get a warning each; all are counted."""
PROMPTS_WITH_IMAGES = 8
"""Number of prompts that are encoded at a time if they may have images."""


class PromptSource:
    """The training prompts in order, after the prompts that an earlier driver left unused.

    ``skipped`` counts prompts that are too long or cannot be encoded.
    """

    def __init__(
        self,
        loader: PromptLoader,
        encoder: PromptEncoder,
        unused_prompts: Iterable[Prompt] = (),
        prompt_filter: PromptFilter | None = None,
        warn: Callable[[str], None] = lambda _: None,
        outside: OutsideSessions | None = None,
    ) -> None:
        """``unused_prompts`` come first. ``prompt_filter`` decides which prompts are skipped. ``warn`` shows a warning
        to the user. With ``outside``, groups are admitted only for the programs that wait."""
        self.loader = loader
        self.encoder = encoder
        self.filter = prompt_filter
        self._unused_prompts = deque(unused_prompts)
        self._warn = warn
        self._outside = outside
        self.skipped = 0
        self._serial = 0
        self._all_solved = False
        self._ready = deque[Candidate]()  # encoded with their images

    @property
    def wanted_groups(self) -> int:
        """Number of groups that may be admitted as far as the prompts' users are concerned."""
        return sys.maxsize if self._outside is None else self._outside.wanted_groups

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of a step about the prompts."""
        metrics = {"data/skipped_prompts": float(self.skipped)}
        if self.filter is not None:
            metrics["data/filtered_prompts"] = float(self.filter.filtered)
        return metrics if self._outside is None else {**metrics, **self._outside.counts}

    def next(self) -> tuple[Prompt, Encoded]:
        """The next usable prompt. Raises ``RunError`` after skipping ``MAX_SKIPS_IN_A_ROW`` prompts."""
        for _ in range(MAX_SKIPS_IN_A_ROW):
            try:
                prompt = self._unused_prompts.popleft() if self._unused_prompts else self._unsolved()
                encoded = self.encoder.encode_with_images(prompt)
            except DataError as error:
                problem = str(error)  # rows are not checked when the data is opened
            else:
                if encoded is not None:
                    return prompt, encoded
                problem = f"prompt {prompt.uid} is longer than rollout.max_prompt_tokens"
            self.skipped += 1
            if self.skipped <= SKIPPED_NAMED:
                self._warn(f"{problem}; it is skipped, and the metric data/skipped_prompts counts such prompts")
        raise RunError(
            f"{MAX_SKIPS_IN_A_ROW} prompts in a row cannot be used; the last one: {problem}",
            location="data.train",
            hint="raise rollout.max_prompt_tokens, or correct the rows",
        )

    def _unsolved(self) -> Prompt:
        """The next prompt that is not filtered out; if a whole epoch is filtered out, any next prompt."""
        for _ in range(len(self.loader)):
            prompt = self.loader.next()
            if self.filter is None or not self.filter.excludes(prompt.uid, self.loader.epoch):
                return prompt
        if not self._all_solved:
            self._all_solved = True
            self._warn("every training prompt is solved (data.filter), so solved prompts are trained on again")
        return prompt

    def visited(self, uid: str, solved: bool) -> None:
        """Tell the filter that a prompt's group has ended. ``solved``: every rollout was correct."""
        if self.filter is not None:
            self.filter.visited(uid, solved)

    async def prepare(self, count: int) -> int:
        """Return how many of the next ``count`` prompts can be admitted now. Prompts with images are encoded here, in a
        thread and a few at a time: a large image takes a tenth of a second, and the first requests must not wait."""
        # A program's own prompt would be recorded with the loader's position, which must not be ahead of its prompts.
        if not self.encoder.sees_images or self._outside is not None:
            return count
        if not self._ready:
            encoded_count = min(count, PROMPTS_WITH_IMAGES)
            self._ready.extend(await asyncio.to_thread(lambda: [self._next_candidate() for _ in range(encoded_count)]))
        return min(count, len(self._ready))

    def candidate(self) -> Candidate:
        """The next prompt, with the loader's position after it."""
        if self._outside is not None and (own_prompt := self._outside.own_prompt()) is not None:
            return self._numbered(own_prompt, Encoded(()))
        return self._ready.popleft() if self._ready else self._next_candidate()

    def _next_candidate(self) -> Candidate:
        return self._numbered(*self.next())

    def _numbered(self, prompt: Prompt, encoded: Encoded) -> Candidate:
        self._serial += 1
        return Candidate(
            self._serial, prompt=prompt, prompt_ids=encoded.ids, loader=self.loader.state(), images=encoded.images
        )

    def resume(self, serial: int, loader: Mapping[str, int] | None) -> None:
        """Continue after the prompt ``serial``. ``loader``: the data loader's position after it."""
        self._serial = serial
        if loader is not None:
            self.loader.restore(dict(loader))
