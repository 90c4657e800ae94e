"""Shared parts of all APIs' requests, JSON values, and server-sent events.

Every key of a request is a field of its model, has no effect on tokens (``NO_EFFECT``), or is refused by
``Request.refuse_unsupported``. The models are small, and independent of vLLM's (decision 0016).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.gateway.errors import unsupported
from asyncrl_cli.records.prompt import ChatError

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_CALLS = 512
"""Limits on the messages and tools of one request, and on the tool calls of one message."""

Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
ToolName = Annotated[str, Field(min_length=1, max_length=256, strict=True)]
Stops = Annotated[list[Stop], Field(max_length=16)]


NO_EFFECT = frozenset(
    [
        # who asks, where it is computed, and how it is billed and logged
        *("user", "metadata", "client_metadata", "safety_identifier", "user_profile_id", "workspace_id", "store"),
        *("request_id", "session_id", "diagnostics", "service_tier", "priority", "speed", "inference_geo", "betas"),
        *("billing_policy", "fallbacks", "fallback_credit_token"),
        # caches and transport
        *("cache_control", "cache_salt", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("prediction", "stream_interval", "stream_options", "include_obfuscation", "spaces_between_special_tokens"),
        # the model's style: chat_template_kwargs has the settings of the chat template
        *("reasoning", "reasoning_effort", "thinking", "effort", "verbosity", "task_budget"),
        *("parallel_tool_calls", "max_tool_calls"),
    ]
)
"""Keys without a field that any request may have, because they do not change the generated tokens."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "background": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "format": ({"type": "text"},),
    "function_call": ("none",),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Accepted values of keys that are otherwise refused: these values change nothing. Null and empty values never do."""

SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "top_p": (1,),
}
"""Keys that change the sampled distribution, with the values that do not. They are refused, because recorded log-probs
must belong to the policy. A session with fixed sampling ignores them, like the temperature, because most programs send
them by habit."""

_NO_FORMATS = "describe the format in the messages; for structured outputs, use `vllm serve RUN/model`"
HINTS: Mapping[str, str] = {
    "chat_template": "set model.chat_template in the spec",
    **dict.fromkeys(("format", "output_format", "response_format", "structured_outputs"), _NO_FORMATS),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), _NO_FORMATS),
}
"""Advice for refused keys. Structured outputs mask tokens, so the recorded log-probs would not be the policy's."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class TextPart(Wire):
    """A piece of text in a message's content."""

    type: Literal["text"]
    text: Text


class Settings(Wire):
    """A part of a request that also refuses unknown keys."""


class Request(Wire):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    no_effect: ClassVar[frozenset[str]] = NO_EFFECT

    model: Text | None = None

    def refuse_unsupported(self, fixed_sampling: bool) -> None:
        """Raise ``ApiError`` for the first key that cannot be honoured. With ``fixed_sampling`` the session ignores the
        keys of ``SAMPLING``."""
        extra = self.model_extra or {}
        self._refuse(self, extra=extra, prefix="", ignored=SAMPLING.keys() if fixed_sampling else ())
        for name in type(self).model_fields:
            if isinstance(section := getattr(self, name), Settings):
                self._refuse(section, extra=section.model_extra or {}, prefix=f"{name}.", ignored=())

    def _refuse(self, section: Wire, extra: Mapping[str, Any], prefix: str, ignored: Collection[str]) -> None:
        for key, value in extra.items():
            if key in self.no_effect or key in ignored or value in (None, "", [], {}):
                continue
            neutral = self.neutral.get(key) or SAMPLING.get(key, ())
            if not any(_same(value, neutral_value) for neutral_value in neutral):
                hint = HINTS.get(key) or did_you_mean(key, type(section).model_fields)
                raise unsupported(prefix + key, f"{prefix}{key} is not supported" + (f"; {hint}" if hint else ""))


class ChatBody(Request):
    """A request with a conversation, in any API."""

    how_to_end: ClassVar[str] = "the last message must not be the assistant's"
    """The rule for the last message, for errors."""

    chat_template_kwargs: dict[str, Any] | None = None

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model sees, in the format of chat templates."""
        raise NotImplementedError

    def continues(self, ends_with_reply: bool) -> bool:
        """True if the reply continues the last message. ``ends_with_reply``: the last message is the assistant's."""
        return False


class GenerationRequest(Request):
    temperature: Annotated[float, Field(ge=0.0, le=2.0, strict=True)] | None = None
    stream: Flag | None = None


def _same(value: Any, expected: Any) -> bool:
    return bool(value == expected) and isinstance(value, bool) == isinstance(expected, bool)


def encoded(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def event(body: Any, name: str = "") -> bytes:
    name_line = f"event: {name}\n".encode() if name else b""
    return name_line + b"data: " + encoded(body) + b"\n\n"


# -- JSON values as in JavaScript: every number is a double, and a number that no double can hold is null


def finite(text: str) -> Any:
    """Parse JSON; NaN and infinite numbers become null.

    The parser itself replaces them, because a recursive walk would fail at a smaller depth than the parser.
    """
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def canonical_json(value: Any) -> str:
    """A text that is equal for equal JSON values: 1 equals 1.0, and 0.0 equals -0.0.

    Raises ``ChatError`` for values that JSON lacks.
    """
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
        doubles = json.loads(text, parse_int=_double, parse_float=_double, parse_constant=lambda _: None)
        return json.dumps(doubles, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"not JSON: {error}") from error


def _finite(digits: str) -> float | None:
    double = float(digits)
    return double if math.isfinite(double) else None


def _double(digits: str) -> float | None:
    double = _finite(digits)
    return None if double is None else double + 0.0  # no -0.0
