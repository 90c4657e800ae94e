"""`asyncrl validate-spec`: reports every problem in a spec with its line, without starting anything."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import Overrides
from asyncrl_cli.cli.doctor import show_finding
from asyncrl_cli.cli.output import debugging, echo, echo_json
from asyncrl_cli.core.terminal import counted

if TYPE_CHECKING:
    from asyncrl_cli.checks.finding import Finding
    from asyncrl_cli.spec.load import LoadedSpec
    from asyncrl_cli.spec.problems import Problem


def validate_spec(
    specs: Annotated[list[str] | None, typer.Argument(metavar="SPEC", help="YAML specs.", show_default=False)] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document with all problems.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the spec's JSON schema and exit.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="Print the complete spec, with all defaults.")] = False,
    prompt: Annotated[
        bool,
        typer.Option(
            "--prompt", help="Load task, data and tokenizer, and show the first prompt as the model reads it."
        ),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Estimate the memory of each GPU and host, and refuse a spec that does not fit."),
    ] = False,
) -> None:
    """Check specs: types, spelling, and whether their parts fit together.

    Exit code: 0 when every spec is valid, also with warnings; 2 when a spec is not, or with --memory does not fit.
    --json prints an object for one spec, and a list for several.
    """
    if schema:
        from asyncrl_cli.spec.schema import json_schema

        echo_json(json_schema())
        return
    if not specs:
        raise typer.BadParameter("name a spec, or use --schema", param_hint="SPEC")
    if len(specs) > 1 and (resolved or prompt):
        raise typer.BadParameter("--resolved and --prompt take one spec at a time", param_hint="SPEC")
    answers = [
        _check(spec, overrides=overrides or (), resolved=resolved, prompt=prompt, memory=memory) for spec in specs
    ]
    if as_json:
        documents = [answer.document for answer in answers]
        echo_json(documents if len(specs) > 1 else documents[0])
    else:
        for answer in answers:
            for problem in answer.problems:
                echo(str(problem), err=True)
            if answer.text:
                echo(answer.text)
            for line in answer.diagnostics:
                echo(line, err=True)
            for finding in answer.findings:
                show_finding(finding)
    if not all(answer.valid and all(f.status != "failure" for f in answer.findings) for answer in answers):
        raise typer.Exit(2)


@dataclass(frozen=True)
class _Answer:
    valid: bool
    text: str
    problems: tuple[object, ...]
    document: dict[str, object]
    diagnostics: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def _check(spec: str, overrides: Sequence[str], resolved: bool, prompt: bool, memory: bool) -> _Answer:
    from asyncrl_cli.spec.load import dump_spec, load_spec
    from asyncrl_cli.spec.load import resolved as resolved_values
    from asyncrl_cli.spec.problems import SpecError

    try:
        loaded = load_spec(spec, overrides, user_code=True)
    except SpecError as error:
        if debugging():
            traceback.print_exc()
        problems = [asdict(problem) for problem in error.problems]
        return _Answer(False, text="", problems=(error,), document={"spec": spec, "valid": False, "problems": problems})
    warnings = (*loaded.warnings, *_sandbox_warnings(spec, loaded))
    document = {"spec": spec, "valid": True, "problems": [asdict(problem) for problem in warnings]}
    if resolved:
        document["resolved"] = resolved_values(loaded)
    text = dump_spec(loaded.spec, loaded.references).rstrip() if resolved else f"{spec} is valid: {summary(loaded)}"
    findings = _prompt_findings(spec, loaded) if prompt else ()
    if prompt:
        document["findings"] = [asdict(finding) for finding in findings]
    if not memory:
        return _Answer(True, text=text, problems=warnings, document=document, findings=findings)
    from asyncrl_cli.cli.memory import memory_answer

    answer = memory_answer(loaded.spec)
    return _Answer(
        answer.fits,
        text=f"{text}\n{answer.text}".rstrip(),
        problems=warnings,
        document=document | {"fits": answer.fits, "memory": answer.document},
        diagnostics=answer.diagnostics,
        findings=findings,
    )


def _prompt_findings(spec: str, loaded: LoadedSpec) -> tuple[Finding, ...]:
    """Make the checks of a dry run that show the first prompt."""
    from asyncrl_cli.checks.start import PROMPT_CHECKS
    from asyncrl_cli.cli.output import start_checks

    with start_checks(loaded.spec, Path(spec).absolute().parent, thorough=True, references=loaded.references) as checks:
        return tuple(checks.findings(PROMPT_CHECKS))


def _sandbox_warnings(spec: str, loaded: LoadedSpec) -> Iterator[Problem]:
    """Warn if this machine lacks the sandbox: the spec is valid, but a run can only start on another machine."""
    if (settings := loaded.spec.task.sandbox) is None:
        return
    from asyncrl_cli.sandbox.trial import HINTS, missing_program
    from asyncrl_cli.spec.problems import Problem

    if reason := missing_program(settings):
        message = f"this machine cannot start the sandbox: {reason}"
        yield Problem("task.sandbox", message=message, hint=HINTS[settings.kind], severity="warning", file=spec)


def summary(loaded: LoadedSpec) -> str:
    """Describe the spec's run in one line."""
    from asyncrl_cli.inspect.pages import count_range

    spec = loaded.spec
    pipeline, rollout, trainer = spec.pipeline, spec.rollout, spec.trainer
    engines = counted(count_range(rollout.min_engines, rollout.max_engines), "engine")
    engines += f" on {'GPU' if rollout.gpus_per_engine else 'CPU'}"
    ranks = f"{counted(trainer.ranks, 'trainer rank')} on {'GPU' if trainer.gpus_per_rank else 'CPU'}"
    lengths = [counted(spec.stop.steps, "step")] if spec.stop.steps is not None else []
    lengths += [f"{counted(spec.stop.epochs, 'epoch')} in steps"] if spec.stop.epochs else []
    return (
        f"{spec.name} runs {' or '.join(lengths)} of {counted(pipeline.groups_per_step, 'group')} of "
        f"{counted(rollout.group_size, 'rollout')}, {pipeline.mode} with staleness of at most "
        f"{pipeline.max_staleness}, with {engines} and {ranks}"
    )
