"""The Ray actor that scores responses, apart from engines, trainer and driver.

It runs nothing of the user's itself, so it always answers; a reward that hangs or ends its process costs a
``RewardProcess``, which it replaces.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl_cli.runs.logs import redirect_output
from asyncrl_cli.spec.sections import TaskSpec
from asyncrl_cli.tasks.reward_process import ProcessEnded, RewardProcess
from asyncrl_cli.tasks.scoring import Response, RewardFailure, Scored


class Scorer:
    """Scores in order, one response at a time."""

    def __init__(self, spec: TaskSpec, search_path: str, log_dir: str) -> None:
        redirect_output(log_dir, "scorer")
        self._spec = spec
        self._search_path = Path(search_path)

    def start(self) -> str:
        """Load the task; returns what the user calls the reward. Raises ``TaskError``."""
        self._process = RewardProcess(self._spec, self._search_path)
        return self._process.name

    def score(self, responses: list[Response]) -> list[Scored | RewardFailure]:
        """What the first responses score: at least one, at most up to the first that cost the reward's process.

        One response may be tried twice, each time in a process that must be started.
        Raises ``TaskError`` when the task can no longer be loaded.
        """
        if not self._process.alive:
            self._process.close()
            self.start()
        process = self._process
        scored: list[Scored | RewardFailure] = []
        for response in responses:
            scored.append(self._score(response))
            if self._process is not process or not process.alive:
                break
        return scored

    def _score(self, response: Response) -> Scored | RewardFailure:
        try:
            return self._process.score(response)
        except ProcessEnded:  # whoever ended it, it may have been none of this response's doing
            self.start()
        try:
            return self._process.score(response)
        except ProcessEnded as ended:
            return RewardFailure(
                f"{self._process.name} ended its process twice ({ended}) on prompt {response[0].uid!r}"
            )
