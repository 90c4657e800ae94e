"""The checks of a start, one after another, without starting processes: `asyncrl train` begins with them, and
`asyncrl train --dry-run` makes only them.

Invariant: no run folder, no MLflow run and no process of a run exists before these checks have passed. With
``thorough`` (`--dry-run`) vLLM also checks the engine's settings, in a separate process that takes ten seconds, and
there is more time for prompts. A check that depends on a failed one is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl_cli.checks import engine as engine_checks
from asyncrl_cli.checks import machine as machine_checks
from asyncrl_cli.checks import memory as memory_checks
from asyncrl_cli.checks import model as model_checks
from asyncrl_cli.checks import prompts as prompt_checks
from asyncrl_cli.checks.finding import Finding, joined
from asyncrl_cli.checks.hosts.examine import examine_cluster, refuse
from asyncrl_cli.checks.hosts.newcomers import Newcomers
from asyncrl_cli.checks.trial import try_task
from asyncrl_cli.core.errors import ConfigError, TaskError, UserError
from asyncrl_cli.core.imports import large_imports, missing_package
from asyncrl_cli.core.user_code import CODE_S, user_code
from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.data.sources import row_location
from asyncrl_cli.gateway.reasoning import check_reasoning_parser
from asyncrl_cli.gateway.tool_calls import check_tool_parser
from asyncrl_cli.monitors.base import Monitor
from asyncrl_cli.monitors.load import load_monitors
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.interrupts import stop_on_signals
from asyncrl_cli.orchestrator.prompt_source import PromptEncoder
from asyncrl_cli.rollout.engine_settings import check_engine_arguments, engine_arguments
from asyncrl_cli.sizing.config import load_config
from asyncrl_cli.sizing.host import version_bytes
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.spec.inputs import SplitSpec
from asyncrl_cli.spec.load import dump_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.reaper import running_reaper

PROMPTS_S, THOROUGH_PROMPTS_S = 0.5, 10.0
"""Seconds for trying the prompts of one split."""
PROMPT_CHECKS = frozenset(
    {"task and data", "model files", "tokenizer", "chat template", "data.train", "data.eval", "first prompt"}
)
"""The checks that show what the model gets as a prompt."""
MODEL_CHECKS = frozenset({"model files", "tokenizer", "model"})
"""The checks that determine the model's size, which `asyncrl doctor --cluster` needs."""
ENGINE_S = 180.0
"""Seconds that vLLM may take to check its settings; a cold disk takes most of them."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``look`` returns what it found, or raises a ``UserError``. ``needs``: checks that must have passed."""

    name: str
    look: Callable[[], str | Finding]
    needs: tuple[str, ...] = ()


