"""What clients may send: the requests of OpenAI's API, as far as a policy can serve them.

Small models instead of vLLM's (decision 0016). Every key of a request is a field of its model, has no effect on tokens
(``NO_EFFECT``), or is refused by ``Request.refuse_unsupported`` (decision 0085).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.gateway.errors import unsupported

MAX_CHOICES = 1024
"""Choices of one request, over all its prompts."""
MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_CALLS = 512
"""Messages and tools of one request, and calls of tools of one message."""

Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
ToolName = Annotated[str, Field(min_length=1, max_length=256, strict=True)]
Temperature = Annotated[float, Field(ge=0.0, le=2.0, strict=True)]


NO_EFFECT = frozenset(
    [
        # who asks, where it is computed, and how it is billed and logged
        *("user", "metadata", "client_metadata", "safety_identifier", "user_profile_id", "workspace_id", "store"),
        *("request_id", "session_id", "diagnostics", "service_tier", "priority", "speed", "inference_geo", "betas"),
        *("billing_policy", "fallbacks", "fallback_credit_token"),
        # caches and transport
        *("cache_control", "cache_salt", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("prediction", "stream_interval", "stream_options", "include_obfuscation", "spaces_between_special_tokens"),
        # wishes about the model's style: a chat template's settings are model.chat_template_kwargs
        *("reasoning", "reasoning_effort", "thinking", "effort", "verbosity", "task_budget"),
        *("parallel_tool_calls", "max_tool_calls"),
    ]
)
"""Keys without a field that any request may have: they do not change which tokens are generated."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "background": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "enable_response_messages": (False,),
    "format": ({"type": "text"},),
    "function_call": ("none",),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
"""Values that change nothing, of keys that are refused otherwise; null and empty values never change anything."""

SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "top_p": (1,),
}
"""Keys that reshape the sampled distribution, with the values that change nothing. Recorded log-probs must belong to
the policy, so these keys are refused. A session with fixed sampling ignores them, like the temperature, because most
programs send them by habit."""

_NO_FORMATS = "describe the format in the messages; for structured outputs, use `vllm serve RUN/model`"
HINTS: Mapping[str, str] = {
    "chat_template": "set model.chat_template in the spec",
    "chat_template_kwargs": "set model.chat_template_kwargs in the spec; a request may repeat them",
    **dict.fromkeys(("format", "output_format", "response_format", "structured_outputs"), _NO_FORMATS),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), _NO_FORMATS),
}
"""Advice for refused keys. Structured outputs mask tokens, so the recorded log-probs would not be the policy's."""


class Wire(BaseModel):
    """Base of all requests and their parts."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class Settings(Wire):
    """A part of a request where unknown keys are refused as in the request."""


class Request(Wire):
    """Base of the requests of every API."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
    no_effect: ClassVar[frozenset[str]] = NO_EFFECT

    model: Text | None = Field(
        None, description="The served model, as `/v1/models` names it; optional. In sessions any name is served."
    )

    def refuse_unsupported(self, fixed_sampling: bool, template_kwargs: Mapping[str, Any]) -> None:
        """Raise ``ApiError`` for the first key that cannot be honoured.

        Args:
            fixed_sampling: the session ignores the keys of ``SAMPLING``.
            template_kwargs: ``model.chat_template_kwargs``, which a request may repeat.
        """
        extra = dict(self.model_extra or {})
        if _repeats(extra.get("chat_template_kwargs"), template_kwargs):
            del extra["chat_template_kwargs"]
        self._refuse(self, extra, "", SAMPLING.keys() if fixed_sampling else ())
        for name in type(self).model_fields:
            if isinstance(part := getattr(self, name), Settings):
                self._refuse(part, part.model_extra or {}, f"{name}.", ())

    def _refuse(self, part: Wire, extra: Mapping[str, Any], prefix: str, ignored: Collection[str]) -> None:
        for key, value in extra.items():
            if key in self.no_effect or key in ignored or value in (None, "", [], {}):
                continue
            neutral = self.neutral.get(key) or SAMPLING.get(key, ())
            if not any(_same(value, one) for one in neutral):
                hint = HINTS.get(key) or did_you_mean(key, type(part).model_fields)
                raise unsupported(prefix + key, f"{prefix}{key} is not supported" + (f"; {hint}" if hint else ""))


