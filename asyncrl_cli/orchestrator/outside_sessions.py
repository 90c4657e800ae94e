"""Sessions of programs outside of the run (`task.use: external`, decision 0034).

An outside session is an episode that the run does not start:

    a program asks -> a group is admitted -> its rollouts are offered -> handed out -> rewarded -> recorded -> answered

``OutsideSessions`` takes the place of the episode workers. Groups, staleness, the journal and the recording of tokens
are the same as for other episodes.

Invariants:

- A rollout is handed out at most once, also over several drivers: the journal has it before the program has it.
- A reward is answered with success only after its commit, and a call of the model only after its tokens' commit.
- A group is admitted only when a program waits for it, so prompts do not get old while nobody plays them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.rows import RowForm
from asyncrl_cli.gateway.sessions import Action, ClientAnswer, ClientRequest
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.schema import JournalError
from asyncrl_cli.records.prompt import OWN_UID_PREFIX, Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.tasks.base import ModelAccess, RewardResult
from asyncrl_cli.tasks.function_task import row_of
from asyncrl_cli.workers.messages import Played
from asyncrl_cli.workers.scoring import checked

WAIT_S = 30.0
"""Seconds that a program waits for a session before it is told to ask again."""
MASKED = Scored(None)
"""The result of a session that nobody rewards: its rollout is masked."""
ENDINGS = {
    "requeued": "its group was abandoned, because its weights are too old (pipeline.on_stale)",
    "rejected": "its group was rejected",
}
"""Why a session without a reward has ended, by the group's state."""
LEFT_TEXT = "its deadline is over, or its program gave up"


UNKNOWN = Prompt("unknown", "")
"""The prompt of an earlier driver's session until its episode begins again."""


class ProgramGone(Exception):
    """The program that sent its own prompt left before it got the session."""


class Refusal(Exception):
    """A request that gets an error as its answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.answer = ClientAnswer(status, {"message": message}, code)


@dataclass(slots=True, eq=False)
class OutsideSession:
    """One rollout from its offer to its end."""

    prompt: Prompt = UNKNOWN
    access: ModelAccess | None = None
    handed_out: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    result: asyncio.Future[Scored] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    end_recorded: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done once the journal has the result, or the group has ended without it."""
    deadline: float = 0.0  # unix time; 0: the episode has not begun


@dataclass(slots=True, eq=False)
class Caller:
    """A program that waits for a session. ``prompt``: its own prompt, if it has one."""

    prompt: Prompt | None
    offer: asyncio.Future[str]
    admitted: bool = False  # its own prompt is


