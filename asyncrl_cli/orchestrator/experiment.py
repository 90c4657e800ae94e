"""A checked spec with its task and data, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl_cli.core.user_code import CODE_S, user_code
from asyncrl_cli.monitors.base import Monitor
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.rules import RULES
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.tasks.base import Split, is_episodic
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.prompts import load_prompts


@dataclass(slots=True)
class Experiment:
    spec: ExperimentSpec
    search_path: Path  # the folder of the user's own modules
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """The prompts of further evaluation sets, by name."""
    tasks: Mapping[str, Any] = field(default_factory=dict)
    """The tasks of the further evaluation sets by name, and the run's own task as ""."""
    monitors: Sequence[Monitor] = ()
    """The monitors that ``tracking`` enables, such as TensorBoard; not started."""

    @property
    def episodic(self) -> frozenset[str]:
        """The names of the evaluation sets with episodes as rollouts; "" stands for the run's own task."""
        return frozenset(name for name, task in self.tasks.items() if is_episodic(task))

    @classmethod
    def load(
        cls,
        spec: ExperimentSpec,
        search_path: Path,
        notice: Callable[[str], None] = lambda _: None,
        training: bool = True,
    ) -> Experiment:
        """Import the task and open the data; only the evaluations' prompts without ``training``, or if the run ends
        after its warm start. ``notice`` gets a text if something takes long. Raises ``UserError``."""
        training = training and spec.stop.steps != 0
        with user_code("importing the task", notice, CODE_S):
            task = load_task(spec.task, search_path, connect=True)
            tasks = {"": task} | {
                name: task
                if set_spec.task is None
                else load_task(set_spec.task, search_path, f"evaluation.sets.{name}.task", connect=True)
                for name, set_spec in spec.evaluation.sets.items()
            }
        # Without a limit, because it may need a download.
        with user_code("opening the data", notice):
            train_prompts = load_prompts("train", spec.data.train, task=task, base=search_path) if training else ()
            held_out = spec.data.eval
            eval_prompts = () if held_out is None else load_prompts("eval", held_out, task=task, base=search_path)
            sets = {}
            for name, set_spec in spec.evaluation.sets.items():
                split: Split = "train" if set_spec.data.path is None and set_spec.data.split == "train" else "eval"
                location = f"evaluation.sets.{name}.data"
                sets[name] = load_prompts(
                    split, split_spec=set_spec.data, task=tasks[name], base=search_path, location=location
                )
            return cls(
                _counted(spec, len(train_prompts), notice),
                search_path,
                train_prompts,
                eval_prompts,
                sets,
                tasks,
            )


def _counted(spec: ExperimentSpec, prompt_count: int, notice: Callable[[str], None]) -> ExperimentSpec:
    """The spec with `stop.steps` in place of `stop.epochs`. ``notice`` gets warnings that follow from the number."""
    if spec.stop.epochs is None:
        return spec
    every = spec.pipeline.publish_every
    steps = -(-prompt_count * spec.stop.epochs // (spec.pipeline.groups_per_step * every)) * every
    stop = spec.stop.model_copy(update={"steps": min(steps, spec.stop.total), "epochs": None})
    counted = spec.model_copy(update={"stop": stop})
    known_problems = {problem for rule in RULES for problem in rule(spec)}
    for problem in (problem for rule in RULES for problem in rule(counted)):
        if problem not in known_problems:
            notice(str(problem))
    return counted
