"""The Ray actor that scores responses, apart from engines, trainer and driver: a reward function is the
user's own code and may be slow, hang, or take its process down."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.runs.logs import redirect_output
from asyncrl_cli.spec.sections import TaskSpec
from asyncrl_cli.tasks.errors import TaskError
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.scoring import score


class Scorer:
    """Loads the task once and scores in order, one response at a time."""

    def __init__(self, spec: TaskSpec, search_path: str, log_dir: str) -> None:
        redirect_output(log_dir, "scorer")
        self._spec = spec
        self._search_path = Path(search_path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def start(self) -> None:
        """Import the task. Raises ``TaskError``."""
        self._task = load_task(self._spec, self._search_path)

    def score(self, responses: list[tuple[Prompt, str, bool]]) -> list[float]:
        """Rewards of (prompt, response, finished) triples. Raises ``TaskError``, also after the time limit."""
        return [self._score_one(*response) for response in responses]

    def _score_one(self, prompt: Prompt, response: str, finished: bool) -> float:
        future = self._thread.submit(score, self._task, prompt, response, finished)
        try:
            return future.result(self._spec.reward_timeout_s)
        except FutureTimeout:
            raise TaskError(
                f"the reward of prompt {prompt.uid} took more than {self._spec.reward_timeout_s:g} s",
                place=f"task.use: {self._spec.use}",
                mend="Make it faster, or raise task.reward_timeout_s",
            ) from None
