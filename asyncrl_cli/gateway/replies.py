"""A model's reply: its tokens as reasoning, content and calls of tools, complete or while they are generated.

Unless ``task.special_tokens`` is ``shown``, a message has no special tokens but those that mark its parts. Of the
formats that asyncrl reads itself the marks are known; vLLM's parsers get a text with all special tokens, and in a
stream nothing is sent after the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from asyncrl_cli.gateway.parsers import (
    FORMS,
    HERMES,
    HERMES_MARKS,
    LAYOUTS,
    ToolCalls,
    Tools,
    tool_parser,
    vllm_reasoning_parser,
)
from asyncrl_cli.gateway.reply_stream import FieldStream, Form, divided
from asyncrl_cli.rollout.response_text import cut, special_tokens


class ReplyFormat:
    """How one model writes its replies."""

    def __init__(
        self,
        tokenizer: Any,
        tool_parser_name: str | None,
        reasoning_parser_name: str | None,
        *,
        end_tokens: frozenset[int],
        template_kwargs: Mapping[str, Any],
        prompt_end: Callable[[], str],
        shows_special: bool,
    ) -> None:
        """The arguments are ``ChatFormat``'s; ``prompt_end`` gives what the template puts before a reply.

        Raises ``ParserError``. A format that asyncrl does not read imports vLLM.
        """
        self._tokenizer = tokenizer
        self._ends = end_tokens
        self._tools = tool_parser(tool_parser_name, tokenizer, reasoning_parser_name is not None)
        self._reads_tools = tool_parser_name in (None, HERMES)
        self._calls = LAYOUTS.get(tool_parser_name or HERMES)
        self._named_form = FORMS.get(reasoning_parser_name or "")
        self._off = template_kwargs.get("enable_thinking") is False
        self._prompt_end = prompt_end
        self._reasoning = None
        if reasoning_parser_name is not None and self._named_form is None:
            self._reasoning = vllm_reasoning_parser(reasoning_parser_name, tokenizer, template_kwargs)
        self._special: dict[int, str] = {
            index: tokenizer.convert_ids_to_tokens(index) for index in special_tokens(tokenizer)
        }
        self._droppable = self._special.keys() & end_tokens if shows_special else self._special.keys()

    def parse(
        self, token_ids: Sequence[int], tools: Tools | None, stop: Sequence[str]
    ) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """A reply's reasoning, its content, and its calls: each a function's name and its arguments as JSON."""
        text = cut(self._decode(self._without(self._dropped(tools), token_ids)), stop)
        # What vLLM's parsers read.
        marked = cut(self._decode(self._ended(token_ids)), stop) if self._needs_vllm(tools) else text
        reasoning, form = "", self._form
        if self._reasoning is not None:
            reasoning, text = self._reasoning(marked)
            marked = text
        elif form is not None:
            reasoning, text = divided(text, form)
            marked = divided(marked, form)[1]
        found = self._tools(marked, tools) if tools else None
        return (reasoning, text, ()) if found is None else (reasoning, self._content(marked, found), found.calls)

    def stream(self, tools: Tools | None, stop: Sequence[str]) -> FieldStream:
        """Turns the tokens of a reply into parts of what ``parse`` gives."""
        dropped = self._dropped(tools)

        def readable(ids: Sequence[int]) -> tuple[Sequence[int], bool]:
            if not self._needs_vllm(tools):
                return self._without(dropped, ids), False
            first = next((at for at, token in enumerate(ids) if token in dropped or token in self._ends), len(ids))
            return ids[:first], first < len(ids)

        return FieldStream(
            self._decode,
            readable,
            stop,
            form=self._form,
            calls=self._calls if tools else (),
            held=self._reasoning is not None,
        )

    @property
    def _form(self) -> Form | None:
        """That of the reasoning in a reply; None when there is none, or when vLLM's parser reads it."""
        form = self._named_form
        return None if form is None or self._off or form.closed_in(self._prompt_end()) else form

    def _needs_vllm(self, tools: Tools | None) -> bool:
        return self._reasoning is not None or (bool(tools) and not self._reads_tools)

    def _dropped(self, tools: Tools | None) -> set[int]:
        """Special tokens to remove from a text: they mark none of its parts, and the task hides them."""
        marks = [*(self._form.marks if self._form else ()), *(HERMES_MARKS if tools and self._reads_tools else ())]
        return {token for token in self._droppable if self._special[token] not in marks}

    def _content(self, text: str, found: ToolCalls) -> str:
        """The content before calls, with all that a stream has sent of it: some parsers strip the spaces that it begins
        with, or drop it, if calls follow."""
        if self._calls is None:
            return found.content
        sent = cut(text, (*self._calls, *self._special.values())).rstrip()
        if found.content.startswith(sent):
            return found.content
        text = sent.lstrip()
        return sent.removesuffix(text) + found.content if found.content.startswith(text) else sent

    def _without(self, dropped: Collection[int], ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in dropped]

    def _ended(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self._ends else ids

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
