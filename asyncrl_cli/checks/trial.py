"""A trial of the task before a run starts: rewards and environments are called on the first rows, in the same kind of
process and with the same limits as in the run. Agents are not tried, because they need a model.

Every start calls the user's plain rewards once, which takes less than a second. Only a ``thorough`` trial calls ready
tasks, async rewards (they may ask other machines) and environments (they may start sandboxes).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.core.errors import DataError, TaskError
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import REWARD, RewardFailure, Scored, missing_part
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import AgentTask, EnvironmentTask, TaskMix, scores_groups, task_of
from asyncrl_cli.tasks.mix import OneCall, reward_limit_s
from asyncrl_cli.workers.actors import BLOCKED_S
from asyncrl_cli.workers.messages import Load, Played, Work
from asyncrl_cli.workers.process import ProcessLost, WorkerProcess
from asyncrl_cli.workers.scoring import Response, awaits, reward_location

ROWS = 2
"""Number of rows on which each task is tried."""
SEARCHED = 100
"""Number of first rows to search for rows of each task in a mix."""
SHORT = "42"
"""A typical short response."""
HINT = "fix it: in a run such a failure costs a group of rollouts"
ALL_NONE = "every reward is None, so a run trains on no such response"

ALL_EQUAL = "a row's `answer` gets the same reward as an empty response"
EQUAL_HINT = "check the reward: equal rewards teach nothing (ignore this if a right response has another form)"


def try_tasks(experiment: Experiment, thorough: bool) -> Result:
    """Try the run's task, and the tasks of evaluation sets."""
    spec = experiment.spec
    splits = [prompts for prompts in (experiment.train_prompts, experiment.eval_prompts) if prompts]
    tasks = {"task": (experiment.tasks[""], spec.task, splits)}
    for name, chosen in spec.evaluation.sets.items():
        if chosen.task is None:
            splits.append(experiment.sets[name])
        else:
            own = experiment.tasks[name], chosen.task, [experiment.sets[name]]
            tasks[f"evaluation.sets.{name}.task"] = own
    found, warned = [], ""
    for location, (loaded, task, of_task) in tasks.items():
        try:
            tried = try_task(
                loaded,
                spec=task,
                search_path=experiment.search_path,
                splits=of_task,
                location=location,
                thorough=thorough,
                parts=spec.algorithm.reward_parts if location == "task" else (),
            )
        except TaskError as error:
            if any(":" in use for use in (task.use or "", *(member.use for member in task.mix))):
                raise
            # The code of a ready task is right, but its judge may not run yet, so the other tasks are still tried.
            warned = "a run loses the groups of such rows"
            tried = error.message
        if tried.endswith(ALL_NONE):
            warned = warned or "return a number for responses that can be scored (is a return statement missing?)"
        if tried.endswith(ALL_EQUAL):
            warned = warned or EQUAL_HINT
        found.append(f"{location}: {tried}")
    text = "; ".join(found)
    return Warned(text, warned) if warned else text


