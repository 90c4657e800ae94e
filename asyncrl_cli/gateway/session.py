"""A session: the calls of one program to the model, as the token sequences of one rollout.

If a call's messages begin with an earlier call's messages and its reply, it continues the earlier call's exact tokens.
Every other call begins a branch (docs/gateway.md, "Conversations and token ids"; decision 0017). Its parts:

* ``ChatFormat`` (chat.py) renders messages to tokens, and parses tokens to messages;
* ``Conversation`` and ``History`` (history.py) find the earlier turn that a call continues;
* ``Transcript`` (transcript.py) keeps the branches' tokens, with the tokens of an earlier play;
* ``FieldStream`` (reply_stream.py) turns tokens into the visible pieces of a stream;
* ``generate`` samples: the driver's generation client, reached through ``actor.Transfer``.

A call is rendered first (``render_chat``, ``render_text``, ``render_ids``), perhaps in another thread. It takes its
branch only in ``answer``, before the first await, so concurrent calls cannot extend the same branch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.core.seeds import derive_seed
from asyncrl_cli.gateway.chat import ChatFormat, Tokens
from asyncrl_cli.gateway.errors import ApiError, invalid_value
from asyncrl_cli.gateway.history import Conversation, ConversationKey
from asyncrl_cli.gateway.parsers import Tools
from asyncrl_cli.gateway.reply_stream import FieldStream, ReplyPart
from asyncrl_cli.gateway.transcript import Branch, Call, KeptReplies, ReplyEnd, Transcript, images_until
from asyncrl_cli.records.generation import FinishReason, Rollout, RolloutRequest, Sampling, Segment, TokenSequence
from asyncrl_cli.records.images import Image, PlacedImage
from asyncrl_cli.records.prompt import ChatError, Message
from asyncrl_cli.rollout.continuation import stopped_at
from asyncrl_cli.rollout.open_requests import OnSegments
from asyncrl_cli.rollout.response_text import cut

Generate = Callable[[RolloutRequest, OnSegments | None], Awaitable[Rollout]]
"""``GenerationClient.generate``."""
OnPart = Callable[[int, ReplyPart], None]
"""Called with the index of a call's reply, and its next part."""

ALWAYS_RENDERED = 64 * 2**10
"""Texts of so many characters are rendered whatever the model's length, because a template may omit most of them."""

T = TypeVar("T")


class Render(Protocol):
    """Runs slow work on a text, perhaps in a thread."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call; None: the session's setting."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1


@dataclass(frozen=True, slots=True)
class SessionLimits:
    max_length: int
    """Tokens of one sequence."""
    max_call_tokens: int
    """Sampled tokens of one call."""
    max_calls: int | None = None
    """Calls of a session; each choice counts."""
    max_sampled_tokens: int | None = None
    """Sampled tokens of a session. Each of several concurrent calls may use the rest that was left when it began."""


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One choice of a call. ``logprobs`` (float32, nats) has one entry for each of ``token_ids``.

    ``message`` is in OpenAI's format, with ``reasoning_content`` if there is any. ``text`` is the whole reply up to a
    stop string, including reasoning and tool calls.
    """

    message: Message
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    finish_reason: Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A call's prompt."""

    prompt_ids: tuple[int, ...]
    continued_turn: tuple[Branch, ReplyEnd] | None = None
    """The turn that the call continues; without one it begins a branch."""
    tools: Tools | None = None
    history: ConversationKey | None = None
    """A chat's messages, by which a later call finds this one."""
    chat: ChatFormat | None = None
    """Parses the reply of a chat."""
    continued_message: Message | None = None
    """The message that the reply continues, if any."""
    images: tuple[PlacedImage, ...] = ()

    @property
    def branch(self) -> Branch | None:
        """The branch that the call can continue right now; None if it must begin a new one."""
        if self.continued_turn is None:
            return None
        branch, turn = self.continued_turn
        return branch if branch.extends(turn) else None


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """How a session's tokens are recorded, and what an earlier play of its rollout recorded."""

    segments: Mapping[int, tuple[Segment, ...]] = field(default_factory=dict)
    """Each sequence's recorded segments (0, 1, ...)."""
    on_segments: OnSegments | None = None
    """Gets the segments of all sequences, including context, as they grow."""
    continues: bool = False
    """The program did not begin again when the rollout did: recorded replies stay, and its next call has them in its
    messages."""
    until_recorded: Callable[[], Awaitable[None]] | None = None
    """Returns when all reported tokens are on disk: a reply that the program has must be in the rollout."""


