"""Sessions of programs outside of the run: which program gets which rollout, and what every request is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from stand_ins import spec

from asyncrl_cli.gateway.sessions import Action, ClientAnswer, ClientRequest
from asyncrl_cli.journal.rollout_rows import RolloutOutcome
from asyncrl_cli.orchestrator.outside_sessions import MASKED, OWN_UID_PREFIX, OutsideSessions
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers.messages import Played


class Run:
    """Outside sessions in a run that admits every wanted group at once, and a journal in memory."""

    def __init__(
        self, group_size: int = 2, timeout_s: float = 60.0, has_prompts: bool = True, handed_out: Sequence[str] = ()
    ) -> None:
        self.journal: dict[str, RolloutOutcome] = {}
        self.recorded: list[str] = []  # the ids of sessions that were handed out
        self.commits = asyncio.Event()  # rewards reach the journal while it is set
        self.commits.set()
        self.admits = True
        self.groups = 0
        self.played: dict[str, asyncio.Task[Played]] = {}
        self.group_size = group_size
        settings = spec(
            rollout={"group_size": group_size},
            task={"use": "external", "episode": {"timeout_s": timeout_s}},
            data={"train": {"path": __file__}} if has_prompts else {},
        )
        here: Any = self
        self.sessions = OutsideSessions(settings, here, handed_out, on_demand=self.admit)

    async def handed_out(self, rollout_id: str) -> None:
        self.recorded.append(rollout_id)

    async def flush(self) -> None:
        await self.commits.wait()

    async def outcome(self, rollout_id: str) -> RolloutOutcome | None:
        return self.journal.get(rollout_id)

    def admit(self) -> None:
        while self.admits and self.sessions.wanted_groups:
            prompt = self.sessions.own_prompt() or Prompt(f"row {self.groups}", "1+1=")
            for index in range(self.group_size):
                self.play(f"{self.groups}-{index}", prompt)
            self.groups += 1

    def play(self, name: str, prompt: Prompt) -> None:
        self.journal[name] = RolloutOutcome("running", "", None)
        self.sessions._opening += 1  # as in ``slot``, which a task enters a moment later
        self.played[name] = asyncio.create_task(self._play(name, prompt))

    async def _play(self, name: str, prompt: Prompt) -> Played:
        played = await self.sessions.play(name, prompt, ModelAccess("http://run/v1", f"key {name}", "policy"), False)
        await self.commits.wait()
        score = played.score if isinstance(played.score, Scored) else None
        self.journal[name] = RolloutOutcome("running" if score else "rejected", "", score)
        self.sessions.conclude(name)
        return played

    async def open(self, **request: Any) -> ClientAnswer:
        return await self.sessions.answer(ClientRequest(Action.OPEN, **request))

    async def reward(self, session: str, reward: Any, **request: Any) -> ClientAnswer:
        return await self.sessions.answer(ClientRequest(Action.REWARD, session, reward=reward, **request))

    async def give_up(self, session: str) -> ClientAnswer:
        return await self.sessions.answer(ClientRequest(Action.GIVE_UP, session))


async def test_a_groups_sessions_go_to_the_callers_as_they_come() -> None:
    run = Run(group_size=4)
    answers = await asyncio.gather(*(run.open() for _ in range(64)))
    names = [str(answer.body["session"]) for answer in answers]
    assert len(set(names)) == 64
    assert run.groups == 16, "no more groups than callers need"
    assert sorted(run.recorded) == sorted(names), "recorded before the answer"
    assert all(
        answer.body["prompt"] == {"uid": f"row {name.split('-')[0]}", "prompt": "1+1="}
        for answer, name in zip(answers, names, strict=True)
    )
    await asyncio.gather(*(run.reward(name, 0.5) for name in names))
    assert {(await run.played[name]).score.reward for name in names} == {0.5}  # type: ignore[union-attr]


async def test_a_reward_is_answered_after_its_commit_and_repeated_without_effect() -> None:
    run = Run()
    name = (await run.open()).body["session"]
    run.commits.clear()
    committing = asyncio.create_task(run.sessions.answer(ClientRequest(Action.COMMIT, name)))
    rewarding = [asyncio.create_task(run.reward(name, 1.0, metrics={"turns": 2.0})) for _ in range(2)]
    await run.sessions._sessions[name].result
    assert not any(task.done() for task in [committing, *rewarding])
    assert (await run.reward(name, 0.0)).code == "reward_exists"
    run.commits.set()
    assert [(await task).status for task in [committing, *rewarding]] == [200, 200, 200]
    assert (await run.played[name]).score == Scored(1.0, {"turns": 2.0})
    assert (await run.reward(name, 1.0, metrics={"turns": 2.0})).status == 200, "known from the journal"
    assert (await run.reward(name, 0.5)).status == 409
    assert (await run.give_up(name)).status == 409


async def test_bad_rewards_are_refused_and_leave_the_session_open() -> None:
    run = Run()
    name = (await run.open()).body["session"]
    for reward, metrics in (
        (float("nan"), {}),
        (float("inf"), {}),
        (1e300, {}),
        (1.0, {"a": float("nan")}),
        (1.0, {"": 1.0}),
    ):
        assert (await run.reward(name, reward, metrics=metrics)).code == "invalid_reward"
    assert (await run.reward(name, 1.0, has_reply=False)).code == "no_reply"
    assert (await run.reward("99-0", 1.0)).code == "session_not_found"
    assert (await run.reward("0-1", 1.0)).status == 410, "nobody has it yet"
    assert (await run.reward(name, None)).status == 200
    assert (await run.played[name]).score == MASKED


async def test_a_session_that_nobody_rewards_is_masked_at_its_deadline() -> None:
    run = Run(timeout_s=0.05)
    name = (await run.open()).body["session"]
    assert (await run.played[name]).score == MASKED
    late = await run.reward(name, 1.0)
    assert (late.status, late.code) == (410, "session_ended")
    assert "deadline" in late.body["message"]
    assert run.sessions.counts == {"sessions/handed_out": 1, "sessions/expired": 1, "sessions/late": 1}


async def test_a_session_that_is_given_up_is_masked() -> None:
    run = Run()
    name = (await run.open()).body["session"]
    assert [(await run.give_up(name)).status for _ in range(2)] == [200, 200]
    assert (await run.played[name]).score == MASKED
    assert (await run.reward(name, 1.0)).status == 410


async def test_a_reward_for_an_abandoned_group_is_refused_with_the_reason() -> None:
    run = Run()
    name = (await run.open()).body["session"]
    run.commits.clear()
    rewarding = asyncio.create_task(run.reward(name, 1.0))
    await run.sessions._sessions[name].result
    run.played[name].cancel()
    run.journal[name] = RolloutOutcome("requeued", "", None)
    run.sessions.conclude(name)
    answer = await rewarding
    assert (answer.status, answer.code) == (410, "session_ended")
    assert "on_stale" in answer.body["message"]


async def test_an_earlier_drivers_sessions_are_not_handed_out_again() -> None:
    run = Run(handed_out=["0-0"])
    run.admits = False
    early = asyncio.create_task(run.reward("0-0", 1.0))  # before the episode begins again
    await asyncio.sleep(0)
    for index in range(2):
        run.play(f"0-{index}", Prompt("row 0", "1+1="))
    assert (await run.open()).body["session"] == "0-1"
    assert (await early).status == 200
    assert (await run.played["0-0"]).score == Scored(1.0)


async def test_a_lost_gateway_keeps_sessions_and_rewards() -> None:
    run = Run()
    name = (await run.open()).body["session"]
    run.played[name].cancel()  # as ``Episodes`` does when the gateway is lost
    await asyncio.wait([run.played[name]])
    run.play(name, Prompt("row 0", "1+1="))
    await asyncio.sleep(0)
    assert (await run.reward(name, 1.0)).status == 200
    assert run.recorded == [name]


async def test_a_caller_that_leaves_makes_room_for_the_next() -> None:
    run = Run(group_size=1)
    run.admits = False
    leaving = asyncio.create_task(run.open())
    await asyncio.sleep(0)
    assert run.sessions.wanted_groups == 1
    leaving.cancel()
    await asyncio.wait([leaving])
    assert run.sessions.wanted_groups == 0
    run.admits = True
    leaving = asyncio.create_task(run.open())
    while not run.sessions._offers and not leaving.done():
        await asyncio.sleep(0)
        if run.sessions._sessions and not run.sessions._callers:  # it has an offer, and leaves
            leaving.cancel()
            break
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    run.admits = False
    assert (await run.open()).body["session"] == "0-0"


async def test_own_prompts_go_to_the_programs_that_sent_them() -> None:
    run = Run(group_size=1, has_prompts=False)
    questions = [f"{number}+1=" for number in range(16)]
    answers = await asyncio.gather(*(run.open(prompt=text, fields={"answer": text}) for text in questions))
    assert [answer.body["prompt"]["prompt"] for answer in answers] == questions
    assert [answer.body["prompt"]["answer"] for answer in answers] == questions
    assert all(answer.body["prompt"]["uid"].startswith(OWN_UID_PREFIX) for answer in answers)
    assert (await run.open()).code == "invalid_value", "the run has no prompts"
    assert (await run.open(prompt="")).code == "invalid_value"
    assert (await run.open(prompt=[{"role": "nobody"}])).code == "invalid_value"
    assert (await Run(group_size=2).open(prompt="1+1=")).code == "invalid_value", "it exists once"


async def test_an_own_prompt_whose_program_left_fails() -> None:
    run = Run(group_size=1)
    run.play("0-0", Prompt(f"{OWN_UID_PREFIX}row", "1+1="))
    played = await run.played["0-0"]
    assert isinstance(played.score, RewardFailure)
    assert (await run.reward("0-0", 1.0)).status == 410
