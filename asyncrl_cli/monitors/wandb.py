"""Weights & Biases: a run with the id of the run, which a resumed run continues.

The library's process uploads; ``offline`` it only writes to the run's folder, and `wandb sync` uploads later. Metrics
of steps have their own names, evaluations those of MLflow. The x axis is ``step``: W&B's own counter refuses the steps
that a resumed run repeats.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.monitors.base import Ending, EvaluationResult, Monitor, RunInfo, evaluation_metrics
from asyncrl_cli.spec.sections import WandbSpec

STEP = "step"
INIT_S = 60.0
"""Seconds that a server may take to begin a run."""
UPLOAD_S = 10.0
"""Seconds that the last uploads may take; `wandb sync` sends what is left."""


class WeightsAndBiases(Monitor):
    """Logs every number."""

    name = "W&B"

    def __init__(self, spec: WandbSpec) -> None:
        self._spec = spec
        self._run: Any = None

    def started(self, run: RunInfo) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when the library is imported
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # MLflow's monitor measures the machine
            init_timeout=INIT_S,
            # The library's exit hook waits for uploads, too, and without a limit its wait is unbounded (decision 0032).
            finish_timeout=UPLOAD_S,
        )
        self._run = wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            mode=self._spec.mode,
            id=run.run_id,
            name=run.run_id,
            resume="allow",
            dir=run.folder,
            config=dict(run.spec),
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, "version": version, **metrics})

    def evaluated(self, result: EvaluationResult) -> None:
        self._run.log({STEP: result.step, **dict(evaluation_metrics(asdict(result)))})

    def finish(self, ending: Ending) -> str:
        import wandb

        offline = self._spec.mode == "offline"
        note = f"wandb sync {Path(self._run.settings.sync_dir)}" if offline else str(self._run.url)
        code = 0 if ending.phase == "finished" else 1
        self._run.finish(exit_code=code)
        wandb.teardown(code)  # its process is one of the run's, which are killed before an exit hook could end it
        return note


def check_key() -> None:
    """Raises ``ConfigError`` when there is no API key: W&B would ask for one at the terminal."""
    if not (os.environ.get("WANDB_API_KEY") or _is_logged_in()):
        raise ConfigError(
            "Weights & Biases has no API key",
            location="tracking.wandb",
            hint="set WANDB_API_KEY, call `wandb login`, or set tracking.wandb.mode to offline",
        )


def _is_logged_in() -> bool:
    """Whether `wandb login` has kept a key: its entries have the login `user`, for any server."""
    try:
        hosts = netrc(os.environ.get("NETRC", Path.home() / ".netrc")).hosts
    except FileNotFoundError:
        return False
    except (OSError, NetrcParseError):  # W&B itself may be able to read it
        return True
    return any(login == "user" for login, _, _ in hosts.values())