class StartChecks:
    """The checks of one spec. Use it as a context manager: within it there is a folder for temporary files, and signals
    raise ``KeyboardInterrupt``."""

    def __init__(
        self,
        spec: ExperimentSpec,
        search_path: Path,
        notice: Callable[[str], None],
        thorough: bool = False,
        references: Mapping[tuple[str, ...], str] | None = None,
    ) -> None:
        """``search_path``: the folder of the user's own modules. ``notice`` is called with a text when something takes
        long. ``references``: those of ``LoadedSpec``; without them, temporary files would contain values from the
        environment."""
        self._spec = spec
        self._search_path = search_path
        self._notice = notice
        self._thorough = thorough
        self._references = references or {}
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
        """The experiment, ready to run; ``notice`` gets warnings. Raises the first failure, as a mistake of the spec
        (exit code 2): nothing was started."""
        for check in self._checks():
            try:
                found = _result(check)
            except UserError as error:
                error.exit_code = ConfigError.exit_code
                raise
            if isinstance(found, Finding) and found.status == "warning":
                self._notice(f"{found.check}: {found.found}. {found.hint}")
        refuse(self._hosts(), self._notice)
        assert self._experiment is not None
        if self._spec.cluster.address is None:
            return self._experiment
        return replace(self._experiment, examiner=partial(Newcomers, self._spec, self._replica_bytes))

    def findings(self, only: Collection[str] | None = None) -> Iterator[Finding]:
        """What each check found, including failures. With ``only``: only these checks, and those of the cluster's
        hosts."""
        yield from self._found(only)
        yield from self._hosts()

    def prompt_findings(self) -> Iterator[Finding]:
        """What the checks of the chat template and the first prompt found, and the checks that these need."""
        yield from self._found(PROMPT_CHECKS)

    def _found(self, only: Collection[str] | None) -> Iterator[Finding]:
        failed: set[str] = set()
        for check in self._checks():
            if only is not None and check.name not in only:
                continue
            if missing := failed.intersection(check.needs):
                failed.add(check.name)
                yield Finding(
                    check.name, "warning", f"not checked, as it needs {', '.join(sorted(missing))}, which failed"
                )
                continue
            try:
                found = _result(check)
            except UserError as error:
                failed.add(check.name)
                location = f"{error.location}: " if error.location else ""
                yield Finding(check.name, "failure", f"{location}{error.message}", error.hint)
            else:
                yield found if isinstance(found, Finding) else Finding(check.name, "ok", found)

    def _checks(self) -> Iterator[Check]:
        """All checks, the cheapest first."""
        spec = self._spec
        yield Check("devices", partial(machine_checks.check_devices, spec))
        yield Check("memory", partial(machine_checks.check_memory, spec))
        yield Check("runs folder", partial(machine_checks.check_run_folder, spec))
        yield Check("packages", machine_checks.check_packages)
        yield Check("tracking", self._tracking)
        yield Check("notify", partial(machine_checks.check_notify, spec))
        yield Check("engine arguments", self._engine_names)
        yield Check("task and data", self._task)
        episodic = self._experiment is not None and bool(self._experiment.episodic)
        yield Check("gateway", partial(machine_checks.check_gateway, spec, episodic))
        yield Check("model files", partial(model_checks.check_saved_model, spec.model))
        yield Check("tokenizer", self._load_tokenizer, ("model files",))
        yield Check("chat template", partial(self._chat_template, episodic), ("tokenizer",))
        yield Check("special tokens", self._special_tokens, ("tokenizer",))
        yield from self._prompt_checks()
        yield Check("model", self._model, ("tokenizer",))
        yield Check("engine cache", self._cache, ("model",))
        yield Check("memory with weights", self._weights_memory, ("model", "engine cache"))
        yield Check("algorithm", self._algorithm)
        yield Check("rewards", self._trial, ("task and data",))
        if self._thorough:
            yield Check("engine", self._engine, ("model",))

    def _engine_names(self) -> str:
        rollout = self._spec.rollout
        if rollout.engine_args:
            check_engine_arguments(rollout.engine_args, engine_arguments())
        check_tool_parser(rollout.tool_parser)
        check_reasoning_parser(rollout.reasoning_parser)
        reasoning = f", reasoning parser {rollout.reasoning_parser}" if rollout.reasoning_parser else ""
        return f"{len(rollout.engine_args)} engine arguments, tool parser {rollout.tool_parser or 'hermes'}{reasoning}"

    def _tracking(self) -> str | Finding:
        with user_code("importing the monitors", self._notice, CODE_S):
            self._monitors = load_monitors(self._spec.tracking, self._search_path)
        return machine_checks.check_tracking(self._spec, self._thorough)

    def _task(self) -> str:
        experiment = self._experiment = Experiment.load(self._spec, self._search_path, self._notice)
        experiment.monitors = self._monitors
        task = self._spec.task
        name = task.use or f"a mix of {', '.join(member.name for member in task.mix)}"
        held_out = f"{len(experiment.eval_prompts):,}" if self._spec.data.eval is not None else "none"
        return f"{name}; {len(experiment.train_prompts):,} prompts to train on, {held_out} held out"

    def _trial(self) -> str | Finding:
        """Call the rewards and environments of the run's task, and of each evaluation set's own task."""
        experiment, spec = self._experiment, self._spec
        assert experiment is not None
        splits = [experiment.train_prompts, experiment.eval_prompts]
        tasks = {"task": (experiment.tasks[""], spec.task, splits)}
        for name, chosen in spec.evaluation.sets.items():
            if chosen.task is None:
                splits.append(experiment.sets[name])
            else:
                own = experiment.tasks[name], chosen.task, [experiment.sets[name]]
                tasks[f"evaluation.sets.{name}.task"] = own
        found, warned = [], False
        for location, (loaded, task, of_task) in tasks.items():
            try:
                tried = try_task(loaded, task, self._search_path, of_task, location, thorough=self._thorough)
            except TaskError as error:
                if any(":" in use for use in (task.use or "", *(member.use for member in task.mix))):
                    raise
                # A ready task's code is right, but its judge may not run yet. The other tasks are still tried.
                warned = True
                tried = error.message
            found.append(f"{location}: {tried}")
        text = "; ".join(found)
        return Finding("rewards", "warning", text, "a run loses the groups of such rows") if warned else text

    def _load_tokenizer(self) -> str:
        with large_imports():
            import transformers.models.auto.modeling_auto  # noqa: F401

        from asyncrl_cli.train.model.initial import model_stub
        from asyncrl_cli.train.model.tokenizer import load_tokenizer, without_progress_bars

        model = self._spec.model

        def load() -> Any:
            self._model_dir = str(model_stub(self._spec, self._folder))
            return load_tokenizer(self._model_dir, model.chat_template)

        with without_progress_bars():
            self._tokenizer = model_checks.load_saved_tokenizer(load)
        template = "no chat template" if self._tokenizer.chat_template is None else "a chat template"
        return f"{len(self._tokenizer):,} tokens, {template}"

    def _chat_template(self, episodic: bool) -> str | Finding:
        from asyncrl_cli.train.model.tokenizer import end_tokens

        spec, tokenizer = self._spec, self._tokenizer
        prompt_checks.check_template_kwargs(tokenizer, spec.model.chat_template_kwargs)
        template = ChatTemplate(tokenizer, spec.model.chat_template_kwargs)
        shown = prompt_checks.check_template(
            template,
            tokenizer,
            episodic=episodic,
            reasoning=spec.rollout.reasoning_parser is not None,
            required=episodic or spec.data.apply_chat_template or spec.model.chat_template is not None,
        )
        ends = end_tokens(self._model_dir, tokenizer)
        return joined("chat template", prompt_checks.check_reply_end(template, tokenizer, ends), shown)

    def _special_tokens(self) -> str | Finding:
        return prompt_checks.check_special_tokens(self._tokenizer, self._spec.task.special_tokens)

    def _prompt_checks(self) -> Iterator[Check]:
        if (experiment := self._experiment) is None:
            return
        limit_s = THOROUGH_PROMPTS_S if self._thorough else PROMPTS_S
        data, sets = self._spec.data, self._spec.evaluation.sets
        splits = {
            "data.train": ("", experiment.train_prompts, data.train),
            "data.eval": ("", experiment.eval_prompts, data.eval),
            **{f"evaluation.sets.{name}.data": (name, rows, sets[name].data) for name, rows in experiment.sets.items()},
        }
        for location, (name, prompts, split) in splits.items():
            if split is None or name in experiment.episodic:
                continue  # in episodes the task decides what the model gets

            def look(location: str = location, prompts: Any = prompts, split: SplitSpec = split) -> str | Finding:
                locate = partial(row_location, split, self._search_path, location)
                return prompt_checks.check_prompts(prompts, self._encoder(), location, limit_s, location, locate)

            yield Check(location, look, ("chat template",))
            if self._thorough and location == "data.train":
                yield Check("first prompt", self._first_prompt, (location,))

    def _first_prompt(self) -> str | Finding:
        assert self._experiment is not None
        return prompt_checks.first_prompt(self._experiment.train_prompts, self._encoder(), self._tokenizer)

    def _encoder(self) -> PromptEncoder:
        return PromptEncoder.of(self._spec, self._tokenizer)

    def _model(self) -> str:
        location = "model.init.config" if self._spec.model.init is not None else "model.path"
        self._config = load_config(self._model_dir, location)
        found, self._sized = model_checks.check_model(self._spec, self._config, self._tokenizer)
        return found

    def _cache(self) -> str | Finding:
        return model_checks.check_cache(self._spec, self._config)

    def _weights_memory(self) -> str | Finding:
        assert self._sized is not None
        return memory_checks.check_memory_estimate(self._spec, self._sized, self._thorough)

    def _algorithm(self) -> str:
        return model_checks.check_algorithm(self._spec, self._search_path, self._notice)

    def _hosts(self) -> Iterator[Finding]:
        """Whether the cluster that the run joins has the resources, and its hosts can work together. The last check,
        because the memory that hosts need depends on the model."""
        if self._spec.cluster.address is None:
            return
        yield from examine_cluster(self._spec.cluster.address, self._spec, self._spec.runs_dir, self._replica_bytes)

    @property
    def _replica_bytes(self) -> int:
        return version_bytes(self._spec, self._sized) if self._sized is not None else 0

    def _engine(self) -> str:
        """Have vLLM check its settings, in a separate process: an import here would keep 700 MB until the end."""
        spec_file = self._folder / "spec.yaml"
        spec_file.write_text(dump_spec(self._spec, self._references))
        see_doctor = "`asyncrl doctor` shows whether vLLM can be imported here"
        try:
            done = subprocess.run(
                [sys.executable, "-m", engine_checks.__name__, str(spec_file), self._model_dir, str(os.getpid())],
                capture_output=True,
                text=True,
                timeout=ENGINE_S,
                env=os.environ | {"TMPDIR": str(self._folder)},
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"vLLM gave no answer within {ENGINE_S:.0f} s", location="rollout", hint=see_doctor
            ) from None
        for line in done.stdout.splitlines():
            kind, _, answer = line.partition(" ")
            if kind == "ANSWER":
                return answer
            if kind == "MISTAKE":
                message, location, hint = json.loads(answer)
                raise ConfigError(message, location=location, hint=hint)
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise ConfigError(f"vLLM cannot check its settings: {last}", location="rollout", hint=see_doctor)


def _result(check: Check) -> str | Finding:
    """What a check found. An unexpected exception becomes a ``UserError`` of the check."""
    try:
        return check.look()
    except UserError:
        raise
    except Exception as error:  # libraries raise such errors for unusual values
        if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error)) is not None:
            raise missing from None
        message = f"the check failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        hint = "change that part of the spec, or report this with the spec"
        raise ConfigError(message, location=check.name, hint=hint) from error
