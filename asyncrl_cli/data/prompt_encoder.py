"""Turns prompts into token ids and images: for training, evaluation, checks and the trainer's supervised rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from asyncrl_cli.core.errors import ConfigError, DataError, RunError
from asyncrl_cli.data.chat_template import VARIABLES, ChatTemplate, Feature, Tools, chat_of
from asyncrl_cli.data.images import ImageTokens
from asyncrl_cli.data.special_tokens import plain_ids
from asyncrl_cli.data.tokenizer import templates_texts
from asyncrl_cli.records.images import Image, PlacedImage
from asyncrl_cli.records.prompt import ChatError, Message, Prompt, image_digests
from asyncrl_cli.spec.sections import ExperimentSpec

FIRST_ROWS = 200
"""Number of rows that are searched for the probe's prompts."""


class Encoded(NamedTuple):
    """A prompt's token ids and images."""

    ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()


class PromptEncoder:
    """Turns a prompt's text or messages into token ids (decision 0048)."""

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int,
        episodic: bool = False,
        *,
        apply_chat_template: bool = True,
        template: ChatTemplate | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        """``episodic``: rollouts are episodes, so the task writes the model's input. ``apply_chat_template``: render
        texts with the template if there is one. ``template``: by default the tokenizer's, without variables.
        ``images`` encodes prompts with images."""
        self.tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._episodic = episodic
        self._texts_are_chats = apply_chat_template and templates_texts(tokenizer)
        self.template = template or ChatTemplate(tokenizer)
        self._images = images or ImageTokens("", 0, 0)
        self.sees_images = self._images.max_images > 0

    @classmethod
    def of(cls, spec: ExperimentSpec, tokenizer: Any, episodic: bool = False) -> PromptEncoder:
        """The encoder of a run's prompts."""
        return cls(
            tokenizer,
            spec.rollout.max_prompt_tokens,
            episodic,
            apply_chat_template=spec.data.apply_chat_template,
            template=ChatTemplate.from_spec(spec, tokenizer),
            images=ImageTokens(tokenizer.name_or_path, spec.model.max_images, spec.data.image_max_pixels),
        )

    @cached_property
    def vocabulary(self) -> int:
        """1 more than the tokenizer's largest token id."""
        return 1 + int(max(self.tokenizer.get_vocab().values()))

    def encode(self, prompt: Prompt) -> tuple[int, ...] | None:
        """The token ids from ``encode_with_images``."""
        encoded = self.encode_with_images(prompt)
        return None if encoded is None else encoded.ids

    def encode_with_images(self, prompt: Prompt) -> Encoded | None:
        """The token ids and the images' places in them; None if there are too many tokens, empty for an episode.

        Raises ``RunError`` for messages without a template, ``ConfigError`` for images without a processor, and
        ``DataError`` if the tokenizer, its template or the processor refuses the prompt.
        """
        if self._episodic:
            return Encoded(())
        if not isinstance(prompt.content, str) and self.tokenizer.chat_template is None:
            raise RunError(
                f"prompt {prompt.uid} is a chat, and the model's tokenizer has no chat template",
                location="data",
                hint="give prompts as text, or use a tokenizer with a chat template",
            )
        try:
            ids, images = self._encode(prompt)
        except ConfigError:
            raise
        except Exception as error:  # tokenizers can raise any exception
            reason = str(error) if isinstance(error, ChatError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"the prompt {prompt.uid!r} cannot be encoded: {reason}",
                location="data",
                hint=self._hint(prompt.content),
            ) from error
        if not ids:
            raise DataError(
                f"the prompt {prompt.uid!r} has no tokens", location="data", hint="fix the row or remove it"
            )
        return Encoded(tuple(ids), images) if len(ids) <= self._max_tokens else None

    def _encode(self, prompt: Prompt) -> tuple[list[int], tuple[PlacedImage, ...]]:
        messages, tools, variables = chat_of(prompt)
        text = str(prompt.content)
        templated = self.is_templated(prompt)
        if templated:
            text = self.template.with_variables(variables).text(messages, tools, reply=True)
            lost = self.template.abilities.lost
            if feature := next((feature for feature in _features(messages, tools) if feature in lost), None):
                raise ChatError(f"the row has {feature}, which the chat template does not show")
        elif tools or variables:
            column = "tools" if tools else VARIABLES
            raise ChatError(f"the row has `{column}`, and a prompt without the chat template has no use for them")
        if not isinstance(prompt.content, str) and (digests := image_digests(prompt.content)):
            images_by_digest = {image.digest: image for image in prompt.images}
            if missing_digest := next((digest for digest in digests if digest not in images_by_digest), ""):
                raise ChatError(f"its messages name the image {missing_digest!r:.80}, which is not one of its `images`")
            return self.tokenized(text, [images_by_digest[digest] for digest in digests])
        return self.tokenized(text, is_templated=templated)

    def tokenized(
        self, text: str, images: Sequence[Image] = (), *, is_templated: bool = True
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Tokenize a text, or a piece of one, with its images. ``is_templated``: the chat template wrote it."""
        if images:
            return self._images.encode(text, images)
        return self.template.encode([text])[0] if is_templated else plain_ids(self.tokenizer, [text])[0], ()

    def _hint(self, content: str | tuple[Message, ...]) -> str:
        first_role = None if isinstance(content, str) else content[0]["role"]
        if first_role == "system" and Feature.SYSTEM in self.template.abilities.lost:
            return "the template takes no system message: remove `system`, and put its text into the user's message"
        return "fix the row or remove it, or use another chat template (model.chat_template)"

    def is_templated(self, prompt: Prompt) -> bool:
        """True if the chat template renders this prompt."""
        return self._texts_are_chats or not isinstance(prompt.content, str)

    def special_text(self, prompt: Prompt) -> str:
        """The first special token in the prompt's messages or tools that stays text; "" if there is none."""
        messages, tools, _ = chat_of(prompt)
        return self.template.special_text(messages, tools) if self.is_templated(prompt) else ""

    def decode(self, ids: Iterable[int]) -> str:
        """A prompt's text, with special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def first_prompts(prompts: Sequence[Prompt], encoder: PromptEncoder) -> Iterator[tuple[int, ...]]:
    """Token ids of the first usable prompts, without images, in the data's order; nothing for episodes."""
    for row in range(min(len(prompts), FIRST_ROWS)):
        with suppress(DataError):  # ``PromptSource`` skips it with a warning
            if encoded := encoder.encode_with_images(prompts[row]):
                ids = list(encoded.ids)
                for placed_image in reversed(encoded.images):
                    del ids[placed_image.offset : placed_image.end]
                if ids:
                    yield tuple(ids)


def _features(messages: Sequence[Message], tools: Tools | None) -> list[Feature]:
    """The prompt's features that some templates drop without an error."""
    is_present = {
        Feature.USER: any(message["role"] == "user" for message in messages),
        Feature.TOOLS: bool(tools),
        Feature.SYSTEM: any(message["role"] == "system" for message in messages),
        Feature.CALLS: any(message.get("tool_calls") for message in messages),
        Feature.RESULTS: any(message["role"] == "tool" for message in messages),
    }
    is_present[Feature.ARGUMENTS] = is_present[Feature.CALLS]
    is_present[Feature.PARALLEL] = any(len(message.get("tool_calls") or ()) > 1 for message in messages)
    return [feature for feature, present in is_present.items() if present]
