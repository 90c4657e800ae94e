"""The checks before a start. `asyncrl train` begins with them, and `asyncrl train --dry-run` makes only them.

Invariant: no run folder, no MLflow run and no process of a run exists before these checks have passed (decision 0028).
With ``thorough`` (`--dry-run`), vLLM also checks the engine's settings, in a separate process that takes ten seconds,
and there is more time for prompts. A check that depends on a failed check is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl_cli.checks import model, prompts, services
from asyncrl_cli.checks.finding import Check, Finding, Result, Status, Warned, findings_of, joined, run_check
from asyncrl_cli.checks.hosts import examine_cluster, refuse
from asyncrl_cli.checks.machine import START_CHECKS, machine_checks
from asyncrl_cli.checks.memory import check_memory_estimate, resolve_microbatch, resolve_rollouts
from asyncrl_cli.checks.programs import check_engine
from asyncrl_cli.checks.trial import try_tasks
from asyncrl_cli.core.errors import ConfigError, UserError
from asyncrl_cli.core.imports import large_imports
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.core.user_code import CODE_S, user_code
from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.sources import row_location
from asyncrl_cli.data.supervised_rows import RowEncoder, Rows
from asyncrl_cli.gateway.parsers import check_reasoning_parser, check_tool_parser
from asyncrl_cli.monitors.base import Monitor
from asyncrl_cli.monitors.extras import load_monitors
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.interrupts import stop_on_signals
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.rollout.engine_settings import check_engine_arguments, engine_arguments
from asyncrl_cli.rollout.response_text import end_tokens
from asyncrl_cli.sizing.config import load_config
from asyncrl_cli.sizing.host import version_bytes
from asyncrl_cli.sizing.microbatch import is_auto
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.spec.inputs import EpisodeSpec, SandboxSpec, WarmStart
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.reaper import running_reaper
from asyncrl_cli.tasks.episode_sandbox import check_images

PROMPTS_S, THOROUGH_PROMPTS_S = 0.5, 10.0
"""Time limit, in seconds, for trying the prompts of a split."""
PROMPT_CHECKS = frozenset(
    {"task and data", "model files", "tokenizer", "chat template", "data.train", "data.eval", "first prompt"}
)
"""The checks that show the first prompt, and those that it needs."""
TRAINING_CHECKS = frozenset(
    {"memory", "runs folder", "tracking", "data.train", "micro-batch", "memory with weights", "algorithm"}
)
"""The checks that an evaluation without training does not need."""


class StartChecks:
    """The checks of one spec, as a context manager. Inside it there is a folder for temporary files, and signals raise
    ``KeyboardInterrupt``."""

    def __init__(
        self,
        spec: ExperimentSpec,
        search_path: Path,
        notice: Callable[[str], None],
        thorough: bool = False,
        references: Mapping[tuple[str, ...], str] | None = None,
        training: bool = True,
        takes_data: bool = True,
    ) -> None:
        """``search_path``: the folder of the user's own modules. ``notice`` gets a text when something takes long.
        ``references``: from ``LoadedSpec``; without them, temporary files would contain values from the environment.
        ``training``: False for an evaluation, which starts only engines. ``takes_data``: False if the run takes no
        further prompt from `data.train`."""
        self._spec = spec
        self._search_path = search_path
        self._notice = notice
        self._thorough = thorough
        self._references = references or {}
        self._training = training
        self._takes_data = takes_data and spec.stop.steps != 0
        self._open = ExitStack()
        self._folder = Path()
        self._model_dir = ""
        self._monitors: Sequence[Monitor] = ()
        self._experiment: Experiment | None = None
        self._tokenizer: Any = None
        self._config: Any = None
        self._sized: SizedModel | None = None

    def __enter__(self) -> StartChecks:
        self._open.enter_context(stop_on_signals())  # first: otherwise a signal ends the process immediately
        self._folder = self._open.enter_context(running_reaper(Path(os.devnull), "check-"))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def experiment(self) -> Experiment:
        """Make all checks, and return the experiment, ready to run. ``notice`` gets warnings.

        Raises the first failure with the exit code of a mistake in the spec (2), because nothing was started.
        """
        for check in self._checks():
            if check.name in TRAINING_CHECKS and not self._training:
                continue
            try:
                finding = run_check(check)
            except UserError as error:
                error.exit_code = ConfigError.exit_code
                raise
            if finding.status is Status.WARNING:
                self._notice(str(finding))
        assert self._experiment is not None
        if self._training:
            refuse(self._hosts(), self._notice)
        return self._experiment

    def findings(self, names: Collection[str] | None = None) -> Iterator[Finding]:
        """Make the checks with these names, by default all, and yield their findings, including failures."""
        yield from findings_of(check for check in self._checks() if names is None or check.name in names)
        if names is None:
            yield from self._hosts()

    def _checks(self) -> Iterator[Check]:
        """All checks, the cheapest first. The order matters: later checks use what earlier checks have loaded."""
        spec = self._spec
        yield from (check for check in machine_checks(spec.runs_dir, spec) if check.name in START_CHECKS)
        yield Check("tracking", self._tracking)
        yield Check("upload", lambda: services.check_upload(spec))
        yield Check("engine arguments", self._engine_names)
        yield Check("task and data", self._task)
        experiment = self._experiment
        episodic = experiment is not None and bool(experiment.episodic)
        if experiment is not None and (rows := _rows_with_images(experiment)):
            yield Check("sandbox images", lambda: joined(*(check_images(*arguments) for arguments in rows)))
        yield Check("gateway", lambda: services.check_gateway(spec, episodic))
        if experiment is not None:
            yield Check("kind of rollouts", partial(self._rollouts, experiment.episodic))
        yield Check("model files", lambda: model.check_saved_model(spec.model))
        yield Check("tokenizer", self._load_tokenizer, ("model files",))
        yield Check("chat template", lambda: self._chat_template(episodic), ("tokenizer",))
        if (start := spec.model.warm_start) is not None:
            yield Check("warm start", partial(self._supervised_rows, start), ("task and data", "chat template"))
        if experiment is not None:
            yield from self._prompt_checks(experiment)
        if spec.algorithm.reference_path is not None:
            yield Check("reference model", lambda: model.check_teacher(spec, self._tokenizer), ("tokenizer",))
        yield Check("model", self._model, ("tokenizer",))
        yield Check("engine cache", self._engine_cache, ("task and data", "model"))
        if spec.trainer.gpus_per_rank or is_auto(spec.trainer):
            yield Check("micro-batch", self._microbatch, ("task and data", "model"))
        yield Check("memory with weights", self._weights_memory, ("model", "engine cache"))
        yield Check("algorithm", lambda: model.check_algorithm(spec, self._search_path, self._notice))
        yield Check("rewards", self._trial, ("task and data",))
        if self._thorough:
            # In a separate process, because an import of vLLM here would keep 700 MB until the run's end.
            yield Check("engine", self._engine, ("model",))

    def _engine_names(self) -> str:
        rollout = self._spec.rollout
        if rollout.engine_args:
            check_engine_arguments(rollout.engine_args, engine_arguments())
        check_tool_parser(rollout.tool_parser)
        check_reasoning_parser(rollout.reasoning_parser)
        reasoning = f", reasoning parser {rollout.reasoning_parser}" if rollout.reasoning_parser else ""
        return f"{len(rollout.engine_args)} engine arguments, tool parser {rollout.tool_parser or 'hermes'}{reasoning}"

    def _tracking(self) -> Result:
        with user_code("importing the monitors", self._notice, CODE_S):
            self._monitors = load_monitors(self._spec.tracking, self._search_path)
        return services.check_tracking(self._spec, self._thorough)

    def _task(self) -> str:
        loaded_experiment = Experiment.load(
            self._spec, search_path=self._search_path, notice=self._notice, training=self._training
        )
        experiment = self._experiment = replace(loaded_experiment, monitors=self._monitors)
        task = self._spec.task
        name = task.use or f"a mix of {', '.join(member.name for member in task.mix)}"
        held_out = f"{len(experiment.eval_prompts):,}" if self._spec.data.eval is not None else "none"
        text = f"{name}; {len(experiment.train_prompts):,} prompts to train on, {held_out} held out"
        if self._spec.stop.epochs is not None:
            text += f"; the run ends after {counted(experiment.spec.stop.total, 'step')}"
        return text

    def _trial(self) -> Result:
        assert self._experiment is not None
        return try_tasks(self._experiment, self._thorough)

    def _load_tokenizer(self) -> str:
        with large_imports():
            import transformers.models.auto.modeling_auto  # noqa: F401

        from asyncrl_cli.data.tokenizer import load_tokenizer, without_progress_bars
        from asyncrl_cli.train.model.initial import model_stub

        def load() -> Any:
            self._model_dir = str(model_stub(self._spec, self._folder))
            return load_tokenizer(self._model_dir, self._spec.model.chat_template)

        with without_progress_bars():
            self._tokenizer = model.load_saved_tokenizer(load)
        template = "no chat template" if self._tokenizer.chat_template is None else "a chat template"
        return f"{len(self._tokenizer):,} tokens, {template}"

    def _rollouts(self, episodic: frozenset[str]) -> Result:
        """Refuse settings that the run's rollouts do not read. ``episodic``: as in ``Experiment``."""
        spec = self._spec
        has_prompts = len(episodic) <= len(spec.evaluation.sets) or spec.model.warm_start is not None
        for key, is_unused, reason in (
            ("rollout.history", not episodic and spec.rollout.history == "template", "no task calls the model twice"),
            ("task.episode", "" not in episodic and spec.task.episode != EpisodeSpec(), "rollouts are no episodes"),
            (
                "data.apply_chat_template",
                not has_prompts and not spec.data.apply_chat_template,
                "all rollouts are episodes, for which the task writes the model's input",
            ),
        ):
            if is_unused:
                raise ConfigError(f"has no effect: {reason}", location=key, hint="remove it")
        if spec.rollout.reasoning_parser is None or episodic:
            return "episodes" if episodic else "single responses"
        text = "rollout.reasoning_parser: only `asyncrl serve` uses it, because rollouts are no episodes"
        return Warned(text, "let the reward skip the reasoning; it reads the entire response")

    def _chat_template(self, episodic: bool) -> Result:
        spec, tokenizer = self._spec, self._tokenizer
        template = ChatTemplate.from_spec(spec, tokenizer)
        prompts.check_template_kwargs(template, spec.model.chat_template_kwargs)
        features = prompts.check_template(
            template,
            tokenizer,
            episodic=episodic,
            reasoning=spec.rollout.reasoning_parser is not None,
            required=episodic or spec.data.apply_chat_template or spec.model.chat_template is not None,
        )
        ends = end_tokens(self._model_dir, tokenizer)
        turns: Result = ""
        if spec.rollout.history == "template":
            turns = "earlier turns: rendered again by the template in each call"
        elif episodic:
            turns = joined(prompts.check_turns(template, tokenizer, ends), "earlier turns: as sampled")
        return joined(prompts.check_reply_end(template, tokenizer, ends), features, turns)

    def _prompt_checks(self, experiment: Experiment) -> Iterator[Check]:
        data, sets = self._spec.data, self._spec.evaluation.sets
        splits = {
            "data.train": ("", experiment.train_prompts, data.train),
            "data.eval": ("", experiment.eval_prompts, data.eval),
            **{f"evaluation.sets.{name}.data": (name, rows, sets[name].data) for name, rows in experiment.sets.items()},
        }
        for location, (name, rows, split) in splits.items():
            if split is None or name in experiment.episodic:  # then the task writes the model's prompts
                continue
            if location == "data.train" and not self._takes_data:
                continue
            yield Check(location, partial(self._prompts, location, rows), ("chat template",))
            if self._thorough and location == "data.train" and len(rows):
                yield Check("first prompt", partial(self._first_prompt, rows), (location,))

    def _prompts(self, location: str, rows: Sequence[Prompt]) -> Result:
        return prompts.check_prompts(
            rows,
            PromptEncoder.of(self._spec, self._tokenizer),
            location=location,
            limit_s=THOROUGH_PROMPTS_S if self._thorough else PROMPTS_S,
            locate=partial(row_location, location, rows),
        )

    def _supervised_rows(self, warm_start: WarmStart) -> Result:
        ends = end_tokens(self._model_dir, self._tokenizer)
        return prompts.check_rows(
            Rows.from_spec(warm_start, self._search_path),
            RowEncoder(PromptEncoder.of(self._spec, self._tokenizer), ends, warm_start),
            self._spec,
            limit_s=THOROUGH_PROMPTS_S if self._thorough else PROMPTS_S,
        )

    def _first_prompt(self, rows: Sequence[Prompt]) -> Result:
        return prompts.shown_prompt(rows, PromptEncoder.of(self._spec, self._tokenizer))

    def _model(self) -> Result:
        location = "model.init.config" if self._spec.model.init is not None else "model.path"
        self._config = load_config(self._model_dir, location)
        result, self._sized, self._spec = model.check_model(self._spec, self._config, self._tokenizer)
        return result

    def _engine_cache(self) -> Result:
        assert self._sized is not None and self._experiment is not None
        self._spec, result = resolve_rollouts(self._spec, self._sized)
        experiment_spec = self._experiment.spec.model_copy(update={"rollout": self._spec.rollout})
        self._experiment = replace(self._experiment, spec=experiment_spec)
        return result if self._spec.rollout.gpus_per_engine else model.check_cache(self._spec, self._config)

    def _microbatch(self) -> Result:
        assert self._sized is not None and self._experiment is not None
        self._spec, result = resolve_microbatch(self._spec, self._sized)
        experiment_spec = self._experiment.spec.model_copy(update={"trainer": self._spec.trainer})
        self._experiment = replace(self._experiment, spec=experiment_spec)
        return result

    def _weights_memory(self) -> Result:
        assert self._sized is not None
        return check_memory_estimate(self._spec, self._sized, self._thorough)

    def _engine(self) -> str:
        return check_engine(self._spec, references=self._references, folder=self._folder, model_dir=self._model_dir)

    def _hosts(self) -> Iterator[Finding]:
        """Check that a joined cluster has the resources, and that its hosts can work together.

        This is the last check, because the memory that hosts need depends on the model.
        """
        spec = self._spec
        if spec.cluster.address is not None:
            replica_bytes = version_bytes(spec, self._sized) if self._sized is not None else 0
            yield from examine_cluster(
                spec.cluster.address, spec=spec, runs_dir=spec.runs_dir, replica_bytes=replica_bytes
            )


def _rows_with_images(experiment: Experiment) -> list[tuple[SandboxSpec, list[Sequence[Prompt]], str]]:
    """Sandboxes with images that rows name, with the rows and the task's key."""
    spec = experiment.spec
    shared = [experiment.sets[name] for name, each in spec.evaluation.sets.items() if each.task is None]
    tasks = [(spec.task.sandbox, [experiment.train_prompts, experiment.eval_prompts, *shared], "task")]
    for name, each in spec.evaluation.sets.items():
        if each.task is not None:
            tasks.append((each.task.sandbox, [experiment.sets[name]], f"evaluation.sets.{name}.task"))
    return [
        (sandbox, splits, location)
        for sandbox, splits, location in tasks
        if sandbox is not None and "{" in (sandbox.image or "")
    ]
