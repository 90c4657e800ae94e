"""What clients may send: the requests of OpenAI's API, as far as a policy can serve them.

Small models instead of vLLM's (decision 0016). Other keys are accepted, since clients send many without an effect;
those that would have one and cannot be served are refused by ``refuse_unsupported``, unless they ask for the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

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


class Wire(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class StreamOptions(Wire):
    """How a stream ends."""

    include_usage: Flag | None = Field(None, description="Send a last chunk with the tokens used.")


Schema = dict[str, Any]
"""A JSON schema that is an object; vLLM takes no other."""


class JsonSchema(Wire):
    """A schema with its name. ``strict`` changes nothing: the reply follows the schema in any case."""

    name: Text | None = None
    description: Text | None = None
    json_schema: Schema = Field(alias="schema")
    strict: Flag | None = None


class ResponseFormat(Wire):
    """What a reply looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, description="For type `json_schema`.")

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("json_schema", "type json_schema needs the key json_schema")
        return self


Choices = Annotated[list[Annotated[str, Field(min_length=1, strict=True)]], Field(min_length=1)]


class StructuredOutputs(Wire):
    """vLLM's key for output formats: one of these."""

    json_: Schema | Text | None = Field(None, alias="json", description="A JSON schema, or its text.")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="In EBNF or Lark.")


class GenerationRequest(Wire):
    """What both kinds of generation share."""

    model: Text | None = Field(None, description="The served model, as `/v1/models` names it; optional.")
    n: Annotated[int, Field(ge=1, le=128, strict=True)] | None = Field(None, description="Choices per prompt.")
    temperature: Temperature | None = Field(
        None, description="0 is greedy. In sessions of a training run or an evaluation the run's own setting counts."
    )
    seed: Seed | None = Field(None, description="Equal seeds give equal tokens under equal weights.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="Strings that end the text, which does not have them."
    )
    max_tokens: Count | None = Field(None, description="Most tokens to generate.")
    stream: Flag | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    return_token_ids: Flag | None = Field(
        None, description="Add the token ids: `prompt_token_ids`, and `token_ids` of each choice."
    )
    response_format: ResponseFormat | None = Field(
        None, description="Not in sessions of a training run or an evaluation, unless it is of type `text`."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="As `response_format`, in vLLM's form.")
    guided_json: Schema | Text | None = Field(None, description="`structured_outputs.json` in vLLM's older form.")
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

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


def _text_alone(content: Any) -> Any:
    """Refuse other parts by their type, in one sentence: a union of types gives a reason for each of them."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            message = "parts of type {kind} are not supported: the model gets text alone"
            raise PydanticCustomError("part", message, {"kind": kind})
    return content


class ChatMessage(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | Annotated[list[TextPart], Field(fail_fast=True)] | None, BeforeValidator(_text_alone)] = (
        None
    )
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


class ChatRequest(GenerationRequest):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="`none` hides the tools. The policy is never forced: all else is `auto`."
    )
    max_completion_tokens: Count | None = Field(None, description="Takes precedence over `max_tokens`.")
    logprobs: Flag | None = Field(None, description="Add the log-probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = Field(
        None, description="Needs `logprobs`. Only the sampled token's is known: more than 1 gives that one."
    )

    @model_validator(mode="after")
    def _tool_choice_fits(self) -> ChatRequest:
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise PydanticCustomError("tool_choice", "tool_choice names a function that is not among the tools")
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model sees, as they were sent."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]


Prompt = Annotated[str, Field(min_length=1, strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """A request of `/v1/completions`."""

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


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "suffix": ("",),
    "web_search_options": (),
}
"""Keys that no session supports, with the values (beside null) that ask for nothing."""

RESHAPING: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "stop_token_ids": ([],),
    "top_k": (0, -1),
    "top_p": (1,),
}
"""Keys that change the distribution sampled from, likewise. A policy is sampled from unchanged, so that its log-probs
are those of the distribution; a session with fixed sampling ignores these keys, as it does the temperature."""


def refuse_unsupported(
    request: Wire,
    fixed_sampling: bool,
    never: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
    overridden: Mapping[str, tuple[Any, ...]] = RESHAPING,
) -> None:
    """Raise ``ApiError`` for the first key that cannot be served; a session with fixed sampling ignores
    ``overridden``."""
    for key, value in (request.model_extra or {}).items():
        neutral = never.get(key)
        if neutral is None and not fixed_sampling:
            neutral = overridden.get(key)
        if neutral is not None and value is not None and not any(_same(value, one) for one in neutral):
            raise unsupported(key, f"{key} is not supported")


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