def try_task(
    task: Any,
    spec: TaskSpec,
    search_path: Path,
    splits: Sequence[Sequence[Prompt]],
    *,
    location: str,
    thorough: bool,
    parts: Iterable[str] = (),
) -> str:
    """Call a task's rewards and environments on the first rows of each split. Returns a text that counts the calls.

    Raises ``TaskError`` for the first failure, at the line of the user's code if it is known, otherwise at
    ``location``. A thorough trial of rewards raises ``ConfigError`` for one of the reward's ``parts`` that no response
    has.
    """
    scored: list[Response] = []
    played: list[Prompt] = []
    rows = [_first_rows(task, prompts, ROWS if thorough else 1) for prompts in splits]
    for prompt in chain.from_iterable(rows if thorough else rows[:1]):
        member = task_of(task, prompt)[0]
        member = member.task if isinstance(member, OneCall) else member
        if not isinstance(member, AgentTask | EnvironmentTask):
            if thorough or (reward_location(member) and not awaits(member)):
                texts = _responses(prompt) if thorough else [SHORT]
                if scores_groups(member):
                    texts = [*texts, SHORT]  # a group has at least two
                    scored.append((prompt, tuple(texts), tuple(map(bool, texts))))
                else:
                    scored += [(prompt, text, bool(text)) for text in texts]
        elif thorough and not isinstance(member, AgentTask):
            played.append(prompt)
    if not scored and not played:
        return "not tried"
    try:
        results = asyncio.run(_try(spec, search_path=search_path, scored=scored, played=played, location=location))
    except ProcessLost as lost:
        raise TaskError(f"the trial of the task failed: {lost}", location=location, hint=HINT) from None
    called = {"rewards": len(scored), "environments": len(played)}
    text = f"called on the first rows: {', '.join(f'{name} ({count})' for name, count in called.items() if count)}"
    known = [result for result in chain.from_iterable(results) if result.reward is not None]
    reported = {name for result in known for name in result.metrics}
    if thorough and known and not played and not spec.mix:
        for name in parts:
            if name not in (REWARD, *reported):
                raise missing_part(name, reported, "no response of the trial")
    if scored and not known:
        return f"{text}; {ALL_NONE}"
    rewards = defaultdict[str, set[float | None]](set)  # of the responses to each row
    for (prompt, *_), scores in zip(scored, results, strict=False):
        if "answer" in prompt.fields:
            rewards[prompt.uid].update(one.reward for one in scores)
    # Ready tasks are known to reward right answers, most of them in another form than the row's.
    judged = thorough and ":" in (spec.use or "") and rewards
    return f"{text}; {ALL_EQUAL}" if judged and all(len(of_row) == 1 for of_row in rewards.values()) else text


def opening_prompt(task: Any, spec: TaskSpec, search_path: Path, prompt: Prompt, *, location: str) -> Prompt | None:
    """Return what the policy reads first in an episode of a row, as a row with messages and tools; None if an agent
    writes it. Raises ``TaskError`` if the environment fails."""
    member, row = task_of(task, prompt)
    if isinstance(member, OneCall):
        return member.opening(row)
    if isinstance(member, AgentTask):
        return None

    async def played() -> Played:
        async with _process(Load(spec, search_path=search_path, work=Work.EPISODES, blocked_s=BLOCKED_S)) as process:
            return await process.play(prompt, None)

    result = asyncio.run(played())
    _refuse(result.score, location, "called with an empty reply")
    return result.opening


def _first_rows(task: Any, prompts: Sequence[Prompt], count: int) -> Iterator[Prompt]:
    rows = Counter[int]()
    left = count * (len(task.members) if isinstance(task, TaskMix) else 1)
    for row in range(min(SEARCHED, len(prompts))):
        with suppress(DataError):  # the run skips such a row
            prompt = prompts[row]
            member = id(task_of(task, prompt)[0])
            if rows[member] < count:
                rows[member] += 1
                left -= 1
                yield prompt
        if not left:
            return


def _responses(prompt: Prompt) -> list[str]:
    """The responses to score for a row. Most rows have the right response in the field ``answer``."""
    answer = prompt.fields.get("answer")
    return ["", SHORT] + ([str(answer)] if isinstance(answer, str | int | float) else [])


async def _try(
    spec: TaskSpec, search_path: Path, scored: Sequence[Response], played: Sequence[Prompt], location: str
) -> list[list[Scored]]:
    """Return the results of each of ``scored``. Raises ``TaskError`` for a failure."""
    results = []
    if scored:
        async with _process(Load(spec, search_path=search_path, work=Work.PLAIN, blocked_s=BLOCKED_S)) as process:
            for response in scored:
                result = await process.score(response, reward_limit_s(spec, response[0]))
                _refuse(result, location, f"called with the response {response[1]!r}")
                scores = result if isinstance(result, tuple) else (result,)
                results.append([one for one in scores if isinstance(one, Scored)])
    if played:
        async with _process(Load(spec, search_path=search_path, work=Work.EPISODES, blocked_s=BLOCKED_S)) as process:
            for prompt in played:
                _refuse((await process.play(prompt, None)).score, location, "called with an empty reply")
    return results


@asynccontextmanager
async def _process(load: Load) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(load, quiet=True)
    try:
        await process.start()
        yield process
    finally:
        process.close("the trial has ended")


def _refuse(result: object, location: str, how: str) -> None:
    if isinstance(result, RewardFailure):
        raise TaskError(f"{result.reason} ({how})", location=result.location or location, hint=HINT)
