"""`asyncrl resume`: go on with a run that was stopped or died."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def resume(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run id, a unique start of one, or `latest`.")],
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Train to this step instead.")] = None,
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="The folder of all runs.")] = Path("runs"),
) -> None:
    """Go on with a run from its newest checkpoint.

    Prompts whose groups were under way are generated again. Ends like `asyncrl train`.
    """
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.runs.directory import RunError
    from asyncrl_cli.spec.load import dump_spec, load_spec

    run = find_run(runs_dir, run_id)
    run.lock()
    loaded = load_spec(run.path / "spec.yaml", [f"stop.steps={steps}"] if steps else [])
    spec = loaded.spec.model_copy(update={"runs_dir": run.path.parent})

    from asyncrl_cli.cli.running import drive
    from asyncrl_cli.pipeline.checkpoints import load_newest
    from asyncrl_cli.pipeline.launch import Experiment

    saved = load_newest(run, spec.stop.steps)
    if saved.ledger.done:
        raise RunError(
            f"the run has done its {spec.stop.steps} steps",
            place=run.run_id,
            mend=f"To train on, say how far: asyncrl resume {run.run_id} --steps {2 * spec.stop.steps}",
        )
    search_path = Path(run.manifest.get("spec_file", run.path / "spec.yaml")).parent
    experiment = Experiment.load(spec, search_path)
    run.write_text("spec.yaml", dump_spec(spec))
    for name in ("metrics.jsonl", "batches.jsonl"):
        run.forget_after(name, saved.ledger.step)
    run.update(phase="starting", steps=spec.stop.steps)
    drive(experiment, run, saved)