@dataclass(slots=True)
class OutsideSessions:
    """All outside sessions of a run, and the programs that wait for one.

    Args:
        handed_out: the rollouts that an earlier driver handed out.
        counts: numbers of sessions and refusals, by metric.
    """

    spec: ExperimentSpec
    buffer: Buffer
    handed_out: Collection[str] = ()
    on_demand: Callable[[], None] = lambda: None
    """Called when a program begins to wait for a group."""
    counts: Counter[str] = field(default_factory=Counter)
    continues_programs: bool = True
    """Programs outlive the loss of the gateway or the driver: they keep their address, key and replies."""
    _sessions: dict[str, OutsideSession] = field(default_factory=dict)
    _offers: list[str] = field(default_factory=list)  # rollouts that no program has yet, oldest first
    _callers: list[Caller] = field(default_factory=list)
    _opening: int = 0  # rollouts that will be offered soon

    def __post_init__(self) -> None:
        for rollout_id in self.handed_out:  # now: a reward may come before the episode begins again
            self._sessions[rollout_id] = OutsideSession()
            self._sessions[rollout_id].handed_out.set_result(None)

    # -- in place of episode workers

    async def start(self) -> None:
        """Nothing is started: programs come by themselves."""

    @asynccontextmanager
    async def slot(self, isolated: bool) -> AsyncIterator[OutsideSessions]:
        self._opening += 1
        try:
            yield self
        finally:
            self._opening -= 1

    async def play(self, key: str, prompt: Prompt, access: ModelAccess, isolated: bool) -> Played:
        """Offer the session ``key`` and wait for its result: a reward, or ``MASKED`` at its deadline."""
        if key not in self._sessions:
            self._sessions[key] = OutsideSession()
            self._offers.append(key)
        session = self._sessions[key]
        session.prompt, session.access = prompt, access
        if session.handed_out.done() and not session.deadline:  # by an earlier driver
            session.deadline = self._deadline()
        self._opening -= 1
        try:
            self._match()
            if self._callers:  # this rollout is not for them
                self.on_demand()
            if key in self._offers and not self._is_awaited(prompt):
                self._drop(key)
            try:
                await asyncio.shield(session.handed_out)
            except ProgramGone:
                reason = "the program that sent its prompt left before it got the session"
                return Played(RewardFailure(reason, counts=False))
            try:
                async with asyncio.timeout(session.deadline - time.time()):
                    return Played(await asyncio.shield(session.result))
            except TimeoutError:
                if not session.result.done():
                    self.counts["sessions/expired"] += 1
                    session.result.set_result(MASKED)
                return Played(session.result.result())
        finally:
            self._opening += 1

    def conclude(self, rollout_id: str) -> None:
        """A rollout has ended. The journal has its result, unless its group ended without it."""
        if (session := self._sessions.pop(rollout_id, None)) is not None:
            session.end_recorded.set_result(None)
        if rollout_id in self._offers:
            self._offers.remove(rollout_id)

    # -- admission

    @property
    def wanted_groups(self) -> int:
        """Number of groups to admit for the programs that wait."""
        own_prompts = sum(1 for caller in self._callers if caller.prompt is not None and not caller.admitted)
        waiting = sum(1 for caller in self._callers if caller.prompt is None)
        missing_sessions = max(0, waiting - len(self._offers) - self._opening)
        return own_prompts + -(-missing_sessions // self.spec.rollout.group_size)

    def own_prompt(self) -> Prompt | None:
        """The next program's own prompt, which the caller will admit; None if no program waits with one."""
        for caller in self._callers:
            if caller.prompt is not None and not caller.admitted:
                caller.admitted = True
                return caller.prompt
        return None

    def _match(self) -> None:
        """Give offered sessions to the programs that wait longest."""
        for caller in list(self._callers):
            for rollout_id in self._offers:
                uid = self._sessions[rollout_id].prompt.uid
                if uid == caller.prompt.uid if caller.prompt is not None else not uid.startswith(OWN_UID_PREFIX):
                    self._offers.remove(rollout_id)
                    self._callers.remove(caller)
                    caller.offer.set_result(rollout_id)
                    break

    def _is_awaited(self, prompt: Prompt) -> bool:
        """True unless it is the own prompt of a program that does not wait any more."""
        callers = (caller.prompt for caller in self._callers)
        return not prompt.uid.startswith(OWN_UID_PREFIX) or any(
            waiting and waiting.uid == prompt.uid for waiting in callers
        )

    def _drop(self, rollout_id: str) -> None:
        self._offers.remove(rollout_id)
        self._sessions[rollout_id].handed_out.set_exception(ProgramGone())

    # -- requests of programs

    async def answer(self, request: ClientRequest) -> ClientAnswer:
        """Answer a request. A cancelled call means that the program is gone."""
        try:
            if request.action is Action.OPEN:
                return ClientAnswer(200, await self._open(request))
            if request.action is Action.COMMIT:
                # The link has handled the session's tokens before this request (``actor.Incoming``).
                await self.buffer.flush()
                return ClientAnswer(200, {})
            return ClientAnswer(200, await self._end(request))
        except Refusal as refusal:
            return refusal.answer
        except JournalError:  # the run is ending
            return ClientAnswer(503, {"message": "the run is stopping"}, "server_stopping")

    async def _open(self, request: ClientRequest) -> Mapping[str, Any]:
        caller = Caller(self._prompt_of(request), asyncio.get_running_loop().create_future())
        self._callers.append(caller)
        rollout_id = ""
        try:
            self._match()
            if not caller.offer.done():
                self.on_demand()
            async with asyncio.timeout(WAIT_S):
                rollout_id = await asyncio.shield(caller.offer)
        except TimeoutError:
            reason = f"no session is free after {WAIT_S:g} s: pipeline.max_staleness and rollout.max_running_rollouts "
            raise Refusal(503, "no_session", f"{reason}limit how many are open; ask again") from None
        finally:
            if caller in self._callers:
                self._callers.remove(caller)
            elif not rollout_id and (offer := caller.offer.result()) in self._sessions:  # for another program
                self._offers.insert(0, offer)
                self._match()
            for rollout_id in [key for key in self._offers if not self._is_awaited(self._sessions[key].prompt)]:
                self._drop(rollout_id)
        if (session := self._sessions.get(rollout_id)) is None:
            raise Refusal(503, "no_session", "the group of this session has just ended; ask again")
        try:
            await self.buffer.handed_out(rollout_id)
        finally:  # if the program is gone, too: the journal may have it
            session.deadline = self._deadline()
            session.handed_out.set_result(None)
            self.counts["sessions/handed_out"] += 1
        access = session.access
        assert access is not None, "the session was offered"
        return {
            "session": rollout_id,
            "base_url": access.base_url,
            "anthropic_base_url": access.base_url.removesuffix("/v1"),
            "api_key": access.api_key,
            "model": access.model,
            "deadline": session.deadline,
            "prompt": row_of(session.prompt),
        }

    def _prompt_of(self, request: ClientRequest) -> Prompt | None:
        if request.prompt is None:
            if self.spec.data.train.path is None:
                raise Refusal(400, "invalid_value", "the run has no prompts (data.train.path): send one as `prompt`")
            return None
        if (group_size := self.spec.rollout.group_size) > 1:
            message = f"a program's own prompt needs rollout.group_size 1, and this run has {group_size}"
            raise Refusal(400, "invalid_value", message)
        try:
            prompt = RowForm("the request").prompt({**request.fields, "prompt": request.prompt}, 0)
        except DataError as error:
            raise Refusal(400, "invalid_value", f"prompt: {error.message}; {error.hint}") from None
        return Prompt(f"{OWN_UID_PREFIX}{prompt.uid}", prompt.content, prompt.fields, prompt.images)

    async def _end(self, request: ClientRequest) -> Mapping[str, Any]:
        """End a session with its reward, or with ``MASKED`` if its program gives up."""
        name, gives_up = request.session, request.action is Action.GIVE_UP
        session = self._sessions.get(name)
        score: Scored | RewardFailure = MASKED
        if not gives_up:
            result = RewardResult(request.reward, request.metrics)
            prompt = UNKNOWN if session is None else session.prompt
            score = checked(result, name=f"the program of session {name}", prompt=prompt)
        if isinstance(score, RewardFailure):
            raise Refusal(400, "invalid_reward", score.reason)
        if session is None or not session.handed_out.done():
            return await self._ended_with(name, score)
        if not session.result.done():
            if not (gives_up or request.has_reply):
                raise Refusal(409, "no_reply", "the model has completed no reply in this session")
            if gives_up:
                self.counts["sessions/given_up"] += 1
            session.result.set_result(score)
        elif session.result.result() is MASKED and not gives_up:
            raise self._late_refusal(name, LEFT_TEXT)
        elif session.result.result() != score:
            raise _second_reward(name)
        if gives_up:
            return {"session": name, "status": "given up"}
        await asyncio.shield(session.end_recorded)
        return await self._ended_with(name, score)

    async def _ended_with(self, name: str, score: Scored) -> Mapping[str, Any]:
        """The answer about a session that has ended, perhaps under an earlier driver."""
        outcome = await self.buffer.outcome(name)
        if outcome is None:
            raise Refusal(404, "session_not_found", f"there is no session {name}")
        if outcome.score == score:
            return {"session": name, "status": "recorded"}
        if outcome.score is not None and outcome.score != MASKED:
            raise _second_reward(name)
        raise self._late_refusal(name, ENDINGS.get(outcome.group_state, LEFT_TEXT))

    def _deadline(self) -> float:
        return time.time() + self.spec.task.episode.timeout_s

    def _late_refusal(self, name: str, reason: str) -> Refusal:
        self.counts["sessions/late"] += 1
        return Refusal(410, "session_ended", f"session {name} has ended: {reason}")


def _second_reward(name: str) -> Refusal:
    return Refusal(409, "reward_exists", f"session {name} has another reward already")
