"""`asyncrl validate-spec`: every mistake of a spec, with its line, before anything heavy starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import Overrides
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.spec.load import LoadedSpec


def validate_spec(
    spec: Annotated[Path | None, typer.Argument(metavar="SPEC", help="The YAML spec.", show_default=False)] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document with all problems.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the spec's JSON schema, and stop.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="Print the whole spec, with all defaults.")] = False,
) -> None:
    """Check a spec: types, spelling, and whether its parts fit together.

    Ends with 0 when the spec can run and with 2 when it cannot; warnings make no difference.
    """
    from asyncrl_cli.spec.load import dump_spec, load_spec
    from asyncrl_cli.spec.problems import SpecError

    if schema:
        from asyncrl_cli.spec.reference import json_schema

        echo_json(json_schema())
        return
    if spec is None:
        raise typer.BadParameter("name a spec, or use --schema", param_hint="SPEC")
    try:
        loaded = load_spec(spec, overrides or ())
    except SpecError as error:
        if not as_json:
            raise
        echo(_document(spec, error.problems, valid=False))
        raise typer.Exit(error.exit_code) from error
    if as_json:
        echo(_document(spec, loaded.warnings, valid=True))
        return
    for problem in loaded.warnings:
        echo(str(problem), err=True)
    echo(dump_spec(loaded.spec).rstrip() if resolved else f"{spec} is valid: {summary(loaded)}")


def _document(spec: Path, problems: tuple[object, ...], valid: bool) -> str:
    from dataclasses import asdict

    document = {"spec": str(spec), "valid": valid, "problems": [asdict(problem) for problem in problems]}  # type: ignore[call-overload]
    return json.dumps(document, indent=2, ensure_ascii=False)


def summary(loaded: LoadedSpec) -> str:
    """What the spec will run, in one line."""
    spec = loaded.spec
    pipeline, rollout, trainer = spec.pipeline, spec.rollout, spec.trainer
    engines = f"{_count(rollout.engines, 'engine')} on {'GPU' if rollout.gpus_per_engine else 'CPU'}"
    ranks = f"{_count(trainer.ranks, 'trainer rank')} on {'GPU' if trainer.gpus_per_rank else 'CPU'}"
    return (
        f"{spec.name} runs {_count(spec.stop.steps, 'step')} of {_count(pipeline.groups_per_step, 'group')} of "
        f"{rollout.group_size} rollouts, {pipeline.mode} with staleness {pipeline.max_staleness} at most, "
        f"with {engines} and {ranks}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
