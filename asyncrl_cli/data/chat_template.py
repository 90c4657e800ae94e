"""The only path from messages and tools to a chat template's text: for prompts, demonstrations and the gateway.

Templates disagree about tool calls. Some iterate over the arguments, some join them to a text, some ask whether the
content is none, some take one call at a time. So ``ChatTemplate`` tries a template with short conversations, and then
uses the form of messages that the template shows completely (decision 0048).

Text in messages is text: special tokens inside it stay text, and a template's date is the spec's.

A template is a program that came with a model. ``tried`` first runs it in a child process with limits on time and
memory, and ``_Watch`` ends later renderings that take too long.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import resource
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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

RENDER_S = 2.0
"""Limit in CPU seconds for one rendering. A conversation of a million characters takes 0.1 s."""
TRY_S = 4.0
"""Limit in CPU seconds for trying a template, which takes 0.1 s; wall time may be eight times as long."""
MEMORY_BYTES = 2**30
"""Additional memory for trying a template, or for one rendering."""
LOOK_S = 0.25
"""Seconds between two checks of this process's renderings."""

NORMALIZED = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", "reasoning"})
UNUSED = frozenset({"refusal", "audio", "annotations", "function_call"})
"""Keys of OpenAI's replies that no template reads."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns for models that see or hear. Images that the model gets are in the messages instead."""
VARIABLES = "chat_template_kwargs"
"""The column, and the request key, with variables for the template."""
GIVEN = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "pad_token", "unk_token"),
    }
)
"""Variables that transformers itself passes to a chat template."""


class _Ended(BaseException):
    """``_Watch`` has ended the rendering. Not an ``Exception``, because code in between handles these."""


