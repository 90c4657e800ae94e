"""A conversation over `/v1/responses` continues its own tokens, however the client continues it."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_stand_ins import MODEL, Engine, in_time, served
from test_responses import FIND, PATCH, answered, calling, says

from asyncrl_cli.gateway.responses_reply import KeptResponses

IDS: Any = {"return_token_ids": True}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stateless", [False, True])
def test_turns_of_a_session_are_one_sequence(stateless: bool, streamed: bool) -> None:
    """With OpenAI's client, which sends back the fields that its own models keep."""

    async def test() -> None:
        script = [calling("find", {"q": "é"}, "Hm."), calling("patch", {"input": "+1\n"}), calling("find", {}), "Done."]
        async with served(says(*script)) as there, there.client("7-0") as client:
            session = there.session("7-0")
            asked: dict[str, Any] = {"model": MODEL, "tools": [FIND, PATCH], "instructions": "Be.", "extra_body": IDS}
            history: list[Any] = [{"role": "user", "content": "go"}]
            new, before, tokens = history, None, []
            for _ in script:
                if stateless:
                    left = {"input": history, "store": False, "include": ["reasoning.encrypted_content"]}
                else:
                    left = {"input": new, "previous_response_id": before}
                if streamed:
                    async with client.responses.stream(**asked, **left) as stream:
                        response: Any = await stream.get_final_response()
                else:
                    response = await client.responses.create(**asked, **left)
                assert response.prompt_token_ids[: len(tokens)] == tokens, "the tokens are continued"
                tokens = response.prompt_token_ids + response.token_ids
                before = response.id
                new = [
                    {"type": f"{item.type}_output", "call_id": item.call_id, "output": "ok"}
                    for item in response.output
                    if item.type in ("function_call", "custom_tool_call")
                ]
                history = [*history, *response.output, *new]
            assert response.output_text == "Done."
            rollout = session.rollout()
            assert rollout is not None
            (sequence,) = rollout.sequences
            assert [*sequence.prompt_ids, *sequence.ids.tolist()] == tokens

    in_time(test)


def test_a_response_is_continued_in_its_own_session_alone() -> None:
    async def test() -> None:
        async with served(Engine()) as there:
            there.session("7-0")
            there.session("7-1")
            first = await answered(there, "7-0", input="a")
            assert (
                await answered(there, "7-0", input="b", previous_response_id=first.id)
            ).previous_response_id == first.id
            plain = await answered(there, input="a")
            await answered(there, input="b", previous_response_id=plain.id)
            unkept = await answered(there, input="a", store=False)
            for session, response_id in (
                ("7-1", first.id),
                (None, first.id),
                ("7-0", plain.id),
                (None, unkept.id),
                (None, "x"),
            ):
                refused = await there.post(
                    "/v1/responses", {"input": "b", "previous_response_id": response_id}, session
                )
                assert refused.status_code == 404
                error = refused.json()["error"]
                assert error["code"] == "previous_response_not_found"
                assert error["param"] == "previous_response_id"
                assert response_id in error["message"]

    in_time(test)


def test_instructions_are_not_taken_over() -> None:
    async def test() -> None:
        prompts: list[str] = []

        def script(prompt: str, request: Any) -> str:
            prompts.append(prompt)
            return "yes"

        async with served(Engine(script)) as there:
            there.session("7-0")
            first = await answered(there, "7-0", input="a", instructions="Old.")
            await answered(there, "7-0", input="b", instructions="New.", previous_response_id=first.id)
            assert "Old." in prompts[0]
            assert "Old." not in prompts[1] and "New." in prompts[1] and "u:a" in prompts[1]

    in_time(test)


def test_a_conversation_may_change_its_api() -> None:
    async def test() -> None:
        async with served(says("one", "two")) as there, there.client("7-0") as client:
            session = there.session("7-0")
            await client.responses.create(model=MODEL, input="a", instructions="Be.")
            messages: Any = [
                {"role": "system", "content": "Be."},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "one"},
                {"role": "user", "content": "b"},
            ]
            await client.chat.completions.create(model=MODEL, messages=messages)
            rollout = session.rollout()
            assert rollout is not None and len(rollout.sequences) == 1

    in_time(test)


def test_kept_conversations_are_bounded() -> None:
    kept = KeptResponses(most=3, limit=400)
    small = [{"role": "user", "content": "x"}]
    for name in "abc":
        kept.add(name, small)
    kept.get("a")
    kept.add("d", small)
    with pytest.raises(Exception, match="'b' not found"):
        kept.get("b")
    assert kept.get("a") == small
    kept.add("e", [{"role": "user", "content": "x" * 300}])
    assert len(kept.get("e")) == 1
    for name in "abcd":
        with pytest.raises(Exception, match="not found"):
            kept.get(name)
    kept.add("f", small)
    assert kept.get("f") == small
