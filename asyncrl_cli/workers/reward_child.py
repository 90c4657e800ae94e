"""The process that runs rewards: what ``RewardProcess`` starts.

Plain functions run in the main thread, one at a time, as functions that set alarms need it. Async ones share an event
loop there.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.system.process_tree import die_with
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.mix import MixTask
from asyncrl_cli.workers.reward_process import Loaded
from asyncrl_cli.workers.scoring import Response, awaits, reward_name, score, score_async, took_too_long


def main(descriptor: int, owner_pid: int) -> None:
    """The process: load the task, then score what comes until the owner closes the socket."""
    die_with(owner_pid)
    os.set_inheritable(descriptor, False)
    owner: Connection[Any, Any] = Connection(descriptor)
    number, (spec, search_path, together) = owner.recv()
    if spec.reward_memory_mb is not None:
        limit = spec.reward_memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        task = load_task(spec, search_path)
    except TaskError as error:
        owner.send((number, error))
        return
    tasks = dict(task.tasks) if isinstance(task, MixTask) else {"": task}
    awaiting = frozenset(name for name, member in tasks.items() if awaits(member))
    together = together if together is not None else len(awaiting) == len(tasks)
    owner.send((number, Loaded({name: reward_name(member) for name, member in tasks.items()}, awaiting, together)))
    if together:
        asyncio.run(_score_together(task, owner))
    else:
        _score_in_turn(task, owner)


def _score_in_turn(task: object, owner: Connection[Any, Any]) -> None:
    while True:
        try:
            number, (response, _) = owner.recv()
        except EOFError:
            return
        owner.send((number, score(*_resolved(task, response))))


async def _score_together(task: object, owner: Connection[Any, Any]) -> None:
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    async def answer(number: int, response: Response, limit_s: float) -> None:
        member, its_response = _resolved(task, response)
        try:
            async with asyncio.timeout(limit_s):
                scored = await score_async(member, its_response)
        except TimeoutError:
            scored = took_too_long(reward_name(member), response[0], limit_s)
        owner.send((number, scored))

    def receive() -> None:
        try:
            number, (response, limit_s) = owner.recv()
        except EOFError:
            closed.set()
            return
        answering = loop.create_task(answer(number, response, limit_s))
        running.add(answering)
        answering.add_done_callback(running.discard)

    loop.add_reader(owner.fileno(), receive)
    await closed.wait()


def _resolved(task: object, response: Response) -> tuple[Any, Response]:
    """The task that a response belongs to, and the response with the prompt as that task knows it."""
    if not isinstance(task, MixTask):
        return task, response
    member, prompt = task.scored_by(response[0])
    return member, (prompt, *response[1:])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