class Session:
    """One rollout during its calls."""

    def __init__(
        self,
        rollout_id: str,
        chat: ChatFormat,
        generate: Generate,
        sampling: Sampling,
        limits: SessionLimits,
        *,
        fixed_sampling: bool,
        priority: int = 0,
        record: SessionRecord | None = None,
    ) -> None:
        """``fixed_sampling``: ``sampling`` sets temperature and seed and a call's own are ignored, because the recorded
        log-probs must belong to the sampled distribution. Each call's seed is derived from ``sampling.seed`` and the
        number of earlier calls. Otherwise a call's settings take precedence. Stop strings of both apply.
        """
        record = record or SessionRecord()
        self.rollout_id = rollout_id
        self.fixed_sampling = fixed_sampling
        self.last_text = ""
        self.failure = ""
        """Reason why the first call was refused because of a limit."""
        self._chat = chat
        self._generate = generate
        self._sampling = sampling
        self._limits = limits
        self._priority = priority
        self._until_recorded = record.until_recorded
        kept_replies = None
        if record.continues:
            kept_replies = self._kept_replies(record.segments, limits.max_call_tokens)
            if limits.max_sampled_tokens is not None:  # the last reply had the tokens that the others left
                remaining_tokens = limits.max_sampled_tokens - sum(
                    replies.sampled_tokens for replies in kept_replies.values()
                )
                kept_replies = self._kept_replies(record.segments, min(limits.max_call_tokens, remaining_tokens))
        self.calls = sum(replies.replies for replies in (kept_replies or {}).values())
        """Replies requested so far."""
        self.sampled_tokens = sum(replies.sampled_tokens for replies in (kept_replies or {}).values())
        """Tokens of all complete replies."""
        self._transcript = Transcript(rollout_id, record.segments, record.on_segments, kept_replies)
        self._running: set[asyncio.Task[Rollout]] = set()
        self._closed = False

    def _kept_replies(
        self, recorded: Mapping[int, tuple[Segment, ...]], max_call_tokens: int
    ) -> dict[int, KeptReplies]:
        kept_replies = {
            index: KeptReplies.from_tokens(
                TokenSequence.join(segments),
                finish_of=partial(self._finish_of, stop=self._sampling.stop),
                max_length=self._limits.max_length,
                max_call_tokens=max_call_tokens,
            )
            for index, segments in recorded.items()
        }
        return {index: replies for index, replies in kept_replies.items() if replies is not None}

    def close(self) -> None:
        """End the session: running calls are cancelled and later ones refused, both with an ``ApiError``."""
        self._closed = True
        for task in self._running:
            task.cancel()

    def rollout(self) -> Rollout | None:
        """All complete replies, with all branches; None if there are none."""
        return self._transcript.rollout(self._chat.decode)

    @property
    def has_reply(self) -> bool:
        """True if the rollout has a complete reply."""
        return self._transcript.has_reply

    def replies(self) -> tuple[tuple[int, int], ...]:
        """As ``Transcript.replies``."""
        return self._transcript.replies()

    # -- a call

    async def answer(
        self, prompts: Sequence[Rendered], options: CallOptions, on_part: OnPart | None = None
    ) -> list[Reply]:
        """Answer a call with ``options.n`` replies to each prompt, in order. ``on_part`` gets a reply's index.

        Raises ``ApiError`` if the call cannot be answered, and the exceptions of ``generate``. Then none of its replies
        is in the rollout.
        """
        self._refuse_if_ended()
        if not all(rendered.prompt_ids for rendered in prompts):
            raise invalid_value("the prompt is empty")
        count = options.n * len(prompts)
        kept_lengths: list[int] = []  # of replies that are repeated, and so counted already
        for rendered in prompts:
            lengths = self._transcript.kept_lengths(rendered.branch, rendered.prompt_ids, rendered.images)
            kept_lengths += lengths[: options.n]
        samplings = [self._sampling_of(options, len(rendered.prompt_ids), count, kept_lengths) for rendered in prompts]
        # Before the first await: two concurrent calls must not get the same number, or extend the same branch.
        calls: list[Call] = []
        replies = []
        for rendered, sampling in zip(prompts, samplings, strict=True):
            for choice in range(options.n):
                branch = None if choice else rendered.branch
                call = self._transcript.begin(branch, rendered.prompt_ids, rendered.images)
                index = self.calls
                self.calls += not call.is_kept
                reply = self._reply(
                    call,
                    rendered,
                    sampling=self._seeded(sampling, options, choice=choice, index=index),
                    index=index,
                    on_part=None if on_part is None else partial(on_part, len(calls)),
                )
                calls.append(call)
                replies.append(reply)
        try:
            complete_replies = await gathered(replies)
            for _, end in complete_replies:
                end()
            if self._until_recorded is not None:
                await self._until_recorded()
            return [reply for reply, _ in complete_replies]
        finally:
            for call in calls:
                self._transcript.abandon(call, keep=self.fixed_sampling)  # does nothing if the call has ended

    async def _reply(
        self,
        call: Call,
        rendered: Rendered,
        *,
        sampling: Sampling,
        index: int,
        on_part: Callable[[ReplyPart], None] | None,
    ) -> tuple[Reply, Callable[[], None]]:
        """Complete a reply. Returns it with a function that adds it to the rollout."""
        stream = None if on_part is None else self._stream(rendered, sampling.stop)

        def send(next_parts: Callable[[FieldStream], list[ReplyPart]]) -> None:
            if stream is not None and on_part is not None:
                for reply_part in next_parts(stream):
                    on_part(reply_part)

        def on_tokens(ids: Sequence[int]) -> None:
            send(lambda stream: stream.feed(ids))

        replayed = self._replayed(call, sampling)
        if replayed is None:
            streamed = stream is not None
            tokens, finish = await self._sample(call, sampling, index, streamed=streamed, on_tokens=on_tokens)
            # If another reply fails, a repeated call gets these tokens.
            self._transcript.grow(call, tokens.segments(self.rollout_id))
        else:
            tokens, finish = replayed
        ids = tuple(tokens.ids.tolist())
        decoded = self._chat.decode(ids)
        text = cut(decoded, sampling.stop)
        message: Message = {"role": "assistant", "content": text}
        if rendered.chat is not None:
            message = rendered.chat.parse(call.prompt_ids, token_ids=ids, tools=rendered.tools, stop=sampling.stop)
        turn = ReplyEnd(
            end=call.prompt_length + len(ids),
            last_token=ids[-1],
            messages=rendered.history and rendered.history.then(_joined_reply(rendered.continued_message, message)),
            stopped=text != decoded,
        )
        send(lambda stream: stream.finish(message))

        def end() -> None:
            self._transcript.end(call, sampled=tokens, finish=finish, turn=turn)
            if not call.is_kept:
                self.sampled_tokens += len(ids)
            self.last_text = text

        reply = Reply(
            message=message,
            text=text,
            prompt_ids=call.prompt_ids,
            token_ids=ids,
            logprobs=tokens.logprobs,
            finish_reason="tool_calls" if message.get("tool_calls") else finish,
        )
        return reply, end

    def _stream(self, rendered: Rendered, stop: Sequence[str]) -> FieldStream:
        if rendered.chat is not None:
            return rendered.chat.stream(rendered.tools, stop)
        return FieldStream(self._chat.decode, stop)

    async def _sample(
        self, call: Call, sampling: Sampling, index: int, *, streamed: bool, on_tokens: Callable[[Sequence[int]], None]
    ) -> tuple[TokenSequence, FinishReason]:
        self._refuse_if_ended()  # with several choices this is a task, which may begin after the session's end
        request_id = f"{self.rollout_id}/{index}"
        on_tokens(call.replayed.ids.tolist())

        def on_new_segments(segments: list[Segment]) -> None:
            on_tokens(self._transcript.grow(call, segments))

        request = RolloutRequest(
            rollout_id=request_id,
            prompt_ids=call.prompt_ids,
            sampling=sampling,
            prefix=tuple(call.replayed.segments(request_id)),
            min_version=call.newest_version,
            priority=self._priority,
            affinity=self.rollout_id,
            streamed=streamed,
            awaited=True,
            images=call.images,
        )
        task = asyncio.ensure_future(self._generate(request, on_new_segments))
        self._running.add(task)
        try:
            rollout = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._closed and not (current and current.cancelling()):
                raise session_ended(self.rollout_id) from None
            raise
        finally:
            self._running.discard(task)
        if not len(rollout.ids):
            raise RuntimeError(f"nothing was generated for {request_id}")
        return rollout, rollout.finish_reason

    def _replayed(self, call: Call, sampling: Sampling) -> tuple[TokenSequence, FinishReason] | None:
        """A completely recorded reply; None if tokens must still be sampled."""
        tokens, count = call.replayed, len(call.replayed.ids)
        if not count:
            return None
        stop_at = stopped_at(self._chat.decode, tokens.ids, sampling.stop)
        if stop_at is not None:
            return tokens.slice(0, stop_at), "stop"
        if count >= sampling.max_tokens:
            tokens = tokens.slice(0, sampling.max_tokens)
        elif not (call.has_next or call.is_kept) and tokens.ids[-1] not in self._chat.end_tokens:
            return None
        return tokens, "stop" if tokens.ids[-1] in self._chat.end_tokens else "length"

    def _finish_of(self, ids: Sequence[int], stop: Sequence[str]) -> FinishReason:
        has_end = ids[-1] in self._chat.end_tokens or stopped_at(self._chat.decode, ids, stop) is not None
        return "stop" if has_end else "length"

    # -- rendering a call

    @property
    def max_pixels(self) -> int:
        """Largest number of pixels of an image."""
        return self._chat.max_pixels

    def admit_images(self, count: int) -> None:
        """Raise ``ApiError`` for more images than a conversation may have, and ``ChatError`` if it may have none."""
        if count > self._chat.max_images > 0:  # a limit of the episode, like its length
            message = f"{count} images, more than model.max_images ({self._chat.max_images})"
            raise self._refused("max_images_exceeded", message)
        self._chat.check_images(count)

    async def render_chat(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        render: Render,
        *,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
        images: Mapping[str, Image] | None = None,
    ) -> Rendered:
        """Find the branch that a conversation continues, and render the new messages.

        ``variables``: override the model's variables for the chat template. ``continues``: the reply continues the
        assistant message at the end. ``images``: the messages' images, by digest. Raises ``ApiError`` for messages that
        cannot be rendered.
        """
        template_variables = {**self._chat.template_kwargs, **(variables or {})}
        if self._transcript.restorable:
            with _chat_errors():
                conversation = await render(partial(Conversation.of, messages, tools or None, template_variables))
            messages = conversation.messages
            covering = self._transcript.longest_turn(lambda _, turn: conversation.covered_by(turn.messages))
            # Each prefix takes a render, so replies that are turns already are left out.
            uncovered = covering[1].messages.count - 1 if covering and covering[1].messages else 1
            for count in range(uncovered, len(messages)):
                if messages[count]["role"] == "assistant":
                    rendered = await self._render_chat(
                        messages[:count], tools, render, variables=variables, images=images
                    )
                    self._restore(rendered, messages[: count + 1], template_variables)
        return await self._render_chat(messages, tools, render, variables=variables, continues=continues, images=images)

    def _restore(self, rendered: Rendered, messages: Sequence[Message], variables: Mapping[str, Any]) -> None:
        """Make the last message a turn if it is a recorded reply, and calls continue its exact tokens. ``rendered``:
        the messages before it."""
        # Without an await until ``begin``: another call must not restore the same reply.
        tokens = self._transcript.recorded_reply(rendered.branch, rendered.prompt_ids, rendered.images)
        if tokens is None or rendered.chat is None or rendered.history is None:
            return
        ids = tuple(tokens.ids.tolist())
        reply = rendered.chat.parse(rendered.prompt_ids, token_ids=ids, tools=rendered.tools, stop=self._sampling.stop)
        history = rendered.history.then(reply)
        with _chat_errors():
            if Conversation.of(messages, rendered.tools, variables).covered_by(history) is None:
                return
        call = self._transcript.begin(rendered.branch, rendered.prompt_ids, rendered.images)
        text = self._chat.decode(ids)
        turn = ReplyEnd(
            end=call.prompt_length + len(ids),
            last_token=ids[-1],
            messages=history,
            stopped=cut(text, self._sampling.stop) != text,
        )
        finish = self._finish_of(ids, self._sampling.stop)
        self._transcript.end(call, sampled=tokens, finish=finish, turn=turn)

    async def _render_chat(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        render: Render,
        *,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
        images: Mapping[str, Image] | None = None,
    ) -> Rendered:
        self._refuse_if_ended()
        tools = tools or None
        with _chat_errors():
            template_variables = {**self._chat.template_kwargs, **(variables or {})}
            conversation = await render(partial(Conversation.of, messages, tools, template_variables))
            self._refuse_flood(conversation.characters)
            chat = self._chat
            if variables or continues:
                chat = await render(partial(chat.varied, variables or {}, continues))
            continued_message = conversation.messages[-1] if continues else None
            if not self._chat.renders_history and (
                continued_turn := self._transcript.longest_turn(lambda _, turn: conversation.covered_by(turn.messages))
            ):
                branch, turn = continued_turn
                assert turn.messages is not None
                covered_count = turn.messages.count - 1  # the tools have a key, too, but are no message
                new_messages = conversation.messages[covered_count:]
                last_reply = conversation.messages[covered_count - 1]
                turn_ids, new_tokens = _turn_ids(branch, turn), Tokens([], ())
                try:
                    if new_messages:
                        new_tokens = await render(
                            partial(chat.continue_, new_messages, tools, turn.last_token, last_reply, images)
                        )
                    elif turn.stopped or last_reply.get("tool_calls") or not last_reply["content"]:
                        raise ChatError("its message is not the end of its tokens")
                    elif turn.last_token in chat.end_tokens:  # continue without the end token, in a new branch
                        turn_ids, continued_turn = turn_ids[:-1], None
                except ChatError:
                    pass  # the template cannot continue this turn, so the call begins a branch
                else:
                    history = conversation.after(turn.messages, continues)
                    return Rendered(
                        (*turn_ids, *new_tokens.ids),
                        continued_turn,
                        tools=tools,
                        history=history,
                        chat=chat,
                        continued_message=continued_message,
                        images=(
                            *branch.images_until(turn.end),
                            *(replace(image, offset=len(turn_ids) + image.offset) for image in new_tokens.images),
                        ),
                    )
            ids, places = await render(partial(chat.render, conversation.messages, tools, images))
        return Rendered(
            tuple(ids),
            self._turn_before(ids, places) if self._chat.renders_history else None,
            tools=tools,
            history=conversation.after(None, continues),
            chat=chat,
            continued_message=continued_message,
            images=places,
        )

    async def render_text(self, prompt: str, render: Render) -> Rendered:
        """Tokenize a text. It continues an earlier turn if its tokens begin with that turn's."""
        self._refuse_if_ended()
        self._refuse_flood(len(prompt))
        with _chat_errors():
            ids = await render(partial(self._chat.encode, prompt))
        return self._rendered(ids)

    async def render_ids(self, prompt: Sequence[int]) -> Rendered:
        """As ``render_text``, for token ids."""
        self._refuse_if_ended()
        if len(prompt) > self._limits.max_length:
            raise self._too_long(f"{len(prompt)} tokens")
        if any(not 0 <= token < self._chat.vocabulary for token in prompt):
            raise invalid_value(f"token ids must be from 0 to {self._chat.vocabulary - 1}")
        return self._rendered(prompt)

    def _rendered(self, prompt_ids: Sequence[int]) -> Rendered:
        """A prompt of token ids. Its images are the images of the turn that it continues."""
        continued_turn = self._turn_before(prompt_ids)
        images = continued_turn[0].images_until(continued_turn[1].end) if continued_turn else ()
        return Rendered(tuple(prompt_ids), continued_turn, images=images)

    def _turn_before(
        self, prompt_ids: Sequence[int], images: tuple[PlacedImage, ...] | None = None
    ) -> tuple[Branch, ReplyEnd] | None:
        """The turn that ends with the longest beginning of a call's prompt, if any. ``images``: the prompt's; None:
        any."""
        ids = np.asarray(prompt_ids, np.int32)

        def covers(branch: Branch, turn: ReplyEnd) -> int | None:
            turn_ids = branch.prefix.tokens.ids[: turn.end]
            if not np.array_equal(turn_ids, ids[: turn.end]):
                return None
            same_images = images is None or branch.images_until(turn.end) == images_until(images, turn.end)
            return turn.end if same_images else None

        return self._transcript.longest_turn(covers)

    # -- limits and sampling

    def _sampling_of(
        self, options: CallOptions, prompt_tokens: int, reply_count: int, kept_lengths: Sequence[int]
    ) -> Sampling:
        limits = self._limits
        call_limit = limits.max_call_tokens if options.max_tokens is None else options.max_tokens
        room = limits.max_length - prompt_tokens
        if room < 1:
            raise self._too_long(f"{prompt_tokens} tokens")
        if limits.max_calls is not None and self.calls + reply_count - len(kept_lengths) > limits.max_calls:
            raise self._refused("max_calls_exceeded", f"this session has reached its limit of {limits.max_calls} calls")
        if limits.max_sampled_tokens is not None:
            remaining_tokens = limits.max_sampled_tokens - self.sampled_tokens + sum(kept_lengths)
            if remaining_tokens < 1:
                raise self._refused(
                    "max_sampled_tokens_exceeded",
                    f"this session has reached its limit of {limits.max_sampled_tokens} generated tokens",
                )
            room = min(room, remaining_tokens)
        session_sampling = self._sampling
        return Sampling(
            temperature=session_sampling.temperature
            if self.fixed_sampling or options.temperature is None
            else options.temperature,
            max_tokens=min(room, limits.max_call_tokens, call_limit),
            stop=tuple(dict.fromkeys((*session_sampling.stop, *options.stop))),
        )

    def _seeded(self, sampling: Sampling, options: CallOptions, *, choice: int, index: int) -> Sampling:
        if not self.fixed_sampling and options.seed is not None:
            # Derived seeds are never -1, which vLLM takes for no seed, or larger than 64 bits.
            is_derived = choice > 0 or options.seed == -1
            return replace(sampling, seed=derive_seed(options.seed, "choice", choice) if is_derived else options.seed)
        seed = self._sampling.seed
        return replace(sampling, seed=None if seed is None else derive_seed(seed, "call", index))

    def _refuse_flood(self, characters: int) -> None:
        """Refuse a text before it is rendered if its characters cannot fit the model: rendering megabytes would take
        seconds and gigabytes of memory (decision 0016)."""
        if characters > max(self._limits.max_length * self._chat.longest_token, ALWAYS_RENDERED):
            raise self._too_long(f"{characters} characters")

    def _too_long(self, size: str) -> ApiError:
        max_length = self._limits.max_length
        message = f"This model's maximum context length is {max_length} tokens, and the messages have {size}"
        return self._refused("context_length_exceeded", message)

    def _refused(self, code: str, message: str) -> ApiError:
        self.failure = self.failure or message
        return ApiError(400, message, code=code)

    def _refuse_if_ended(self) -> None:
        if self._closed:
            raise session_ended(self.rollout_id)


def session_ended(session: str) -> ApiError:
    """The error for a call of a session that has ended."""
    return ApiError(410, f"session {session} has ended", code="session_ended")


@contextmanager
def _chat_errors() -> Iterator[None]:
    try:
        yield
    except ChatError as error:
        raise invalid_value(str(error)) from error


def _turn_ids(branch: Branch, turn: ReplyEnd) -> list[int]:
    ids: list[int] = branch.prefix.tokens.ids[: turn.end].tolist()
    return ids


def _joined_reply(continued_message: Message | None, message: Message) -> Message:
    """A reply joined with the message that it continued, as clients send it back."""
    if continued_message is None:
        return message
    return {**continued_message, **message, "content": continued_message["content"] + (message["content"] or "")}


async def gathered(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all results. The first error cancels the other coroutines and is raised."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
