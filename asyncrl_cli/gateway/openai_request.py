"""Requests of OpenAI's chat completions and completions, as far as a policy can serve them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from asyncrl_cli.gateway.errors import unsupported
from asyncrl_cli.gateway.session import CallOptions
from asyncrl_cli.gateway.wire import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    NEUTRAL,
    ChatBody,
    Count,
    Flag,
    GenerationRequest,
    Seed,
    Settings,
    Stop,
    Stops,
    Text,
    TextPart,
    TokenId,
    ToolName,
    Wire,
)

MAX_CHOICES = 1024
"""Limit on the choices of one request, summed over its prompts."""
DEFAULT_COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of `/v1/completions`, as in OpenAI's API."""


class StreamOptions(Settings):
    include_usage: Flag | None = None


class OpenAIRequest(GenerationRequest):
    n: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Flag | None = None

    @property
    def with_usage(self) -> bool:
        """True if a stream ends with a chunk that counts the tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self, max_tokens: int | None) -> CallOptions:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return CallOptions(
            max_tokens=max_tokens, temperature=self.temperature, seed=self.seed, stop=tuple(stop), n=self.n or 1
        )


class ImageUrl(Wire):
    url: Text
    detail: Any = None  # no effect: the model's processor decides


class ImagePart(Wire):
    """An image in a user's message or a tool's result, for models with `model.max_images`."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Function(Wire):
    """The function of a tool call, with its arguments as JSON text."""

    name: Text
    arguments: Text


class ToolCall(Wire):
    id: Text
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Text
        | Annotated[list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(fail_fast=True)]
        | None
    ) = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    name: Text | None = None
    reasoning_content: Any = None
    reasoning: Any = None

    @model_validator(mode="after")
    def _images_are_shown(self) -> ChatMessage:
        content_parts = self.content if isinstance(self.content, list) else []
        has_images = any(isinstance(content_part, ImagePart) for content_part in content_parts)
        if has_images and self.role not in ("user", "tool"):
            raise PydanticCustomError("part", "only messages of users and tools may have images")
        return self

    def plain(self) -> dict[str, Any]:
        """The message in the format of chat templates."""
        # Only these keys: other ones may have values of any depth.
        plain = self.model_dump(
            exclude_none=True,
            include={
                **dict.fromkeys(("role", "tool_call_id", "name", "reasoning_content", "reasoning"), True),
                "tool_calls": {"__all__": {"id": True, "type": True, "function": {"name", "arguments"}}},
            },
        )
        if self.content is not None:
            plain["content"] = self.content
        if isinstance(self.content, list):
            plain["content"] = [
                {"type": "image", "image": content_part.image_url.url}
                if isinstance(content_part, ImagePart)
                else {"type": "text", "text": content_part.text}
                for content_part in self.content
            ]
        return plain | {"role": "system"} if self.role == "developer" else plain


class FunctionDefinition(Wire):
    """A tool's description; ``parameters`` is a JSON schema."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    type: Literal["function"]
    function: FunctionDefinition


class ToolReference(Wire):
    name: Text


class NamedTool(Wire):
    type: Literal["function"]
    function: ToolReference


UNSEEN_CONTENT = ("audio", "function_call", "refusal")
"""Refused keys of a message: their content would not reach the policy."""


class ChatRequest(OpenAIRequest, ChatBody):
    neutral = NEUTRAL | {"add_special_tokens": (False,)}
    how_to_end: ClassVar[str] = (
        "to continue an assistant message at the end, set continue_final_message: true and add_generation_prompt: "
        "false; otherwise the last message must not be the assistant's"
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    max_completion_tokens: Count | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    continue_final_message: Flag | None = None
    add_generation_prompt: Flag | None = None

    @model_validator(mode="after")
    def _tool_choice_fits(self) -> ChatRequest:
        choice = self.tool_choice
        tool_names = {tool.function.name for tool in self.tools or ()}
        if isinstance(choice, NamedTool) and choice.function.name not in tool_names:
            raise PydanticCustomError("tool_choice", "tool_choice names a function that is not among the tools")
        if bool(self.continue_final_message) != (self.add_generation_prompt is False):
            message = "continue_final_message: true and add_generation_prompt: false need each other"
            raise PydanticCustomError("continue_final_message", message)
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self

    def continues(self, ends_with_reply: bool) -> bool:
        return bool(self.continue_final_message)

    def offered_tools(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def refuse_unsupported(self, fixed_sampling: bool) -> None:
        super().refuse_unsupported(fixed_sampling)
        for index, message in enumerate(self.messages):
            for key in UNSEEN_CONTENT:
                if (message.model_extra or {}).get(key):
                    raise unsupported(f"messages.{index}.{key}", f"messages.{index}.{key} is not supported")


Prompt = Annotated[str, Field(min_length=1, strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionRequest(OpenAIRequest):
    neutral = NEUTRAL | {"add_special_tokens": (True,)}

    prompt: (
        Prompt
        | TokenIds
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if len(self.prompts()) * (self.n or 1) > MAX_CHOICES:
            raise PydanticCustomError("n", f"more than {MAX_CHOICES} choices in one request")
        return self

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
