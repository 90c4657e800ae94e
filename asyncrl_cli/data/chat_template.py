"""The only path from messages and tools to a chat template's text: for prompts, demonstrations and the gateway.

Templates disagree about tool calls. Some iterate over the arguments, some join them to a text, some ask whether the
content is none, some take one call at a time. So ``ChatTemplate`` tries a template with short conversations, and then
uses the form of messages that the template shows completely (decision 0048).

Text in messages is text: special tokens inside it stay text, and a template's date is the spec's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import date
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import Any

from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.data.special_tokens import MARK, SpecialTokens, ignoring_marks, special_texts, special_tokens_of
from asyncrl_cli.records.prompt import ChatError, Message, Prompt, normalized
from asyncrl_cli.spec.inputs import TEMPLATE_DATE
from asyncrl_cli.spec.sections import ExperimentSpec

Tools = Sequence[Mapping[str, Any]]

NORMALIZED = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", "reasoning"})
UNUSED = frozenset({"refusal", "audio", "annotations", "function_call"})
"""Keys of OpenAI's replies that no template reads."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns for models that see or hear. Images that the model gets are in the messages instead."""
VARIABLES = "chat_template_kwargs"
"""The column, and the request key, with variables for the template."""
STANDARD_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "pad_token", "unk_token"),
    }
)
"""Variables that transformers itself passes to a chat template."""


class Feature(StrEnum):
    """A part of conversations that a template may be unable to show."""

    USER = "users' messages"
    SYSTEM = "system messages"
    TOOLS = "tools"
    CALLS = "tool calls"
    ARGUMENTS = "the arguments of tool calls"
    PARALLEL = "several tool calls in one message"
    TEXT = "text next to tool calls"
    RESULTS = "tool results"
    REASONING = "reasoning next to tool calls"


