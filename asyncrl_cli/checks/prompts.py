"""Checks of prompts and chat template before a run starts. Each check returns its result, or raises ``UserError``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from typing import Any

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.core.errors import ConfigError, DataError, UserError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.data.chat_template import ChatTemplate, Feature, chat_of
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.supervised_rows import DATA, RowEncoder, Rows, encode_row
from asyncrl_cli.data.tokenizer import templates_texts
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.records.prompt import ChatError, Prompt
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.tasks.tools import call_message, result_message

SPREAD = 1000
"""Number of evenly spread prompts in one pass over a split. A pass may be cut short by the time limit."""
ENOUGH = 100
"""A split is refused if at least this many prompts were tried and none can be used, even if others were not tried."""
SHOWN_CHARACTERS = 1000
"""Largest number of characters of a prompt's beginning in a message."""
FIELD_CHARACTERS = 60
"""Largest number of characters of a field in a message: its name and the beginning of its value."""
SHOWN_END = 200
"""Largest number of characters of a long prompt's end in a message."""
REPLY = "The answer is four."
"""An example reply, to find out how the chat template ends a reply."""
SPECIAL_HINT = (
    "set data.special_tokens: tokens if messages have the model's own tokens, or data.apply_chat_template: false if "
    "prompts already have all of the template's tokens"
)


def check_prompts(
    prompts: Sequence[Prompt], encoder: PromptEncoder, location: str, limit_s: float, locate: Callable[[int], str]
) -> Result:
    """Check that prompts can be encoded, and are short enough.

    Tries all prompts, or as many evenly spread ones as ``limit_s`` seconds allow. The number depends on the machine's
    load, so a prompt that a run would skip is only a warning. ``locate`` gives the location of a row, counted from 0.
    Raises ``DataError`` if every prompt tried (``ENOUGH``, or all) is skipped, and ``RunError`` for a chat without a
    template.
    """
    tried_count = long_count = 0
    special: list[str] = []
    unusable: list[tuple[int, DataError]] = []
    start_s = time.monotonic()
    for row in _tried_rows(len(prompts), limit_s):
        try:
            prompt = prompts[row]
            long_count += encoder.encode(prompt) is None
            special += filter(None, [encoder.special_text(prompt)])
        except DataError as error:
            unusable.append((row, error))
        except UserError as error:
            error.location = location
            raise
        tried_count += 1
    summary = f"{len(prompts):,} prompts"
    if tried_count < len(prompts):
        summary += f", {tried_count:,} of them tried in {time.monotonic() - start_s:.1f} s"
    if long_count + len(unusable) == tried_count and tried_count >= min(ENOUGH, len(prompts)):
        if unusable:
            row, fault = unusable[0]
            message = f"none of {tried_count:,} prompts tried can be used: {fault.message}"
            raise DataError(message, location=locate(row), hint=fault.hint)
        raise DataError(
            f"every prompt tried is longer than rollout.max_prompt_tokens: {tried_count:,} of {len(prompts):,}",
            location=location,
            hint="raise rollout.max_prompt_tokens, or shorten the prompts",
        )
    hints = []
    if long_count:
        summary += f"; {long_count:,} are longer than rollout.max_prompt_tokens and skipped"
        hints.append("raise rollout.max_prompt_tokens")
    if special:
        summary += f"; {counted(len(special), 'row')} with special tokens, such as {special[0]!r}, which stay text"
        hints.append(SPECIAL_HINT)
    if unusable:
        row, fault = unusable[0]
        summary += f"; {len(unusable):,} cannot be used and are skipped, such as {locate(row)}: {fault.message}"
        hints.append(fault.hint)
    return Warned(summary, "; ".join(hints)) if hints else summary


