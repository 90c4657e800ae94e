"""Sessions: sampling, limits, errors, ends, retries."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.session import CallOptions, Reply, Session, SessionLimits, SessionRecord
from asyncrl_cli.gateway.sessions import Sessions
from asyncrl_cli.gateway.transcript import OnSegments
from asyncrl_cli.records.generation import CONTEXT, Rollout, RolloutRequest, Sampling, Segment
from asyncrl_cli.rollout.client import GenerationFailed
from asyncrl_cli.rollout.continuation import split_by_version
from tests.gateway.conversation_stand_ins import (
    CALC,
    HashModel,
    Record,
    ask_chat,
    ask_text,
    byte_chat,
    byte_tokenizer,
    character_chat,
    end_of,
    inline,
    rollout_of,
)

CHAT = character_chat()
HELLO = [{"role": "user", "content": "hello"}]
SAMPLING = Sampling(temperature=0.7, max_tokens=0, seed=3, stop=("##",))
Say = Callable[[RolloutRequest], str]


class Model:
    """Replies with the given texts, and then the end token, if there is room. ``held`` stops replies after their first
    half."""

    def __init__(self, *texts: str, chat: ChatFormat = CHAT) -> None:
        self.texts = list(texts)
        self.chat = chat
        self.requests: list[RolloutRequest] = []
        self.held: asyncio.Event | None = None
        self.fails = False
        self.begun = asyncio.Event()

    async def generate(self, request: RolloutRequest, on_segments: OnSegments | None = None) -> Rollout:
        self.requests.append(request)
        text = self.texts.pop(0)
        full = [*self.chat.encode(text), end_of(self.chat)]
        ids = np.asarray(full[: request.sampling.max_tokens], np.int32)
        half, zeros = len(ids) // 2, np.zeros(len(ids), np.float32)
        if self.held is not None:
            assert on_segments is not None
            start = request.generated
            on_segments([Segment(request.rollout_id, start, 4, ids[start:half], zeros[start:half])])
            self.begun.set()
            await self.held.wait()
        if self.fails:
            raise GenerationFailed("no engine")
        reason = "stop" if len(ids) == len(full) else "length"
        return Rollout(
            *(ids, zeros, np.full(len(ids), 4, np.int32)),
            rollout_id=request.rollout_id,
            prompt_ids=request.prompt_ids,
            text="",
            finish_reason=reason,
        )


def new_session(model: Any, *, limits: SessionLimits | None = None, fixed: bool = True, **record: Any) -> Session:
    limits = limits or SessionLimits(max_length=100, max_call_tokens=50)
    settings: dict[str, Any] = {"fixed_sampling": fixed, "priority": 3, "record": SessionRecord(**record)}
    return Session("3-1", CHAT, model.generate, SAMPLING, limits, **settings)


async def test_the_fields_of_a_request() -> None:
    model = Model("a", "b", "c", "d")
    fixed = new_session(model)
    await ask_chat(fixed, HELLO, None, CallOptions(max_tokens=7, temperature=0.1, seed=9, stop=("!",)))
    await ask_chat(fixed, HELLO, None, CallOptions(), on_part=lambda choice, part: None)
    await ask_chat(new_session(model, fixed=False), HELLO, None, CallOptions(temperature=0.1, seed=9, n=2))
    first, second, third, fourth = model.requests
    assert (first.rollout_id, first.priority, first.affinity) == ("3-1/0", 3, "3-1")
    assert first.awaited and not first.streamed
    assert second.rollout_id == "3-1/1" and second.streamed
    assert first.sampling == Sampling(0.7, 7, first.sampling.seed, ("##", "!"))
    assert second.sampling == Sampling(0.7, 50, second.sampling.seed, ("##",))
    assert first.sampling.seed != second.sampling.seed, "each call has its own seed"
    assert (third.sampling.temperature, third.sampling.seed) == (fourth.sampling.temperature, 9) == (0.1, 9)

    again = Model("a")
    await ask_chat(new_session(again), HELLO, None, CallOptions())
    assert again.requests[0].sampling.seed == first.sampling.seed, "derived from the session's seed and its number"


@pytest.mark.parametrize("seed", [2**63 - 1, -2, -1, 9])
async def test_seeds_of_all_choices_differ_and_are_valid_for_vllm(seed: int) -> None:
    model = Model("a", "b", "c")
    await ask_chat(new_session(model, fixed=False), HELLO, None, CallOptions(seed=seed, n=3))
    seeds = {request.sampling.seed for request in model.requests}
    assert len(seeds) == 3 and None not in seeds and -1 not in seeds
    np.array(list(seeds), np.int64)  # as vLLM stores them
    assert seed == -1 or model.requests[0].sampling.seed == seed


async def test_stop_strings_stay_in_the_tokens_and_not_in_the_text() -> None:
    model, pieces = Model("so ##", "more"), []
    session = new_session(model)
    (reply,) = await ask_chat(
        session, HELLO, None, CallOptions(max_tokens=5), on_part=lambda _, part: pieces.append(part.text)
    )
    assert (reply.text, reply.message["content"]) == ("so ", "so ")
    assert CHAT.decode(reply.token_ids) == "so ##"
    assert pieces == ["so "]
    (later,) = await ask_chat(session, [*HELLO, reply.message, {"role": "user", "content": "?"}], None, CallOptions())
    assert CHAT.decode(later.prompt_ids, special=True) == "helloso ##<eos>?", "the missing end token is added"
    assert session.last_text == "more"


async def test_a_turn_has_one_end_and_other_tools_are_another_conversation() -> None:
    model = Model("a", "b", "c")
    session = new_session(model)
    conversation: list[Any] = list(HELLO)
    for tools in (None, None, [CALC]):
        (reply,) = await ask_chat(session, conversation, tools, CallOptions())
        conversation += [reply.message, {"role": "user", "content": "?"}]
    rollout = rollout_of(session)
    texts = [CHAT.decode(sequence.ids.tolist(), special=True) for sequence in rollout.sequences]
    assert texts == ["helloa<eos>?b<eos>", "helloa<eos>?b<eos>?c<eos>"]
    assert [request.min_version for request in model.requests] == [0, 4, 0], "versions of a sequence never decrease"


def byte_session(*texts: str) -> Session:
    chat = ChatFormat(byte_tokenizer(), reasoning_parser_name="qwen3")
    model = Model(*texts, chat=chat)
    return Session("3-1", chat, model.generate, SAMPLING, SessionLimits(500, 50), fixed_sampling=True)


async def test_a_reply_continues_the_message_at_the_end_and_the_turn_continues_in_its_tokens() -> None:
    session = new_session(Model("4", "no", "yes"))
    begun = [*HELLO, {"role": "assistant", "content": "2+2="}]
    (reply,) = await ask_chat(session, begun, None, CallOptions(), continues=True)
    assert (reply.message["content"], session.last_text) == ("4", "4"), "a reward reads what the model wrote"
    later = [*HELLO, {"role": "assistant", "content": "2+2=4"}, {"role": "user", "content": "?"}]
    more = [*later, {"role": "assistant", "content": "Well, "}]
    (reply,) = await ask_chat(session, more, None, CallOptions(), continues=True)
    ended = [*later, {"role": "assistant", "content": "Well, no"}, *HELLO]
    (reply,) = await ask_chat(session, ended, None, CallOptions())
    rollout = rollout_of(session)
    assert not rollout.branches, "one sequence"
    assert CHAT.decode(rollout.ids.tolist(), special=True) == "hello2+2=4<eos>?Well, no<eos>helloyes<eos>"


async def test_a_reply_that_was_cut_off_continues_after_its_last_token() -> None:
    session = new_session(Model("ab", "cd", "ef", "gh##", "ij"))
    (cut_off,) = await ask_chat(session, HELLO, None, CallOptions(max_tokens=2))
    (ended,) = await ask_chat(session, [*HELLO, cut_off.message], None, CallOptions(), continues=True)
    assert ended.prompt_ids == (*cut_off.prompt_ids, *cut_off.token_ids)
    whole = {"role": "assistant", "content": "abcd"}
    (third,) = await ask_chat(session, [*HELLO, whole], None, CallOptions(), continues=True)
    assert CHAT.decode(third.prompt_ids, special=True) == "helloabcd", "without the end token of the reply"
    rollout = rollout_of(session)
    texts = [CHAT.decode(sequence.ids.tolist(), special=True) for sequence in rollout.sequences]
    assert texts == ["helloabcd<eos>", "helloabcdef<eos>"]
    (stopped,) = await ask_chat(session, HELLO, None, CallOptions(stop=("##",)))
    (last,) = await ask_chat(session, [*HELLO, stopped.message], None, CallOptions(), continues=True)
    assert CHAT.decode(last.prompt_ids) == "hellogh", "the stop string is not part of the message"


async def test_variables_of_a_call_are_part_of_its_conversation() -> None:
    session = byte_session("a", "b", "<think>x</think>c", "<think>x</think>d")
    conversation: list[Any] = list(HELLO)
    ends = []
    for variables in ({"quiet": True}, {"quiet": True}, {"quiet": False}, None):
        (reply,) = await ask_chat(session, conversation, None, CallOptions(), variables=variables)
        conversation += [reply.message, {"role": "user", "content": "?"}]
        ends.append(byte_chat().decode(reply.prompt_ids, special=True).endswith("</think>\n\n"))
    assert ends == [True, True, False, False]
    rollout = rollout_of(session)
    sampled = [int((sequence.versions != CONTEXT).sum()) for sequence in rollout.sequences]
    assert len(sampled) == 3 and sampled[0] == 4, "only equal variables continue"
    with pytest.raises(ApiError, match="does not read 'quite': did you mean `quiet`"):
        await ask_chat(session, HELLO, None, CallOptions(), variables={"quite": True})
    with pytest.raises(ApiError, match="does not read 'chat_template'"):
        await ask_chat(session, HELLO, None, CallOptions(), variables={"chat_template": "{{ 1 }}"})


async def test_a_reply_has_reasoning_unless_variables_or_the_continued_message_rule_it_out() -> None:
    text = "<think>x</think>c"
    session = byte_session(text, text, text)
    (plain,) = await ask_chat(session, HELLO, None, CallOptions())
    assert (plain.message["reasoning_content"], plain.message["content"]) == ("x", "c")
    (quiet,) = await ask_chat(session, HELLO, None, CallOptions(), variables={"quiet": True})
    begun = [*HELLO, {"role": "assistant", "content": "So"}]
    (continued,) = await ask_chat(session, begun, None, CallOptions(), continues=True)
    assert {quiet.message["content"], continued.message["content"]} == {text}


async def test_texts_continue_in_token_space() -> None:
    model = Model("abc", "def", "ghi", "jkl", "mno")
    session = new_session(model)
    cut = CallOptions(max_tokens=3)
    (first,) = await ask_text(session, "x=", cut)
    (second,) = await ask_text(session, "x=abc+", cut)
    assert second.prompt_ids == (*first.prompt_ids, *first.token_ids, *CHAT.encode("+")), "the text has these tokens"
    (third,) = await ask_text(session, [*second.prompt_ids, *second.token_ids, 50], CallOptions())
    (fourth,) = await ask_text(session, "x=abc+defg", cut)
    rollout = rollout_of(session)
    first_sequence, branch = rollout.sequences
    assert first_sequence.ids.tolist() == [*third.prompt_ids, *third.token_ids]
    assert branch.ids.tolist() == [*fourth.prompt_ids, *fourth.token_ids]
    for (number, end), reply in zip(session.replies(), (first, second, third, fourth), strict=True):
        assert rollout.sequences[number].ids[:end].tolist() == [*reply.prompt_ids, *reply.token_ids]
    assert (rollout.finish_reason, branch.finish_reason) == ("length", "length"), "the last reply's"
    # The text does not contain the end token, so a text that continues it is another conversation.
    text = CHAT.decode(third.prompt_ids) + "ghi"
    await ask_text(session, text + "!", cut)
    assert len(rollout_of(session).sequences) == 3


@pytest.mark.parametrize(
    ("work", "code", "failed"),
    [
        (lambda s: ask_chat(s, HELLO, None, CallOptions(n=5)), "max_calls_exceeded", True),
        (lambda s: ask_chat(s, [], None, CallOptions()), "invalid_value", False),
        (lambda s: ask_text(s, "", CallOptions()), "invalid_value", False),
    ],
)
async def test_refused_calls(work: Callable[[Session], Any], code: str, failed: bool) -> None:
    session = new_session(Model(), limits=SessionLimits(max_length=100, max_call_tokens=50, max_calls=4))
    with pytest.raises(ApiError) as error:
        await work(session)
    assert (error.value.status, error.value.code) == (400, code)
    assert bool(session.failure) == failed
    assert session.rollout() is None
    assert session.calls == 0


async def test_limits_are_kept() -> None:
    model = Model(*["0123456789"] * 9)
    session = new_session(
        model, limits=SessionLimits(max_length=40, max_call_tokens=8, max_calls=4, max_sampled_tokens=25)
    )
    conversation: list[Any] = list(HELLO)
    for allowed in (8, 8, 8, 1):
        (reply,) = await ask_chat(session, conversation, None, CallOptions(max_tokens=40))
        assert len(reply.token_ids) == allowed, "the limit of a call, and the rest of the session's limit"
        conversation += [reply.message, {"role": "user", "content": ""}]
    with pytest.raises(ApiError) as error:
        await ask_chat(session, conversation, None, CallOptions())
    assert (error.value.code, session.failure) == (
        "max_calls_exceeded",
        "this session has reached its limit of 4 calls",
    )
    session.calls = 0
    with pytest.raises(ApiError, match="25 generated tokens") as error:
        await ask_chat(session, HELLO, None, CallOptions())
    assert error.value.code == "max_sampled_tokens_exceeded"
    assert session.failure == "this session has reached its limit of 4 calls", "the first one"

    short = new_session(model, limits=SessionLimits(max_length=9, max_call_tokens=50))
    for most in (None, 32_000):
        (reply,) = await ask_chat(short, HELLO, None, CallOptions(max_tokens=most))
        assert (len(reply.token_ids), reply.finish_reason) == (4, "length"), "as many tokens as fit"
    with pytest.raises(ApiError) as error:
        await ask_chat(short, [*HELLO, reply.message, *HELLO], None, CallOptions())
    assert error.value.code == "context_length_exceeded"


async def test_the_end_cancels_running_calls_and_refuses_later_ones() -> None:
    model = Model("one", "two", "three")
    session = new_session(model)
    await ask_chat(session, HELLO, None, CallOptions())
    model.held = asyncio.Event()
    call = asyncio.create_task(ask_chat(session, HELLO, None, CallOptions(n=2)))
    await model.begun.wait()
    session.close()
    for work in (call, ask_chat(session, HELLO, None, CallOptions()), ask_text(session, "x", CallOptions())):
        with pytest.raises(ApiError) as error:
            await work
        assert (error.value.status, error.value.code) == (410, "session_ended")
    rollout = rollout_of(session)
    assert CHAT.decode(rollout.ids.tolist()) == "helloone"
    assert rollout.branches == (), "a reply that no client received is not part of it"


@pytest.mark.parametrize("how", ["cancelled", "failed"])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_abandoned_call_continues_when_it_is_repeated(how: str, n: int) -> None:
    record = Record()
    model = Model("first", *["second reply"] * 2 * n)
    session = new_session(model, on_segments=record.add)
    (first,) = await ask_chat(session, HELLO, None, CallOptions())
    messages = [*HELLO, first.message, {"role": "user", "content": "?"}]
    model.held = asyncio.Event()
    call = asyncio.create_task(ask_chat(session, messages, None, CallOptions(n=n)))
    await model.begun.wait()
    if how == "cancelled":
        call.cancel()
    else:
        model.fails = True
        model.held.set()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else GenerationFailed):
        await call
    rollout = rollout_of(session)
    assert rollout.ids.tolist() == [*first.prompt_ids, *first.token_ids]

    model.held, model.fails = None, False
    replies = await ask_chat(session, messages, None, CallOptions(n=n))
    assert [reply.text for reply in replies] == ["second reply"] * n
    assert [request.generated for request in model.requests[-n:]] == [6] * n, "it continues its own tokens"
    rollout = rollout_of(session)
    assert len(rollout.sequences) == n, "it continues in the same sequence"
    for sequence, parts in zip(rollout.sequences, record.recorded().values(), strict=True):
        reported = [token for part in parts for token in part.ids.tolist()]
        assert reported == sequence.ids.tolist()


@pytest.mark.parametrize("prompts", [["a", "a"], ["a", "b"]])
async def test_complete_replies_of_a_failed_call_are_not_in_the_rollout(prompts: list[str]) -> None:
    """The other choices of ``n``, or the other prompts of a list."""
    model = Model("one", "two")
    generate = model.generate

    async def fails_after_a_reply(request: RolloutRequest, on_segments: OnSegments | None = None) -> Rollout:
        if request.rollout_id.endswith("/1"):
            raise GenerationFailed("no engine")
        return await generate(request, on_segments)

    model.generate = fails_after_a_reply  # type: ignore[method-assign]
    session = new_session(model)

    async def ask() -> list[Reply]:
        rendered = [await session.render_text(text, inline) for text in dict.fromkeys(prompts)]
        return await session.answer(rendered, CallOptions(n=2 // len(rendered)))

    with pytest.raises(GenerationFailed):
        await ask()
    assert session.rollout() is None
    assert (session.last_text, session.sampled_tokens, len(session.replies())) == ("", 0, 0)
    assert [reply.text for reply in await ask()] == ["one", "two"], "the complete one is not sampled again"
    rollout = rollout_of(session)
    texts = [CHAT.decode(sequence.ids.tolist()) for sequence in rollout.sequences]
    assert texts == [f"{prompts[0]}one", f"{prompts[1]}two"]
    assert session.sampled_tokens == 8 and len(model.requests) == 2


async def test_a_call_that_differs_from_the_recorded_one_discards_the_recorded_tokens() -> None:
    record = Record()
    model = Model("first", "second")
    session = new_session(model, on_segments=record.add)
    (first,) = await ask_chat(session, HELLO, None, CallOptions(max_tokens=4))
    await ask_chat(session, [*HELLO, first.message, {"role": "user", "content": "?"}], None, CallOptions())

    other = Model("something else")
    again = new_session(other, segments=record.recorded(), on_segments=record.add)
    (same,) = await ask_chat(again, HELLO, None, CallOptions())
    assert same.token_ids == first.token_ids, "the whole reply, because the conversation continued after it"
    await ask_chat(again, [*HELLO, first.message, {"role": "user", "content": "!"}], None, CallOptions())
    rollout = rollout_of(again)
    assert len(other.requests) == 1
    assert CHAT.decode(rollout.ids.tolist()) == "hellofirs!something else"
    (parts,) = record.recorded().values()
    assert [token for part in parts for token in part.ids.tolist()] == rollout.ids.tolist()


async def test_a_recorded_reply_that_ended_with_any_end_token_is_complete() -> None:
    """The model has several end tokens, and its tokenizer names only one of them."""
    chat = ChatFormat(character_tokenizer(100), end_tokens=frozenset({end_of(CHAT), CHAT.encode(".")[0]}))
    ids = np.asarray([*CHAT.encode("hello"), *CHAT.encode("done.")], np.int32)
    versions = np.asarray([CONTEXT] * 5 + [4] * 5, np.int32)
    parts = tuple(split_by_version("3-1", 0, ids, np.zeros(10, np.float32), [(CONTEXT, 0), (4, 5)]))
    session = Session(
        "3-1",
        chat,
        Model().generate,
        SAMPLING,
        SessionLimits(100, 50),
        fixed_sampling=True,
        record=SessionRecord({0: parts}),
    )
    (reply,) = await ask_chat(session, HELLO, None, CallOptions())
    assert (reply.text, reply.finish_reason) == ("done.", "stop")
    rollout = rollout_of(session)
    assert rollout.versions.tolist() == versions.tolist()


@pytest.mark.parametrize(
    ("limits", "finish"),
    [
        (SessionLimits(max_length=100, max_call_tokens=50), "stop"),
        (SessionLimits(max_length=9, max_call_tokens=50), "length"),
        (SessionLimits(max_length=100, max_call_tokens=50, max_sampled_tokens=4), "length"),
    ],
)
async def test_last_reply_that_the_runs_stop_or_limits_ended_is_kept_at_a_restart(
    limits: SessionLimits, finish: str
) -> None:
    record = Record()
    stopped = finish == "stop"
    model = Model("so ##" if stopped else "a long reply")
    session = new_session(model, limits=limits, on_segments=record.add, continues=True)
    (reply,) = await ask_chat(session, HELLO, None, CallOptions(max_tokens=5))
    model = Model("more")
    again = new_session(model, limits=limits, segments=record.recorded(), continues=True)
    assert again.has_reply
    assert (again.calls, again.sampled_tokens) == (1, len(reply.token_ids))
    rollout = rollout_of(again)
    assert (rollout.ids.tolist(), rollout.finish_reason) == ([*reply.prompt_ids, *reply.token_ids], finish)
    if stopped:
        await ask_chat(again, [*HELLO, reply.message, {"role": "user", "content": "?"}], None, CallOptions())
        rollout = rollout_of(again)
        assert CHAT.decode(rollout.ids.tolist(), special=True) == "helloso ##<eos>?more<eos>"
        assert int(rollout.sampled.sum()) == 10 and not rollout.branches


@pytest.mark.parametrize("n", [1, 2])
async def test_repeated_call_of_kept_replies_counts_once(n: int) -> None:
    """The answers were lost in the restart, and the session's limits are reached."""
    record = Record()
    limits = SessionLimits(max_length=100, max_call_tokens=50, max_calls=n, max_sampled_tokens=6 * n)
    session = new_session(Model(*["first"] * n), limits=limits, on_segments=record.add, continues=True)
    replies = await ask_chat(session, HELLO, None, CallOptions(n=n))
    again = new_session(Model(), limits=limits, segments=record.recorded(), continues=True)
    repeated = await ask_chat(again, HELLO, None, CallOptions(n=n))
    assert [reply.token_ids for reply in repeated] == [reply.token_ids for reply in replies]
    assert (again.calls, again.sampled_tokens) == (n, 6 * n)
    assert len(rollout_of(again).sequences) == n
    with pytest.raises(ApiError, match="limit of"):
        await ask_chat(again, HELLO, None, CallOptions(n=n))