class _Watch:
    """Ends renderings in this process that take too long or too much memory.

    A thread checks them, and raises ``_Ended`` in the rendering thread. Python delivers it between two operations of
    the template. A single long operation is not interrupted; ``ChatTemplate.tried`` has refused such templates.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None
        self._limits: dict[int, tuple[float, int]] = {}
        """By rendering thread: limits on its CPU seconds, and on the process's peak memory in bytes."""

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Watch this thread in the block. Raises ``_Ended`` at a limit."""
        me = threading.get_ident()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="chat templates", daemon=True)
            self._thread.start()
        with self._lock:
            self._limits[me] = time.thread_time() + RENDER_S, _peak_bytes() + MEMORY_BYTES
            self._some.set()
        try:
            yield
        finally:
            with self._lock:
                ended = self._limits.pop(me, None) is None
            if ended:  # it may not have been delivered yet
                _raise_in(me, None)

    def _look(self) -> None:
        while self._some.wait():
            time.sleep(LOOK_S)
            with self._lock:
                for thread, (seconds, memory) in list(self._limits.items()):
                    if time.clock_gettime(time.pthread_getcpuclockid(thread)) > seconds or _peak_bytes() > memory:
                        del self._limits[thread]  # end it only once
                        _raise_in(thread, _Ended)
                if not self._limits:
                    self._some.clear()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in another thread; None: withdraw one that has not been delivered yet."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


class Feature(StrEnum):
    """A part of conversations that a template may be unable to show."""

    USER = "users' messages"
    NO_SYSTEM = "conversations without a system message"
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
    text_parts: bool = False
    """Content is a list of parts, as in models that also see."""
    lost: Mapping[Feature, str] = field(default_factory=dict)
    """Features that the template leaves out ("") or refuses (its error)."""
    default_system: str = ""
    """The system message that the template adds if there is none."""
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
            elif self.text_parts and isinstance(content, str):
                content = [{"type": "text", "text": content}]
            fitted.append({**message, "content": content} | ({"tool_calls": calls} if calls else {}))
        return fitted


class ChatTemplate:
    """A tokenizer's chat template and its variables, from ``model.chat_template_kwargs`` and a row or request."""

    watch = _Watch()

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
        self._known: tuple[object, Abilities] | None = None
        self._read: tuple[object, frozenset[str] | None] | None = None

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
        return self._rendered(self.abilities().fitted(messages), tools, reply, continues=continues)

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
        turn_tokens = self.abilities().turn_tokens if message["role"] == "assistant" else None
        return self._special if turn_tokens is None else special_tokens_of(turn_tokens)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with more variables. Raises ``ChatError`` for a variable that it does not read."""
        if not variables:
            return self
        known = self.variables() or frozenset()
        if unknown := next((name for name in variables if name not in known and name not in self.values), None):
            hint = f"it reads {', '.join(sorted(known))}" if known else "it reads no variables"
            raise ChatError(f"the chat template does not read {unknown!r}: {did_you_mean(unknown, known, hint)}")
        self.abilities()  # tried just once, with the model's own variables
        other = copy(self)
        if not self._reads_special:
            variables = self._special.mark(variables)
        other.values = {**self.values, **variables}
        return other

    def variables(self) -> frozenset[str] | None:
        """Return the variables that the template reads, except ``GIVEN``; None if they cannot be determined."""
        template = self._tokenizer.chat_template
        if self._read is None or self._read[0] != template:
            self._read = template, _variables_of(self._tokenizer)
        return self._read[1]

    def abilities(self) -> Abilities:
        """Try the template, once. Raises ``TemplateLimitError``."""
        template = self._tokenizer.chat_template
        if self._known is None or self._known[0] != template:
            self._known = template, self._found()
        return self._known[1]

    def tried(self) -> Abilities:
        """Try the template in a child process, which is killed at its limits. Raises ``ChatError``.

        Call this before any other use of an unknown template: compiling it may already take all memory.
        """
        self._known = self._tokenizer.chat_template, _in_child(self)
        return self._known[1]

    def _canonical(self, message: Message) -> Message:
        same = normalized(message)
        if same["role"] == "developer" and "developer" not in str(self._tokenizer.chat_template):
            same = {**same, "role": "system"}  # otherwise a template that does not know the role drops the message
        known = NORMALIZED | UNUSED
        others = {key: value for key, value in message.items() if key not in known and value is not None}
        return {**same, **others} if others else same

    def _rendered(
        self, messages: Sequence[Message], tools: Tools | None, reply: bool, *, continues: bool = False
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise ChatError("the model has no chat template; give it one with model.chat_template")
        try:
            with self.watch.limited():
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
        except (_Ended, MemoryError):
            limits = f"{RENDER_S:.0f} s or {MEMORY_BYTES >> 30} GiB"
            message = f"the chat template takes more than {limits} to render these messages"
            raise TemplateLimitError(message) from None
        except Exception as error:  # a template may raise anything
            if continues and "continue_final_message" in str(error):
                raise ChatError("the chat template changes the assistant message that it should continue") from error
            raise ChatError(f"the chat template refuses these messages or tools: {error}") from error

    def _turn_tokens(self, texts: Sequence[Message], calls: Sequence[Message], results: int) -> frozenset[str] | None:
        """The special tokens around the ``texts``, and after the ``calls`` of tools, which end with ``results``."""
        try:
            rendering = self._rendered(texts, None, reply=False)
            if results:
                through = self._rendered(calls[:-results], None, reply=False)
                rendering += self._rendered(calls, None, reply=False).removeprefix(through)
        except ChatError:
            return None
        always = {getattr(self._tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad")}
        return frozenset(token for token in special_texts(self._tokenizer) if token in always or token in rendering)

    def _found(self) -> Abilities:
        lost: dict[Feature, str] = {}

        def text(messages: Sequence[Message], tools: Tools | None = None) -> str:
            return self._rendered([*first, *messages], tools, reply=True)

        def shown(feature: Feature, messages: Sequence[Message], *marks: str, tools: Tools | None = None) -> bool:
            """Return True if the template shows the marks. Keeps in ``lost`` the first reason why it does not."""
            try:
                rendered = text(messages, tools)
            except TemplateLimitError:
                raise
            except ChatError as error:
                lost.setdefault(feature, str(error.__cause__))
                return False
            if complete := all(mark in rendered for mark in marks):
                lost.pop(feature, None)
            else:
                lost.setdefault(feature, "")
            return complete

        first: list[Message] = []
        base = Abilities()
        if not shown(Feature.USER, [_USER], _USER["content"]):
            parts = Abilities(text_parts=True)
            if shown(Feature.USER, parts.fitted([_USER]), _USER["content"]):
                base = parts
        shown(Feature.SYSTEM, base.fitted([_SYSTEM, _USER]), _SYSTEM["content"])
        if Feature.USER in lost and Feature.SYSTEM not in lost:
            first, lost[Feature.NO_SYSTEM] = [_SYSTEM], lost[Feature.USER]
            shown(Feature.USER, [_USER], _USER["content"])
        shown(Feature.TOOLS, base.fitted([_USER]), _TOOL["function"]["name"], tools=[_TOOL])

        def called(
            form: Abilities, *calls: Message, results: int = 1, content: str = "", reasoning: str = ""
        ) -> list[Message]:
            reply = {"role": "assistant", "content": content, "tool_calls": list(calls)}
            if reasoning:
                reply |= {"reasoning_content": reasoning, "reasoning": reasoning}
            return form.fitted([_USER, reply, *_RESULTS[:results]])

        def written(form: Abilities) -> bool:
            """True if the arguments are written as JSON, or value by value."""
            arguments = _CALLS[0]["function"]["arguments"]
            rendered = text(called(form, _CALLS[0]))
            return str(arguments) not in rendered and (not form.text_arguments or _as_text(arguments) in rendered)

        name, (value, other) = _CALLS[0]["function"]["name"], _VALUES
        forms = [
            replace(base, text_arguments=text_arguments, null_content=null_content)
            for null_content, text_arguments in product((False, True), repeat=2)
        ]
        for form in forms:
            if shown(Feature.CALLS, called(form, _CALLS[0]), name, value) and written(form):
                break
        else:
            form = next((form for form in forms if shown(Feature.CALLS, called(form, _CALLS[0]), name)), forms[0])
            if Feature.CALLS not in lost:
                lost[Feature.ARGUMENTS] = ""
        results = [result["content"] for result in _RESULTS]
        if not shown(Feature.RESULTS, called(form, _CALLS[0]), results[0]):
            results = []
        if Feature.CALLS not in lost:
            marks = ([] if Feature.ARGUMENTS in lost else [value, other]) + results
            if not shown(Feature.PARALLEL, called(form, *_CALLS, results=2), *marks):
                form = replace(form, one_call=True)
                shown(Feature.PARALLEL, called(form, *_CALLS, results=2), *marks)
            marks = [name, _TEXT]
            if not shown(Feature.TEXT, called(form, _CALLS[0], content=_TEXT), *marks):
                separate = replace(form, separate_text=True)
                if shown(Feature.TEXT, called(separate, _CALLS[0], content=_TEXT), *marks):
                    form = separate
            shown(Feature.REASONING, called(form, _CALLS[0], reasoning=_REASONING), _REASONING)
        system = [_SYSTEM] if first or Feature.SYSTEM not in lost else []
        texts = base.fitted([*system, _USER, {"role": "assistant", "content": _TEXT}, _USER])
        turn_tokens = self._turn_tokens(texts, [*first, *called(form, _CALLS[0])], len(results[:1]))
        default = ""
        if not lost.keys() & {Feature.USER, Feature.NO_SYSTEM, Feature.SYSTEM}:
            plain = text(base.fitted([_USER]))
            begin, _, end = text(base.fitted([_SYSTEM, _USER])).partition(_SYSTEM["content"])
            if begin and plain.startswith(begin) and plain.endswith(end):
                default = plain[len(begin) : len(plain) - len(end)]  # the text in place of a system message
        return replace(form, lost=lost, default_system=default, turn_tokens=turn_tokens)


class TemplateLimitError(ChatError):
    """A template takes too long, or too much memory."""


def syntax_tree(template: str) -> Any:
    """Parse a chat template without compiling it. Raises ``jinja2.TemplateSyntaxError``."""
    from jinja2 import Environment

    # `generation` is transformers' own tag, which marks an assistant's tokens.
    text = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)


def _variables_of(tokenizer: Any) -> frozenset[str] | None:
    from jinja2 import TemplateError, meta, nodes

    if tokenizer.chat_template is None:
        return frozenset()
    try:
        tree = syntax_tree(tokenizer.get_chat_template())
        # Jinja counts a variable as undeclared even if a branch of the template sets it.
        own = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
        return frozenset(meta.find_undeclared_variables(tree)) - own - GIVEN
    except TemplateError:
        return None


def _check_constants(template: str) -> None:
    """Raise ``MemoryError`` if a template's constant, such as ``"x" * 10**10``, does not fit into memory: Jinja
    computes it when it compiles the template, even in a branch that is never taken."""
    from jinja2 import TemplateSyntaxError, nodes

    try:
        expressions = syntax_tree(template).find_all(nodes.Expr)
    except TemplateSyntaxError:
        return  # rendering reports it
    for expression in expressions:
        try:
            expression.as_const()
        except nodes.Impossible as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from None


def chat_of(prompt: Prompt) -> tuple[tuple[Message, ...], Tools | None, Mapping[str, Any]]:
    """Return a prompt's messages, and its row's tools and template variables.

    Raises ``ChatError`` for a row with media, and for malformed calls, tools and variables.
    """
    messages = prompt.messages
    for message_number, message in enumerate(messages, start=1):
        try:
            calls = normalized(message).get("tool_calls", ())
        except ChatError as error:
            raise ChatError(f"message {message_number}: {error}") from None
        for function in (call["function"] for call in calls):
            if not isinstance(arguments := function["arguments"], Mapping | str):
                fault = f"message {message_number} calls {function['name']!r} with arguments of type"
                raise ChatError(f'{fault} {type(arguments).__name__}, not an object such as {{"city": "Oslo"}}')

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
    named = "name it in the split's `image_column` (and set model.max_images), " if column.startswith("image") else ""
    return f"{named}remove the column, or rename it if only the task reads it"


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _separated(messages: Sequence[Message], texts: bool, calls: bool) -> list[Message]:
    """Put the text before tool calls into its own message (``texts``), and each call with its result into its own
    messages (``calls``). A result has the call's id, or else its place among the results."""
    separated: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        wanted = message.get("tool_calls") or ()
        if texts and wanted and message["content"]:
            separated.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "content": "", "tool_calls": wanted}
        if not calls or len(wanted) < 2:
            separated.append(message)
            continue
        count = next((at for at, one in enumerate(rest) if one["role"] != "tool"), len(rest))
        results, rest = rest[:count], rest[count:]
        for call in wanted:
            separated.append({**message, "tool_calls": [call]})
            message = {"role": message["role"], "content": ""}
            own = next((at for at, one in enumerate(results) if one.get("tool_call_id") == call.get("id")), 0)
            separated += results[own : own + 1]
            del results[own : own + 1]
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