def check_rows(rows: Rows, encoder: RowEncoder, spec: ExperimentSpec, limit_s: float) -> Result:
    """Check that the rows of ``model.warm_start.data`` have replies that can be encoded and fit
    ``rollout.max_response_tokens``. Tries as many rows as ``check_prompts``.

    Raises ``DataError`` for a row that cannot be encoded, with its location, and if all rows tried are too long.
    """
    tried_count = long_count = max_reply = 0
    for index in _tried_rows(len(rows.prompts), limit_s):
        row = encode_row(rows, index, encoder)
        replies = (len(list(tokens)) for is_learned, tokens in groupby(row.learned) if is_learned)
        max_reply = max(max_reply, *replies)
        tried_count += 1
        long_count += len(row.ids) > spec.model.max_length
    summary = f"{len(rows.prompts):,} rows, {tried_count:,} of them tried, replies of up to {max_reply:,} tokens"
    if long_count:
        summary += f"; {long_count:,} are longer than model.max_length and skipped"
    if long_count == tried_count >= min(ENOUGH, len(rows.prompts)):
        raise DataError(summary, location=DATA, hint="raise model.max_length")
    if max_reply > spec.rollout.max_response_tokens:
        return Warned(summary, f"raise rollout.max_response_tokens to {max_reply:,}")
    return summary


def shown_prompt(prompts: Sequence[Prompt], encoder: PromptEncoder) -> Result:
    """Show the first prompt in the model's form: the number of tokens, their text with special tokens and line breaks,
    images, the row's template variables, and the fields for the task.

    Warns of special tokens that stay text.
    """
    try:
        prompt = prompts[0]
        encoded = encoder.encode_with_images(prompt)
    except DataError as error:
        return Warned(f"it is skipped: {error.message}", error.hint)
    if encoded is None:
        return f"prompt {prompt.uid} is too long"
    ids = encoded.ids
    messages, tools, variables = chat_of(prompt)
    text = encoder.decode(ids)
    form = "by the chat template" if encoder.is_templated(prompt) else "plain text"
    summary = f"{len(ids)} tokens, {form}: {json.dumps(text[:SHOWN_CHARACTERS], ensure_ascii=False)}"
    if len(text) > SHOWN_CHARACTERS:  # the end is where the reply begins
        end = json.dumps(text[SHOWN_CHARACTERS:][-SHOWN_END:], ensure_ascii=False)
        summary += f" … {end} ({len(text):,} characters)"
    if tools:
        summary += f"\ntools: {', '.join(str(tool['function']['name']) for tool in tools)}"
    for image_number, image in enumerate(encoded.images, start=1):
        width, height = image.image.decoded().size
        summary += f"\nimage {image_number}: {width} x {height} pixels, {image.length} tokens, {image.image.digest}"
    if messages[-1]["role"] == "assistant":
        summary += "\nthe response continues the assistant message at the end"
    fields = {name: value for name, value in prompt.fields.items() if not tools or name != "tools"}
    for name, values in (("variables of the row", variables), ("fields for the task", fields)):
        texts = [f"{key} {json.dumps(value, ensure_ascii=False, default=dict)}" for key, value in values.items()]
        if texts:
            shortened = (t if len(t) <= FIELD_CHARACTERS else f"{t[: FIELD_CHARACTERS - 1]}…" for t in texts)
            summary += f"\n{name}: {', '.join(shortened)}"
    if special := encoder.special_text(prompt):
        return Warned(f"{special!r} in the row stays text; {summary}", SPECIAL_HINT)
    return summary


def check_template(
    template: ChatTemplate, tokenizer: Any, *, episodic: bool, reasoning: bool, required: bool = True
) -> Result:
    """Check that the chat template shows all parts of a conversation.

    ``episodic``: conversations have several turns; a part that the template leaves out is a warning. In single prompts
    ``PromptEncoder`` refuses each row that has such a part. ``reasoning``: replies may have reasoning. ``required``:
    prompts go through the template. Raises ``ConfigError`` for a template that cannot be used.
    """
    if tokenizer.chat_template is None and not episodic:
        return ""
    try:
        trial = template.abilities
        if required and Feature.USER in trial.lost:
            raise ChatError(f"the chat template does not show a user's message{_because(trial.lost[Feature.USER])}")
    except ChatError as error:
        hint = "give a file with a Jinja template, or leave it out to use the tokenizer's own"
        raise ConfigError(str(error), location="model.chat_template", hint=hint) from None
    notes = []
    if episodic:
        hello = template.text([{"role": "user", "content": "Hello"}], reply=True)
        notes.append(json.dumps(hello, ensure_ascii=False))
    lost = []
    if templates_texts(tokenizer):  # models with the built-in template learn from demonstrations
        lost = [
            f"{feature}{_because(why)}"
            for feature, why in trial.lost.items()
            if reasoning or feature is not Feature.REASONING
        ]
    if lost:
        notes.append(f"the template does not show {', '.join(lost)}")
    if not (lost and episodic):
        return "; ".join(notes)
    hint = "use another template (model.chat_template), unless the agent or environment needs none of this"
    return Warned("; ".join(notes), hint)


