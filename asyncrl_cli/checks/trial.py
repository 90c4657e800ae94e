"""A trial of the task before a run starts: rewards and environments are called on the first rows, in the same kind of
process and with the same limits as in the run. Agents are not tried, because they need a model.

Every start calls the user's plain rewards once, which takes less than a second. Only a ``thorough`` trial calls ready
tasks, async rewards (they may ask other machines) and environments (they may start sandboxes).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.core.errors import DataError, TaskError
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import REWARD, RewardFailure, Scored, unknown_metric
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.base import AgentTask, EnvironmentTask, TaskMix, scores_groups, task_of
from asyncrl_cli.tasks.mix import OneCall, reward_limit_s
from asyncrl_cli.workers.actors import BLOCKED_S
from asyncrl_cli.workers.messages import Load, Role
from asyncrl_cli.workers.process import ProcessLost, WorkerProcess
from asyncrl_cli.workers.scoring import Response, awaits, reward_location

ROWS = 2
"""Number of rows on which each task is tried."""
SEARCHED_ROWS = 100
"""Number of rows to search for rows of each task in a mix."""
SHORT = "42"
"""A typical short response."""
HINT = "fix it: in a run such a failure costs a group of rollouts"
ALL_NONE = "every reward is None, so a run trains on no such response"
NONE_HINT = "return a number for responses that can be scored (is a return statement missing?)"


def try_tasks(experiment: Experiment, thorough: bool) -> Result:
    """Try the run's task, and the tasks of evaluation sets. A thorough trial of rewards raises ``ConfigError`` for one
    of `algorithm.reward_parts` that no response has."""
    spec = experiment.spec
    splits = [prompts for prompts in (experiment.train_prompts, experiment.eval_prompts) if prompts]
    tasks = {"task": (experiment.tasks[""], spec.task, splits)}
    for name, eval_set in spec.evaluation.sets.items():
        if eval_set.task is None:
            splits.append(experiment.sets[name])
        else:
            tasks[f"evaluation.sets.{name}.task"] = experiment.tasks[name], eval_set.task, [experiment.sets[name]]
    texts, hint = [], ""
    for location, (task, task_spec, task_splits) in tasks.items():
        try:
            trial = Trial(task, spec=task_spec, search_path=experiment.search_path, location=location)
            text = trial.run(task_splits, thorough)
        except TaskError as error:
            if any(":" in use for use in (task_spec.use or "", *(member.use for member in task_spec.mix))):
                raise
            # The code of a ready task is right, but its judge may not run yet, so the other tasks are still tried.
            hint = "a run loses the groups of such rows"
            text = error.message
        else:
            if thorough and location == "task":
                trial.check_parts(spec.algorithm.reward_parts)
        if text.endswith(ALL_NONE):
            hint = hint or NONE_HINT
        texts.append(f"{location}: {text}")
    return Warned("; ".join(texts), hint) if hint else "; ".join(texts)


class Trial:
    """The calls of one task's rewards and environments on the first rows of each split.

    A failure is a ``TaskError`` at the line of the user's code if it is known, otherwise at ``location``.
    """

    def __init__(self, task: Any, spec: TaskSpec, search_path: Path, *, location: str) -> None:
        self._task = task
        self._spec = spec
        self._search_path = search_path
        self._location = location
        self._scores: list[Scored] = []
        self._played = False

    def run(self, splits: Sequence[Sequence[Prompt]], thorough: bool) -> str:
        """Try the task, and return a text that counts the calls."""
        responses: list[Response] = []
        episodes: list[Prompt] = []
        rows = [_first_rows(self._task, prompts, ROWS if thorough else 1) for prompts in splits]
        for prompt in chain.from_iterable(rows if thorough else rows[:1]):
            member = task_of(self._task, prompt)[0]
            member = member.task if isinstance(member, OneCall) else member
            if not isinstance(member, AgentTask | EnvironmentTask):
                if thorough or (reward_location(member) and not awaits(member)):
                    texts = _responses(prompt) if thorough else [SHORT]
                    if scores_groups(member):
                        texts = [*texts, SHORT]  # a group has at least two
                        responses.append((prompt, tuple(texts), tuple(map(bool, texts))))
                    else:
                        responses += [(prompt, text, bool(text)) for text in texts]
            elif thorough and not isinstance(member, AgentTask):
                episodes.append(prompt)
        if not responses and not episodes:
            return "not tried"
        try:
            asyncio.run(self._call(responses, episodes))
        except ProcessLost as lost:
            raise TaskError(f"the trial of the task failed: {lost}", location=self._location, hint=HINT) from None
        counts = {"rewards": len(responses), "environments": len(episodes)}
        text = f"called on the first rows: {', '.join(f'{name} ({count})' for name, count in counts.items() if count)}"
        return f"{text}; {ALL_NONE}" if responses and not self._scores else text

    def check_parts(self, parts: Iterable[str]) -> None:
        """Raise ``ConfigError`` for one of the reward's ``parts`` that no response had. Episodes may end too early to
        have them all."""
        reported = {name for score in self._scores for name in score.metrics}
        for name in parts if self._scores and not self._played and not self._spec.mix else ():
            if name not in (REWARD, *reported):
                raise unknown_metric(name, reported, "no response of the trial")

    async def _call(self, responses: Sequence[Response], episodes: Sequence[Prompt]) -> None:
        if responses:
            async with _process(self._load(Role.PLAIN)) as process:
                for response in responses:
                    result = await process.score(response, reward_limit_s(self._spec, response[0]))
                    _refuse(result, self._location, f"called with the response {response[1]!r}")
                    scores = result if isinstance(result, tuple) else (result,)
                    self._scores += [s for s in scores if isinstance(s, Scored) and s.reward is not None]
        if episodes:
            self._played = True
            async with _process(self._load(Role.EPISODES)) as process:
                for prompt in episodes:
                    _refuse((await process.play(prompt, None)).score, self._location, "called with an empty reply")

    def _load(self, role: Role) -> Load:
        return Load(self._spec, search_path=self._search_path, role=role, blocked_s=BLOCKED_S)


def _first_rows(task: Any, prompts: Sequence[Prompt], count: int) -> Iterator[Prompt]:
    """Up to ``count`` of the first rows for each task of a mix."""
    row_counts = Counter[int]()
    missing_rows = count * (len(task.members) if isinstance(task, TaskMix) else 1)
    for row in range(min(SEARCHED_ROWS, len(prompts))):
        with suppress(DataError):  # the run skips such a row
            prompt = prompts[row]
            member = id(task_of(task, prompt)[0])
            if row_counts[member] < count:
                row_counts[member] += 1
                missing_rows -= 1
                yield prompt
        if not missing_rows:
            return


def _responses(prompt: Prompt) -> list[str]:
    """The responses to score for a row. Most rows have the right response in the field ``answer``."""
    answer = prompt.fields.get("answer")
    return ["", SHORT] + ([str(answer)] if isinstance(answer, str | int | float) else [])


@asynccontextmanager
async def _process(load: Load) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(load, quiet=True)
    try:
        await process.start()
        yield process
    finally:
        process.close("the trial has ended")


def _refuse(result: object, location: str, circumstances: str) -> None:
    if isinstance(result, RewardFailure):
        raise TaskError(f"{result.reason} ({circumstances})", location=result.location or location, hint=HINT)