async def test_last_reply_that_the_clients_limit_ended_is_kept_if_the_next_call_continues_it() -> None:
    record = Record()
    session = new_session(Model("first"), on_segments=record.add, continues=True)
    (reply,) = await ask_chat(session, HELLO, None, CallOptions(max_tokens=4))
    again = new_session(Model("other", "more"), segments=record.recorded(), on_segments=record.add, continues=True)
    assert not again.has_reply and again.rollout() is None, "perhaps interrupted"
    await ask_chat(again, [{"role": "user", "content": "hi"}], None, CallOptions())
    await ask_chat(again, [*HELLO, reply.message, {"role": "user", "content": "?"}], None, CallOptions())
    rollout = rollout_of(again)
    texts = [CHAT.decode(sequence.ids.tolist(), special=True) for sequence in rollout.sequences]
    assert texts == ["hellofirs<eos>?more<eos>", "hiother<eos>"]
    assert int(rollout.sampled.sum()) == 9
    reported = [record.sequences[name].tokens.ids.tolist() for name in ("3-1", "3-1.1")]
    assert reported == [sequence.ids.tolist() for sequence in rollout.sequences], "no token is recorded twice"


async def test_recorded_branches_are_found_in_any_order() -> None:
    record, chats = Record(), [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    model = HashModel(CHAT)
    session = new_session(model, on_segments=record.add)
    replies = [(await ask_chat(session, chat, None, CallOptions()))[0] for chat in chats]

    again_model = HashModel(CHAT)
    again = new_session(again_model, segments=record.recorded(), on_segments=record.add)
    for chat, reply in reversed(list(zip(chats, replies, strict=True))):
        assert (await ask_chat(again, chat, None, CallOptions()))[0].token_ids == reply.token_ids
    assert again_model.sampled == []
    rollout = rollout_of(again)
    for sequence in rollout.sequences:
        reported = record.sequences[sequence.rollout_id].tokens.ids.tolist()
        assert reported == sequence.ids.tolist()


async def test_a_template_that_cannot_continue_gives_each_call_a_branch() -> None:
    tokenizer = character_tokenizer(100)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '.' if loop.last else ',' }}{% endfor %}"
    model = Model("a", "b")
    session = Session(
        "3-1", ChatFormat(tokenizer), model.generate, SAMPLING, SessionLimits(100, 50), fixed_sampling=True
    )
    (first,) = await ask_chat(session, HELLO, None, CallOptions())
    (second,) = await ask_chat(session, [*HELLO, first.message, {"role": "user", "content": "?"}], None, CallOptions())
    assert CHAT.decode(second.prompt_ids) == "hello,a,?."
    rollout = rollout_of(session)
    assert [sequence.rollout_id for sequence in rollout.sequences] == ["3-1", "3-1.1"]
    assert rollout.branches[0].versions.tolist() == [CONTEXT] * 10 + [4, 4]