def _repeats(asked: Any, known: Mapping[str, Any]) -> bool:
    return isinstance(asked, dict) and all(key in known and _same(value, known[key]) for key, value in asked.items())


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def only(*kinds: str) -> BeforeValidator:
    """Refuse content with parts of other types, with a reason. Pydantic's own message would list every type that the
    content is not."""

    def check(content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind not in kinds:
                raise PydanticCustomError(
                    "part",
                    "content of type {kind} is not supported here, only {kinds}: the policy reads and writes text",
                    {"kind": kind[:64], "kinds": ", ".join(kinds)},
                )
        return content

    return BeforeValidator(check)


class StreamOptions(Settings):
    """How a stream ends."""

    include_usage: Flag | None = Field(None, description="Send a last chunk with the tokens used.")


class GenerationRequest(Request):
    """What both kinds of generation share."""

    n: Annotated[int, Field(ge=1, le=128, strict=True)] | None = Field(None, description="Choices per prompt.")
    temperature: Temperature | None = Field(
        None, description="0 is greedy. In sessions of a training run or an evaluation the run's own setting counts."
    )
    seed: Seed | None = Field(None, description="Equal seeds give equal tokens under equal weights.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="Strings that end the text, which does not have them."
    )
    max_tokens: Count | None = Field(None, description="Most tokens to generate. More than fits is as many as fit.")
    stream: Flag | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    return_token_ids: Flag | None = Field(
        None, description="Add the token ids: `prompt_token_ids`, and `token_ids` of each choice."
    )

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts the tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Wire):
    """A piece of a message's content. There are no pictures or sounds."""

    type: Literal["text"]
    text: Text


class Function(Wire):
    """The function that a tool call names, with its arguments as JSON text."""

    name: Text
    arguments: Text


class ToolCall(Wire):
    """One call of a tool, in an assistant's message."""

    id: Text
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | Annotated[list[TextPart], Field(fail_fast=True)] | None, only("text")] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = Field(
        None, description="For role `assistant`."
    )
    tool_call_id: Text | None = Field(None, description="For role `tool`: the call that this answers.")
    name: Text | None = None
    reasoning_content: Any = Field(None, description="For role `assistant`: its reasoning, as it was answered.")
    reasoning: Any = Field(None, description="Another name of `reasoning_content`.")

    def plain(self) -> dict[str, Any]:
        """The message with the keys that chat templates know."""
        known = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning"}
        plain = self.model_dump(exclude_none=True, include=known)
        return plain | {"role": "system"} if self.role == "developer" else plain


class FunctionDefinition(Wire):
    """What a tool does and takes; ``parameters`` is a JSON schema."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Wire):
    """A function by its name."""

    name: Text


class NamedTool(Wire):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class NamedTools(Wire):
    """Some of the tools. The mode has no effect: the policy is never forced."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Wire):
    """A choice of tools: the model does not see the others."""

    type: Literal["allowed_tools"]
    allowed_tools: NamedTools


SPOKEN_OTHERWISE = ("audio", "function_call", "refusal")
"""Keys of a message that may hold content the policy would not see."""


class ChatRequest(GenerationRequest):
    """A request of `/v1/chat/completions`."""

    neutral = {**NEUTRAL, "add_special_tokens": (False,)}

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = Field(
        None,
        description="`none` hides the tools, `allowed_tools` the others. Nothing is forced: all else is `auto`.",
    )
    max_completion_tokens: Count | None = Field(None, description="Takes precedence over `max_tokens`.")
    logprobs: Flag | None = Field(None, description="Add the log-probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        None, description="Needs `logprobs`. Only the sampled token's is known: more than 1 gives that one."
    )

    @model_validator(mode="after")
    def _tool_choice_fits(self) -> ChatRequest:
        choice = self.tool_choice
        chosen = [choice] if isinstance(choice, NamedTool) else self._allowed() or ()
        if not {tool.function.name for tool in chosen} <= {tool.function.name for tool in self.tools or ()}:
            raise PydanticCustomError("tool_choice", "tool_choice names a function that is not among the tools")
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model sees, as they were sent."""
        if not self.tools or self.tool_choice == "none":
            return None
        allowed = self._allowed()
        names = None if allowed is None else {tool.function.name for tool in allowed}
        offered = [tool for tool in self.tools if names is None or tool.function.name in names]
        return [tool.model_dump(exclude_unset=True) for tool in offered] or None

    def _allowed(self) -> list[NamedTool] | None:
        return self.tool_choice.allowed_tools.tools if isinstance(self.tool_choice, AllowedTools) else None

    def refuse_unsupported(self, fixed_sampling: bool, template_kwargs: Mapping[str, Any]) -> None:
        super().refuse_unsupported(fixed_sampling, template_kwargs)
        for index, message in enumerate(self.messages):
            for key in SPOKEN_OTHERWISE:
                if (message.model_extra or {}).get(key):
                    raise unsupported(f"messages.{index}.{key}", f"messages.{index}.{key} is not supported")


Prompt = Annotated[str, Field(min_length=1, strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """A request of `/v1/completions`."""

    neutral = {**NEUTRAL, "add_special_tokens": (True,)}

    prompt: (
        Prompt
        | TokenIds
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    ) = Field(description="A text, token ids, or a list of either.")
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        None, description="Add the log-probability of each token. Only the sampled token's is known."
    )

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if len(self.prompts()) * (self.n or 1) > MAX_CHOICES:
            raise PydanticCustomError("n", f"more than {MAX_CHOICES} choices in one request")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