@dataclass(frozen=True, slots=True)
class Abilities:
    """The form of messages that suits a template, and the features that it shows in no form."""

    text_arguments: bool = False
    """Arguments of tool calls are JSON text, not objects."""
    null_content: bool = False
    """A message with tool calls has the content None."""
    one_call: bool = False
    """A message has at most one tool call. Further calls, each with its result, follow as messages."""
    separate_text: bool = False
    """Text next to tool calls is a separate message before them."""
    lost: Mapping[Feature, str] = field(default_factory=dict)
    """Features that the template leaves out ("") or refuses (its error)."""
    turn_tokens: frozenset[str] | None = field(default=None, compare=False)
    """The special tokens that structure turns, so an assistant message cannot have them either; None: all."""

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Convert canonical messages to this form."""
        if self.separate_text or self.one_call:
            messages = _separated(messages, self.separate_text, self.one_call)
        fitted: list[Message] = []
        for message in messages:
            calls, content = message.get("tool_calls"), message["content"]
            if calls and self.text_arguments:
                calls = [
                    {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
                    for call in calls
                ]
            if calls and self.null_content and not content:
                content = None
            fitted.append({**message, "content": content} | ({"tool_calls": calls} if calls else {}))
        return fitted


class ChatTemplate:
    """A tokenizer's chat template and its variables, from ``model.chat_template_kwargs`` and a row or request."""

    def __init__(
        self,
        tokenizer: Any,
        variables: Mapping[str, Any] | None = None,
        *,
        today: date = TEMPLATE_DATE,
        reads_special: bool = False,
    ) -> None:
        """``today``: the date for templates that write one. ``reads_special``: special tokens in messages are tokens
        (``data.special_tokens``)."""
        self._tokenizer = tokenizer
        self.values: Mapping[str, Any] = variables or {}
        self._today = today
        self._reads_special = reads_special

    @classmethod
    def from_spec(cls, spec: ExperimentSpec, tokenizer: Any) -> ChatTemplate:
        """The template of a run's model."""
        return cls(
            tokenizer,
            spec.model.chat_template_kwargs,
            today=spec.model.chat_template_date,
            reads_special=spec.data.special_tokens == "tokens",
        )

    def text(self, messages: Sequence[Message], tools: Tools | None = None, reply: bool = False) -> str:
        """Render messages. With ``reply``, end where the model's reply begins, or after the last character of a final
        assistant message, which the reply then continues. Special tokens in messages and tools are marked, so tokenize
        the text with ``encode``.

        Raises ``ChatError`` for malformed messages, for messages that the template refuses, and with ``reply`` for a
        final assistant message without text or with tool calls.
        """
        messages = [self._canonical(message) for message in messages]
        last = messages[-1] if messages else {}
        continues = reply and last.get("role") == "assistant"
        if continues and (last.get("tool_calls") or not str(last["content"]).strip()):
            raise ChatError("the assistant message at the end has tool calls, or no text that could be continued")
        if not self._reads_special:
            tools = self._special.mark(tools)
            messages = [self._special_in(message).mark(message) for message in messages]
        return self._rendered(self.abilities.fitted(messages), tools, reply, continues=continues)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize renderings, or parts of them. Raises ``ChatError`` if the tokenizer cannot write a special token as
        text."""
        tokenizer = self._ignoring_marks if any(MARK in text for text in texts) else self._tokenizer
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    def special_text(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """Return the first special token that stays text in messages or tools; "" if there is none."""
        if self._reads_special:
            return ""
        tokens = (self._special_in(message).find(message) for message in map(self._canonical, messages))
        return next(filter(None, tokens), "") or self._special.find(tools)

    @cached_property
    def _special(self) -> SpecialTokens:
        return special_tokens_of(special_texts(self._tokenizer))

    @cached_property
    def _ignoring_marks(self) -> Any:
        return ignoring_marks(self._tokenizer)

    def _special_in(self, message: Message) -> SpecialTokens:
        """The special tokens that stay text in a message. A model may write any token, so its messages may have those
        that do not structure turns, such as marks around reasoning."""
        turn_tokens = self.abilities.turn_tokens if message["role"] == "assistant" else None
        return self._special if turn_tokens is None else special_tokens_of(turn_tokens)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with more variables. Raises ``ChatError`` for a variable that it does not read."""
        if not variables:
            return self
        if unread := self.unread_variable(variables.keys() - self.values.keys()):
            raise ChatError(f"the chat template does not read {unread[0]!r}: {unread[1]}")
        _ = self.abilities  # tried just once, with the model's own variables
        template = copy(self)
        if not self._reads_special:
            variables = self._special.mark(variables)
        template.values = {**self.values, **variables}
        return template

    def unread_variable(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Return one of ``names`` that the template does not read, and a hint. Jinja ignores such variables."""
        known_names = self.variables
        unread = min((name for name in names if known_names is not None and name not in known_names), default=None)
        if unread is None or known_names is None:
            return None
        hint = f"it reads {', '.join(sorted(known_names))}" if known_names else "remove it: the template reads none"
        return unread, did_you_mean(unread, known_names, hint)

    @cached_property
    def variables(self) -> frozenset[str] | None:
        """The variables that the template reads, except ``STANDARD_VARIABLES``; None if they cannot be determined."""
        from jinja2 import TemplateError, meta, nodes

        if self._tokenizer.chat_template is None:
            return frozenset()
        try:
            tree = syntax_tree(self._tokenizer.get_chat_template())
            # Jinja counts a variable as undeclared even if a branch of the template sets it.
            assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
            return frozenset(meta.find_undeclared_variables(tree)) - assigned - STANDARD_VARIABLES
        except TemplateError:
            return None

    @cached_property
    def abilities(self) -> Abilities:
        """What the template can show. Found by trying it."""
        return _Trial(self).abilities()

    def _canonical(self, message: Message) -> Message:
        canonical = normalized(message)
        if canonical["role"] == "developer" and "developer" not in str(self._tokenizer.chat_template):
            canonical = {**canonical, "role": "system"}  # otherwise a template that does not know the role drops it
        known_keys = NORMALIZED | UNUSED
        extra = {key: value for key, value in message.items() if key not in known_keys and value is not None}
        return {**canonical, **extra} if extra else canonical

    def _rendered(
        self, messages: Sequence[Message], tools: Tools | None, reply: bool, *, continues: bool = False
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise ChatError("the model has no chat template; give it one with model.chat_template")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    add_generation_prompt=reply and not continues,
                    continue_final_message=continues,
                    tokenize=False,
                    strftime_now=self._today.strftime,
                    **self.values,
                )
            )
        except Exception as error:  # a template may raise anything
            if continues and "continue_final_message" in str(error):
                raise ChatError("the chat template changes the assistant message that it should continue") from error
            raise ChatError(f"the chat template refuses these messages or tools: {error}") from error


class _Trial:
    """Renders short conversations, and finds the form of messages that a template shows completely."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._lost: dict[Feature, str] = {}

    def abilities(self) -> Abilities:
        self._shows(Feature.USER, [_USER], _USER["content"])
        self._shows(Feature.SYSTEM, [_SYSTEM, _USER], _SYSTEM["content"])
        self._shows(Feature.TOOLS, [_USER], _TOOL["function"]["name"], tools=[_TOOL])
        form = self._form_of_calls()
        shows_results = self._shows(Feature.RESULTS, _called(form, _CALLS[0]), _RESULTS[0]["content"])
        if Feature.CALLS not in self._lost:
            form = self._form_beside_calls(form, shows_results)
        system = [_SYSTEM] if Feature.SYSTEM not in self._lost else []
        texts = [*system, _USER, {"role": "assistant", "content": _TEXT}, _USER]
        turn_tokens = self._turn_tokens(texts, _called(form, _CALLS[0]), int(shows_results))
        return replace(form, lost=self._lost, turn_tokens=turn_tokens)

    def _form_of_calls(self) -> Abilities:
        """The form in which the template shows a call with its arguments, or else at least the call's name."""
        name, argument = _CALLS[0]["function"]["name"], _VALUES[0]
        forms = [
            Abilities(text_arguments=text_arguments, null_content=null_content)
            for null_content, text_arguments in product((False, True), repeat=2)
        ]
        for form in forms:
            if self._shows(Feature.CALLS, _called(form, _CALLS[0]), name, argument) and self._writes_json(form):
                return form
        form = next((form for form in forms if self._shows(Feature.CALLS, _called(form, _CALLS[0]), name)), forms[0])
        if Feature.CALLS not in self._lost:
            self._lost[Feature.ARGUMENTS] = ""
        return form

    def _form_beside_calls(self, form: Abilities, shows_results: bool) -> Abilities:
        """The form of messages with several calls, and with text next to a call."""
        marks = [] if Feature.ARGUMENTS in self._lost else list(_VALUES)
        marks += [result["content"] for result in _RESULTS] if shows_results else []
        if not self._shows(Feature.PARALLEL, _called(form, *_CALLS, results=2), *marks):
            form = replace(form, one_call=True)
            self._shows(Feature.PARALLEL, _called(form, *_CALLS, results=2), *marks)
        marks = [_CALLS[0]["function"]["name"], _TEXT]
        if not self._shows(Feature.TEXT, _called(form, _CALLS[0], content=_TEXT), *marks):
            separate = replace(form, separate_text=True)
            if self._shows(Feature.TEXT, _called(separate, _CALLS[0], content=_TEXT), *marks):
                form = separate
        self._shows(Feature.REASONING, _called(form, _CALLS[0], reasoning=_REASONING), _REASONING)
        return form

    def _shows(self, feature: Feature, messages: Sequence[Message], *marks: str, tools: Tools | None = None) -> bool:
        """Return True if the template shows the marks. Keeps in ``_lost`` the first reason why it does not."""
        try:
            rendered = self._template._rendered(messages, tools, reply=True)
        except ChatError as error:
            self._lost.setdefault(feature, str(error.__cause__))
            return False
        if complete := all(mark in rendered for mark in marks):
            self._lost.pop(feature, None)
        else:
            self._lost.setdefault(feature, "")
        return complete

    def _writes_json(self, form: Abilities) -> bool:
        """True if the arguments are written as JSON, or value by value, and not as Python prints them."""
        arguments = _CALLS[0]["function"]["arguments"]
        rendered = self._template._rendered(_called(form, _CALLS[0]), None, reply=True)
        return str(arguments) not in rendered and (not form.text_arguments or _as_text(arguments) in rendered)

    def _turn_tokens(self, texts: Sequence[Message], calls: Sequence[Message], results: int) -> frozenset[str] | None:
        """The special tokens around the ``texts``, and after the ``calls`` of tools, which end with ``results``."""
        template, tokenizer = self._template, self._template._tokenizer
        try:
            rendering = template._rendered(texts, None, reply=False)
            if results:
                through = template._rendered(calls[:-results], None, reply=False)
                rendering += template._rendered(calls, None, reply=False).removeprefix(through)
        except ChatError:
            return None
        always = {getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad")}
        return frozenset(token for token in special_texts(tokenizer) if token in always or token in rendering)


def _called(
    form: Abilities, *calls: Mapping[str, Any], results: int = 1, content: str = "", reasoning: str = ""
) -> list[Message]:
    """A conversation with tool calls and ``results``, in a form."""
    reply: Message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    if reasoning:
        reply = {**reply, "reasoning_content": reasoning, "reasoning": reasoning}
    return form.fitted([_USER, reply, *_RESULTS[:results]])


def syntax_tree(template: str) -> Any:
    """Parse a chat template without compiling it. Raises ``jinja2.TemplateSyntaxError``."""
    from jinja2 import Environment

    # `generation` is transformers' own tag, which marks an assistant's tokens.
    text = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)


def chat_of(prompt: Prompt) -> tuple[tuple[Message, ...], Tools | None, Mapping[str, Any]]:
    """Return a prompt's messages, and its row's tools and template variables.

    Raises ``ChatError`` for a row with media, and for malformed tools and variables.
    """
    messages = prompt.messages

    def unwritten(column: str) -> Any:
        """The column's value, which may be JSON text; None if it is empty, or already in the prompt's text."""
        value = prompt.fields.get(column)
        if value in (None, "", "[]") or any(str(value) in str(message.get("content")) for message in messages):
            return None
        if isinstance(value, str) and column not in MEDIA:
            with suppress(ValueError):
                return json.loads(value)
        return value

    for column in MEDIA:
        if unwritten(column):
            raise ChatError(f"the row has `{column}`, which the model does not get: {media_hint(column)}")
    tools = unwritten("tools")
    if tools and not (isinstance(tools, (list, tuple)) and all(map(_is_tool, tools))):
        raise ChatError(
            'the row\'s `tools` are not definitions such as {"type": "function", "function": {"name": "…"}}: correct '
            "them, or rename the column if only the task reads it"
        )
    variables = unwritten(VARIABLES) or {}
    if not isinstance(variables, Mapping):
        raise ChatError(
            f'the row\'s `{VARIABLES}` are not an object such as {{"enable_thinking": false}}: correct them, or rename '
            "the column if only the task reads it"
        )
    return messages, tools or None, variables


def media_hint(column: str) -> str:
    """Return the hint for a column in ``MEDIA``."""
    naming = "name it in the split's `image_column` (and set model.max_images), " if column.startswith("image") else ""
    return f"{naming}remove the column, or rename it if only the task reads it"


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _separated(messages: Sequence[Message], texts: bool, calls: bool) -> list[Message]:
    """Put the text before tool calls into its own message (``texts``), and each call with its result into its own
    messages (``calls``). A result has the call's id, or else its place among the results."""
    separated: list[Message] = []
    queue = list(messages)
    while queue:
        message = queue.pop(0)
        tool_calls = message.get("tool_calls") or ()
        if texts and tool_calls and message["content"]:
            separated.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "content": "", "tool_calls": tool_calls}
        if not calls or len(tool_calls) < 2:
            separated.append(message)
            continue
        result_count = next((index for index, m in enumerate(queue) if m["role"] != "tool"), len(queue))
        results, queue = queue[:result_count], queue[result_count:]
        for call in tool_calls:
            separated.append({**message, "tool_calls": [call]})
            message = {"role": message["role"], "content": ""}
            matching = (index for index, r in enumerate(results) if r.get("tool_call_id") == call.get("id"))
            index = next(matching, 0)
            separated += results[index : index + 1]
            del results[index : index + 1]
        separated += results
    return separated


# -- conversations to try a template with; no mark contains another, and templates do not trim them

_VALUES = ("Reykjavik", "Ouagadougou")
_TEXT = "first-some-words"
_REASONING = "thus-it-was-thought"
_SYSTEM: Message = {"role": "system", "content": "the-rules-of-the-house"}
_USER: Message = {"role": "user", "content": "the-question-of-a-user"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "describe_animal",
        "description": "Describe an animal.",
        "parameters": {"type": "object", "properties": {"animal": {"type": "string", "description": "Its name."}}},
    },
}
# The strictest templates require ids of nine letters and digits.
_CALLS: list[dict[str, Any]] = [
    {"id": f"call0000{number}", "type": "function", "function": {"name": "find_city", "arguments": {"city": value}}}
    for number, value in enumerate(_VALUES)
]
_RESULTS: list[Message] = [
    {"role": "tool", "name": "find_city", "tool_call_id": call["id"], "content": content}
    for call, content in zip(_CALLS, ("the-harbour-is-cold", "the-market-is-warm"), strict=True)
]
