"""`asyncrl train`: check the spec, then run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import Overrides
from asyncrl_cli.cli.output import echo
from asyncrl_cli.cli.running import Quiet


def train(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML spec.")],
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Train: check the spec, start Ray, DeepSpeed and vLLM, and run to the last step.

    Ends with 0 when the run is finished, 2 when the spec cannot run, 1 when the run failed and 130 when it was
    stopped by Ctrl-C.
    """
    from asyncrl_cli.spec.load import dump_spec, load_spec

    loaded = load_spec(spec, overrides or ())
    for problem in loaded.warnings:
        echo(str(problem), err=True)

    from asyncrl_cli.cli.running import drive
    from asyncrl_cli.pipeline.launch import Experiment, Start
    from asyncrl_cli.runs.directory import RunDirectory
    from asyncrl_cli.runs.manifest import describe_start

    experiment = Experiment.load(loaded.spec, spec.absolute().parent)
    run = RunDirectory.create(loaded.spec.runs_dir, loaded.spec.name)
    run.write_json("manifest.json", describe_start(spec))
    run.write_spec(dump_spec(loaded.spec, loaded.references))
    run.update(phase="starting", steps=loaded.spec.stop.steps)
    drive(experiment, run, Start(), quiet)
