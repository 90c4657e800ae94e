"""Programs outside of the run: the paths that they use."""

from __future__ import annotations

import asyncio

from asyncrl_cli.gateway.sessions import Action, ClientAnswer, ClientRequest, OutsideClients
from tests.gateway.gateway_stand_ins import in_time, served, until

TOKEN = "of the run"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_paths_for_programs_check_keys_and_bodies() -> None:
    asked: list[ClientRequest] = []
    answers: dict[Action, ClientAnswer] = {
        Action.OPEN: ClientAnswer(200, {"session": "7-0"}),
        Action.REWARD: ClientAnswer(200, {"status": "recorded"}),
    }

    async def ask(request: ClientRequest) -> ClientAnswer:
        asked.append(request)
        return answers[request.action]

    async def test() -> None:
        async with served(clients=OutsideClients(TOKEN, ask)) as run:
            run.session("7-0")
            token = {"headers": {"Authorization": f"Bearer {TOKEN}"}}
            assert (await run.post("/sessions", {})).json()["error"]["code"] == "invalid_api_key"
            assert (await run.post("/sessions", {}, **token)).json() == {"session": "7-0"}
            own = {"prompt": [user("1+1=")], "fields": {"answer": 2}}
            assert (await run.post("/sessions", own, **token)).status_code == 200
            assert (asked[-1].prompt, asked[-1].fields) == (own["prompt"], own["fields"])
            for body in ({"prompt": 3}, {"promt": "a"}, {"fields": []}):
                assert (await run.post("/sessions", body, **token)).status_code == 400
            # A session's key opens nothing but the session, and the run's token is no session's key.
            assert (await run.post("/reward", {"reward": 1.0}, "7-0")).json() == {"status": "recorded"}
            assert not asked[-1].has_reply
            for wrong in (TOKEN, "x", "7-0"):
                headers = {"headers": {"Authorization": f"Bearer {wrong}"}}
                assert (await run.post("/reward", {"reward": 1.0}, "7-0", **headers)).status_code == 401
            await run.client("7-0").completions.create(model="any", prompt="hello")
            assert (await run.post("/reward", {"reward": None, "metrics": {"a": 1}}, "7-0")).status_code == 200
            assert asked[-1] == ClientRequest(Action.REWARD, "7-0", reward=None, metrics={"a": 1.0})
            count = len(asked)
            for body in (
                {},
                {"reward": "1"},
                {"reward": True},
                {"reward": 1, "metric": {}},
                {"reward": 1, "metrics": 2},
            ):
                refused = await run.post("/reward", body, "7-0")
                assert refused.status_code == 400, refused.text
            for number in ("NaN", "1e999"):
                refused = await run.post("/reward", content=f'{{"reward": {number}}}', session="7-0")
                assert refused.json()["error"]["param"] == "reward"
            assert len(asked) == count
            answers[Action.REWARD] = ClientAnswer(410, {"message": "session 7-0 has ended: late"}, "session_ended")
            ended = await run.post("/reward", {"reward": 1.0}, "7-0")
            assert (ended.status_code, ended.json()["error"]["code"]) == (410, "session_ended")
            answers[Action.OPEN] = ClientAnswer(503, {"message": "ask again"}, "no_session")
            busy = await run.post("/sessions", {}, **token)
            assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        async with served() as run:
            assert (await run.post("/sessions", {}, **token)).status_code == 404, "the run has another task"

    in_time(test)


def test_a_program_that_leaves_is_no_longer_waited_for() -> None:
    begun, cancelled = asyncio.Event(), False

    async def ask(request: ClientRequest) -> ClientAnswer:
        nonlocal cancelled
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise
        raise AssertionError

    async def test() -> None:
        async with served(clients=OutsideClients(TOKEN, ask)) as run:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            asking = asyncio.create_task(run.http.post("/sessions", json={}, headers=headers))
            await begun.wait()
            asking.cancel()
            await until(lambda: cancelled)

    in_time(test)
