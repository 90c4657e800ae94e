"""The command line: `asyncrl COMMAND`.

Each command is a function in one of the modules below. At the top, these modules import only typer and modules that
load in milliseconds; their functions import the rest. So `asyncrl --help` never waits for torch, Ray or vLLM.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
import traceback
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from asyncrl_cli import __version__
from asyncrl_cli.cli import (
    checkpoint,
    convert,
    doctor,
    evaluate,
    init,
    inspect,
    plan,
    replay,
    report,
    running,
    runs,
    serve,
    validate_spec,
    watch,
)
from asyncrl_cli.cli.arguments import Group, add
from asyncrl_cli.cli.output import debugging, echo
from asyncrl_cli.core.errors import UserError, diagnostic
from asyncrl_cli.core.imports import missing_package
from asyncrl_cli.system.network import bypass_proxies

app = typer.Typer(
    name="asyncrl",
    cls=Group,
    help="Fully asynchronous reinforcement learning of language models, from one YAML spec.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

BEFORE_RUN, TRAIN, LOOK, USE = "Before a run", "Train", "Look at a run", "Use a model"
"""The sections of the help, as in docs/commands.md."""
add(
    app,
    ("init", init.init, "Copy a template: a spec with its code and data.", "init agent my-task"),
    ("validate-spec", validate_spec.validate_spec, "Check a spec.", "validate-spec specs/quickstart.yaml"),
    ("plan", plan.plan, "Predict the step time of a spec.", "plan SPEC --calibrate-from latest"),
    ("doctor", doctor.doctor, "Check whether this machine can run asyncrl.", "doctor"),
    section=BEFORE_RUN,
)
add(
    app,
    ("train", running.train, "Check a spec, then train.", "train specs/quickstart.yaml --set seed=1"),
    ("resume", running.resume, "Continue a stopped or killed run.", "resume latest --steps 120"),
    section=TRAIN,
)
add(
    app,
    ("runs", runs.runs, "List runs.", "runs --json"),
    ("watch", watch.watch, "Watch a run in the terminal.", "watch latest"),
    ("report", report.report, "Write an HTML report of a run.", "report latest -o report.html"),
    ("staleness", inspect.staleness, "Show and verify staleness.", "staleness latest"),
    ("events", inspect.events, "Print a run's events, in order.", "events latest --kind fault"),
    ("track", runs.track, "Send the missing data of an ended run to MLflow.", "track latest"),
    section=LOOK,
)
add(
    app,
    ("evaluate", evaluate.evaluate, "Measure a model's accuracy, without training.", "evaluate latest --samples 4"),
    ("serve", serve.serve, "Serve a model through an OpenAI-compatible API.", "serve latest --port 8000"),
    ("replay", replay.replay, "Train recorded batches again, compare weights.", "replay latest --to 20"),
    section=USE,
)
app.add_typer(convert.app, name="convert", rich_help_panel=BEFORE_RUN)
app.add_typer(inspect.app, name="inspect", rich_help_panel=LOOK)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=USE)


def _version(is_requested: bool) -> None:
    if is_requested:
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
        os.environ["ASYNCRL_DEBUG"] = "1"  # a run's actors inherit it


OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""Errors when writing to standard output or standard error. If an error names a file, the command that writes the file
handles it."""


def console_script() -> None:
    """The process's entry point: runs ``main``, then ends the process without delay."""
    exit_codes: list[int] = []
    atexit.register(_end_quickly, exit_codes)  # first, because handlers run in reverse order and this must be the last
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            exit_codes.append(ended.code or 0)
        raise


def _end_quickly(exit_codes: list[int]) -> None:
    """End the process immediately if torch is loaded: Python takes more than a second to unload it (decision 0044).

    At this point, threads have ended and exit handlers have run. If the output cannot be flushed, Python ends the
    process.
    """
    if "torch" not in sys.modules or not exit_codes:
        return
    with suppress(OSError):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(exit_codes[0])


def main() -> None:
    """Run a command, and show a UserError as a diagnostic without its traceback."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # the parent process closed it; the next opened file would get its number, and be written to
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if the parent process closed it
            # If the terminal's encoding lacks a character, show its escape; the default ends the command.
            stream.reconfigure(errors="backslashreplace")
    bypass_proxies()  # for a tracking server on this machine, and for all processes of a run
    try:
        app(prog_name="asyncrl")
    except UserError as error:
        _end(error.diagnostic(), error.exit_code)
    except ModuleNotFoundError as error:
        if (diagnosis := missing_package(error)) is None:
            raise
        _end(diagnosis.diagnostic(), diagnosis.exit_code)
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:
            raise
        hint = "free disk space, or redirect the output elsewhere"
        _end(diagnostic("error", f"cannot write the output: {error.strerror}", hint=hint), 1)


def _end(message: str, code: int) -> NoReturn:
    """Print the current error and exit. Output that cannot be written is dropped: otherwise Python would try again,
    print a traceback and exit with another code."""
    if debugging():
        echo(traceback.format_exc(), err=True)
    with suppress(OSError):
        echo(message, err=True)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


if __name__ == "__main__":
    console_script()