def _in_child(template: ChatTemplate) -> Abilities:
    """Find a template's abilities in a child process with limits. It is forked, because importing transformers again
    would take seconds. The child runs only the template, and uses no lock that another thread may have held."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            ChatTemplate.watch = _Watch()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            for kind, limit in (
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_CPU, int(TRY_S)),
                (resource.RLIMIT_AS, used + MEMORY_BYTES),
            ):
                hard = resource.getrlimit(kind)[1]
                resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
            try:
                _check_constants(template._tokenizer.get_chat_template())
                os.write(writer, pickle.dumps(template._found()))
            except ChatError as error:
                os.write(writer, pickle.dumps(str(error)))  # a MemoryError ends the child without an answer
        finally:
            os._exit(0)
    os.close(writer)
    found: Abilities | str | None = None
    try:
        with os.fdopen(reader, "rb") as answer:
            ready, _, _ = select.select([answer], [], [], 8 * TRY_S)
            if ready:
                found = pickle.load(answer)
    except (EOFError, pickle.UnpicklingError):
        pass  # the kernel ended the child at a limit
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if isinstance(found, Abilities):
        return found
    limits = f"{TRY_S:.0f} s of CPU time or {MEMORY_BYTES >> 30} GiB of memory"
    raise TemplateLimitError(found or f"the chat template takes more than {limits} to render a short conversation")