def test_a_session_opens_again_after_it_was_closed() -> None:
    sessions = Sessions()
    sessions.open(new_session(Model()))
    with pytest.raises(ValueError, match="open already"):
        sessions.open(new_session(Model()))
    sessions.close("3-1")
    sessions.close("3-1")
    sessions.open(new_session(Model()))
    assert len(sessions) == 1


async def test_a_call_for_several_choices_at_the_end_of_its_session_is_refused() -> None:
    model = Model("one", "two")
    session = new_session(model)
    call = asyncio.create_task(ask_chat(session, HELLO, None, CallOptions(n=2)))
    await asyncio.sleep(0)  # there is a task for each choice now
    session.close()
    with pytest.raises(ApiError, match="has ended"):
        await call
    assert not model.requests


THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


async def test_history_by_the_template_drops_earlier_reasoning_and_trains_every_token_once() -> None:
    """The template keeps the reasoning of replies after the last user message, and drops it in earlier ones."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = THINKING
    chat = ChatFormat(tokenizer, reasoning_parser_name="qwen3", renders_history=True)
    model = Model(*(f"<think>{thought}</think>{reply}" for thought, reply in ("ab", "cd", "ef")), chat=chat)
    thinker = Session("3-1", chat, model.generate, SAMPLING, SessionLimits(500, 50), fixed_sampling=True)
    conversation: list[Any] = list(HELLO)
    for next_message in ({"role": "tool", "content": "1"}, {"role": "user", "content": "?"}, None):
        (reply,) = await ask_chat(thinker, conversation, None, CallOptions())
        conversation += [reply.message, next_message]
    prompts = [chat.decode(request.prompt_ids, special=True) for request in model.requests]
    opening = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    first, second = "<think>a</think>b<|im_end|>", "<think>c</think>d<|im_end|>"
    result = "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"
    stripped = f"{opening}b<|im_end|>{result}d<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [opening, f"{opening}{first}{result}", stripped]
    rollout = rollout_of(thinker)
    assert [chat.decode(sequence.ids.tolist(), special=True) for sequence in rollout.sequences] == [
        f"{opening}{first}{result}{second}",
        f"{stripped}<think>e</think>f<|im_end|>",
    ]
    sampled = [chat.decode(sequence.ids[sequence.sampled].tolist(), special=True) for sequence in rollout.sequences]
    assert sampled == [first + second, "<think>e</think>f<|im_end|>"], "each sampled token is in one sequence"
