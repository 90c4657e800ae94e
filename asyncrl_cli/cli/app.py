"""The command line: `asyncrl COMMAND`.

A command is a function in a module of its own, and a line here. Its module imports only typer at the top, and
the rest inside the function, so that `asyncrl --help` never waits for torch, Ray or vLLM.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Annotated

import typer

from asyncrl_cli import __version__
from asyncrl_cli.cli import (
    checkpoint,
    doctor,
    events,
    init,
    inspect,
    replay,
    report,
    resume,
    runs,
    serve,
    staleness,
    timeline,
    track,
    train,
    validate_spec,
    watch,
)
from asyncrl_cli.cli.output import echo
from asyncrl_cli.runs.errors import UserError

app = typer.Typer(
    name="asyncrl",
    help="Fully asynchronous reinforcement learning of language models, from one YAML spec.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init.init)
app.command("train")(train.train)
app.command("resume")(resume.resume)
app.command("replay")(replay.replay)
app.command("serve")(serve.serve)
app.command("watch")(watch.watch)
app.command("runs")(runs.runs)
app.command("track")(track.track)
app.add_typer(inspect.app, name="inspect")
app.command("events")(events.events)
app.command("staleness")(staleness.staleness)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)
app.command("timeline")(timeline.timeline)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("validate-spec")(validate_spec.validate_spec)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"asyncrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also: ASYNCRL_DEBUG=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if debug:
        os.environ["ASYNCRL_DEBUG"] = "1"  # The actors of a run inherit it.


def main() -> None:
    """The entry point: run a command, and show a UserError as one paragraph without its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None when it was closed by whoever started the command
            # A terminal whose encoding lacks a character shows its escape; the default ends the command.
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="asyncrl")
    except UserError as error:
        if os.environ.get("ASYNCRL_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        echo(str(error), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
