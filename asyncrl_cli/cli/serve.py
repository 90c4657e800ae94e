"""`asyncrl serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import NewRunsDir, Overrides, Step, run_names
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.terminal import printable
from asyncrl_cli.runs.catalogue import find_run
from asyncrl_cli.runs.directory import DEFAULT_RUNS

if TYPE_CHECKING:
    from asyncrl_cli.orchestrator.serving import Address, Served
    from asyncrl_cli.spec.sections import ExperimentSpec


def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SPEC", help="A run, or a YAML spec, whose initial model is served.", autocompletion=run_names
        ),
    ],
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port; 0 for a free one.")
    ] = None,
    step: Step = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the server is ready.")] = False,
    runs_dir: NewRunsDir = None,
) -> None:
    """Serve a model to any OpenAI client, without training, until Ctrl-C.

    For a run, this is its final model, or its newest checkpoint if it has not finished. For a spec, it is the initial
    model.
    """
    listen = [f"rollout.gateway.{key}={value}" for key, value in (("host", host), ("port", port)) if value is not None]
    changes = [*(overrides or ()), *listen]
    if is_spec(target):
        served = _served_spec(Path(target), changes, step, runs_dir)
    else:
        from asyncrl_cli.spec.load import load_recorded

        run = find_run(runs_dir or DEFAULT_RUNS, target)
        spec = load_recorded(run.path, changes).spec

        from asyncrl_cli.orchestrator.serving import served_run

        served = served_run(run, spec, step)

    from asyncrl_cli.checks.hosts import check_cluster
    from asyncrl_cli.checks.prompts import missing_in_template
    from asyncrl_cli.monitors.outlet import run_terminal
    from asyncrl_cli.orchestrator.cluster import Actors
    from asyncrl_cli.orchestrator.interrupts import INTERRUPTED, Interrupted
    from asyncrl_cli.orchestrator.serving import serve as run_server

    with run_terminal(served.logs) as terminal:

        def say(text: str) -> None:
            terminal.err.write(f"{text}\n")

        def ready(address: Address) -> None:
            text = json.dumps(asdict(address)) if as_json else _ready_text(served, address)
            terminal.out.draw(printable(f"{text}\n"), line_count=text.count("\n") + 1)  # `write` would hide the key

        check_cluster(served.spec, actors=Actors(served.spec.rollout.min_engines, 0), folder=served.logs, notice=say)
        try:
            check = partial(missing_in_template, served.spec)
            run_server(served, ready=ready, check=check, status=say, warn=say)
        except Interrupted:
            say("stopped")
            raise typer.Exit(INTERRUPTED) from None


def _served_spec(path: Path, changes: list[str], step: int | None, runs_dir: Path | None) -> Served:
    from asyncrl_cli.spec.load import load_spec

    if step is not None:
        raise typer.BadParameter("a spec has no steps; name a run", param_hint="--step")
    spec = load_spec(path, changes).spec

    from asyncrl_cli.orchestrator.serving import served_folder

    model = initial_model(spec)
    logs = (runs_dir or spec.runs_dir).absolute() / "serve" / spec.name
    return served_folder(spec, model, logs=logs, description=f"the initial model of {spec.name}")


def is_spec(target: str) -> bool:
    """True if an argument names a spec, and not a run or a model's folder."""
    return target.endswith((".yaml", ".yml")) or Path(target).is_file()


def initial_model(spec: ExperimentSpec) -> Path:
    """Return the folder of a spec's initial model, after making the model if necessary. Raises ``ConfigError`` for a
    model with a warm start."""
    if spec.model.warm_start is not None:
        raise ConfigError(
            "a spec with a warm start has no model yet",
            location="model.warm_start",
            hint="train it with `asyncrl train SPEC --set stop.steps=0`, and name the folder runs/RUN/model",
        )
    if spec.model.lora is not None and spec.model.lora.path is not None:
        raise ConfigError(
            "the initial model is one with an adapter, which is not merged yet",
            location="model.lora.path",
            hint="merge it (peft's merge_and_unload) and name the result's folder, or remove the key",
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints to stdout that it found no accelerator

    from asyncrl_cli.train.model.initial import prepare_model

    return prepare_model(spec)


def _ready_text(served: Served, address: Address) -> str:
    return "\n".join(
        (
            f"serving   {served.description}",
            f"base URL  {address.base_url}",
            f"API key   {address.api_key}",
            f"model     {address.model}",
            "try       "
            f"curl {address.base_url}/completions -H 'Authorization: Bearer {address.api_key}' "
            "-H 'Content-Type: application/json' "
            """-d '{"prompt": "1+1=", "max_tokens": 32}'""",
            f"logs      {served.logs}",
            "stop with Ctrl-C",
        )
    )