def check_turns(template: ChatTemplate, tokenizer: Any, ends: frozenset[int]) -> Result:
    """Warn if the gateway cannot continue a conversation after a text or a tool call, because the chat template renders
    the end of a reply differently when other messages follow. ``ends``: tokens at which engines end a reply."""
    chat = ChatFormat(tokenizer, template=template, end_tokens=ends)
    turns = {
        "texts": (Feature.USER, {"role": "assistant", "content": REPLY}, {"role": "user", "content": "Why?"}),
        "tool calls": (Feature.RESULTS, call_message(0, "find", {"city": "Oslo"}), result_message(0, "cold")),
    }
    lost_features = template.abilities.lost
    branching = []
    for name, (feature, reply, answer) in turns.items():
        for end in ends if feature not in lost_features else ():
            with suppress(ChatError):
                chat.continue_([answer], None, end, reply)
                break
        else:
            branching += [name] if feature not in lost_features else []
    if not branching:
        return ""
    text = f"the template ends {' and '.join(branching)} differently when other messages follow"
    hint = "use a template that only appends (model.chat_template), or conversations with one request"
    return Warned(f"{text}, so each later request of a conversation begins a branch", hint)


def missing_in_template(spec: ExperimentSpec, tokenizer: Any) -> str:
    """Return a warning if conversations may have parts that the tokenizer's chat template leaves out."""
    if tokenizer.chat_template is None:  # then only completions are served
        return ""
    template = ChatTemplate.from_spec(spec, tokenizer)
    reasoning = spec.rollout.reasoning_parser is not None
    result = check_template(template, tokenizer, episodic=True, reasoning=reasoning)
    return f"{result.text}. {result.hint}" if isinstance(result, Warned) else ""


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def check_template_kwargs(template: ChatTemplate, template_kwargs: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if the chat template does not read one of ``model.chat_template_kwargs``."""
    if unread := template.unread_variable(template_kwargs):
        name, hint = unread
        location = f"model.chat_template_kwargs.{name}"
        raise ConfigError(f"the chat template does not read {name!r}", location=location, hint=hint)


def check_reply_end(template: ChatTemplate, tokenizer: Any, ends: frozenset[int]) -> Result:
    """Warn if engines do not stop at the token that ends a reply in the chat template, because every reply would then
    continue to ``max_response_tokens``."""
    end_names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in sorted(ends)) or "none"
    summary = f"replies end at {end_names}"
    if tokenizer.chat_template is None:
        return summary
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": REPLY}]
    try:
        text = template.text(messages)
    except ChatError:  # the template may need prompts of another form
        return summary
    end_ids = tokenizer(text.rpartition(REPLY)[2], add_special_tokens=False)["input_ids"]
    # Some templates leave the end to the next message, and some write text that no model has as an end token.
    if not ends.isdisjoint(end_ids) or not end_ids or end_ids[0] not in tokenizer.added_tokens_decoder:
        return summary
    end = tokenizer.convert_ids_to_tokens(end_ids[0])
    hint = f"add {end!r} to eos_token_id in the model's generation_config.json, if the model was trained to write it"
    return Warned(f"{summary}, and the chat template ends a reply with {end!r}", hint)


def _tried_rows(count: int, limit_s: float) -> Iterator[int]:
    """Yield row indices until the time is over or there are no more, in passes that are each spread evenly."""
    deadline, step = time.monotonic() + limit_s, max(1, count // SPREAD)
    for row in chain.from_iterable(range(first, count, step) for first in range(step)):
        yield row
        if time.monotonic() > deadline:
            return
