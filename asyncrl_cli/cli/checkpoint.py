"""`asyncrl checkpoint`: list, verify, export and prune a run's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, Group, RunName, RunsDir, Step, add
from asyncrl_cli.cli.output import echo, show
from asyncrl_cli.core.errors import ConfigError, RunArgumentError, RunError
from asyncrl_cli.runs.catalogue import find_run
from asyncrl_cli.runs.directory import WARM_START, RunDirectory

if TYPE_CHECKING:
    from asyncrl_cli.runs.checkpoints import Checkpoint

app = typer.Typer(
    cls=Group, help="List, check, export and prune a run's checkpoints.", no_args_is_help=True, rich_markup_mode=None
)


def list_checkpoints(run: RunName = "latest", as_json: AsJson = False, runs_dir: RunsDir = Path("runs")) -> None:
    """List a run's checkpoints with their held-out accuracy, and why each is kept.

    Files are compared by name and size; `verify` reads every byte.
    """
    from asyncrl_cli.inspect.checkpoint_pages import list_page, stored

    show(list_page(stored(find_run(runs_dir, run))), as_json)


def verify_checkpoints(run: RunName = "latest", step: Step = None, runs_dir: RunsDir = Path("runs")) -> None:
    """Compare every byte of all checkpoints, or of --step's checkpoint, with the recorded checksums.

    Exit code: 0 when all are undamaged; 1 when a file is damaged, with its name.
    """
    from rich.filesize import decimal

    from asyncrl_cli.runs.checkpoints import verify

    damaged = False
    for checkpoint in _checkpoints(find_run(runs_dir, run), step):
        problem = "; ".join(map(str, verify(checkpoint)))
        if not checkpoint.folder.is_dir():
            echo(f"step {checkpoint.step}: deleted meanwhile")
            continue
        damaged = damaged or bool(problem)
        echo(f"step {checkpoint.step}: {problem or f'undamaged ({decimal(checkpoint.size)})'}", err=bool(problem))
    if damaged:
        raise typer.Exit(1)


def export(
    folder: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to write; it must be empty or new.")],
    run: RunName = "latest",
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapters (model.lora), as peft does.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write the model of the newest checkpoint, or of --step's checkpoint, as a Hugging Face directory.

    transformers and vLLM can load it. The checkpoint is verified first.
    """
    from asyncrl_cli.runs.checkpoints import verified_checkpoint
    from asyncrl_cli.spec.load import load_recorded

    run_directory = find_run(runs_dir, run)
    _checkpoints(run_directory, step)  # raises if there is none, before torch is imported
    model = load_recorded(run_directory.path).spec.model
    if adapter and model.lora is None:
        raise ConfigError("the run has trained no adapters", location="model.lora", hint="leave out --adapter")

    from asyncrl_cli.train.model.adapter_folder import export_adapter
    from asyncrl_cli.train.model.initial import model_stub_path
    from asyncrl_cli.train.model.saving import check_target, export_model

    check_target(folder)
    checkpoint = verified_checkpoint(run_directory, step)
    assert checkpoint is not None
    stub = model_stub_path(model, run_directory.model_stub)
    if adapter and model.lora is not None:
        warm_start = run_directory.path.absolute() / WARM_START
        export_adapter(checkpoint, model.lora, str(warm_start if model.warm_start else model.path or stub), folder)
    else:
        export_model(checkpoint, model_stub=stub, folder=folder, lora=model.lora, images=model.max_images > 0)
    echo(f"the {'adapter' if adapter else 'model'} of step {checkpoint.step} is in {folder}")


def prune(
    run: RunName = "latest",
    keep_last: Annotated[int | None, typer.Option("--keep-last", metavar="N", min=1, help="Keep the N newest.")] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", min=0, help="Keep steps divisible by N; 0 for none.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option("--keep-best", metavar="N", min=0, help="Keep the N with the best greedy accuracy.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Delete checkpoints that no retention rule keeps. The options replace the rules in the run's spec.

    A run that is being driven refuses this: its own process deletes checkpoints.
    """
    from rich.filesize import decimal

    from asyncrl_cli.inspect.checkpoint_pages import stored
    from asyncrl_cli.journal.file import checkpoints_removed
    from asyncrl_cli.runs.checkpoints import remove_unread

    run_directory = find_run(runs_dir, run)
    run_checkpoints = stored(run_directory)
    options = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best}
    retention = run_checkpoints.retention.model_copy(
        update={key: value for key, value in options.items() if value is not None}
    )
    if retention.keep_best and not run_checkpoints.accuracies:
        raise RunError(
            "cannot keep the best checkpoints: the run's journal has no greedy accuracy",
            location=run_directory.run_id,
            hint="pass --keep-best 0 to use only the other rules",
        )
    if not dry_run:
        run_directory.lock()
        run_checkpoints = stored(run_directory)  # again: until the lock was held, the driver may have changed them
    reasons = run_checkpoints.reasons(retention)
    removed = [checkpoint for checkpoint in run_checkpoints.checkpoints if not reasons[checkpoint.step]]
    sizes = {checkpoint.step: checkpoint.size for checkpoint in removed}
    if not dry_run:
        for checkpoint in list(removed):
            if not remove_unread(checkpoint):
                removed.remove(checkpoint)
                echo(f"the checkpoint of step {checkpoint.step} is kept: another command reads it", err=True)
        # After the files are gone, because `journal.keep` deletes tokens that only removed checkpoints need. In the
        # other order, a kill in between would leave a checkpoint on disk without its tokens.
        checkpoints_removed(run_directory.path, [checkpoint.step for checkpoint in removed])
        run_directory.unlock()
    steps = ", ".join(str(checkpoint.step) for checkpoint in removed)
    freed = decimal(sum(sizes[checkpoint.step] for checkpoint in removed))
    removed_text = f"the checkpoints of steps {steps} ({freed})" if removed else "nothing"
    kept_count = len(run_checkpoints.checkpoints) - len(removed)
    echo(f"{'would remove' if dry_run else 'removed'} {removed_text}; {kept_count} kept")


def _checkpoints(run: RunDirectory, step: int | None) -> list[Checkpoint]:
    """All checkpoints, or one step's checkpoint. Raises ``RunArgumentError`` if there is none."""
    from asyncrl_cli.runs.checkpoints import checkpoint_of, complete_checkpoints

    if step is not None:
        return [checkpoint_of(run, step)]
    checkpoints = complete_checkpoints(run.path / "checkpoints")
    if not checkpoints:
        raise RunArgumentError(
            "the run has no checkpoint", location=run.run_id, hint="set checkpoints.every, or let the run finish"
        )
    return checkpoints


add(
    app,
    ("list", list_checkpoints, "List checkpoints and why each is kept.", "checkpoint list latest"),
    ("verify", verify_checkpoints, "Compare every byte with its checksum.", "checkpoint verify latest"),
    ("export", export, "Write the model as a Hugging Face folder.", "checkpoint export --to my-model"),
    ("prune", prune, "Delete checkpoints that no retention rule keeps.", "checkpoint prune latest --dry-run"),
)
