"""The commands until heavy work would start: most run in this process, some in a separate one, as by a user."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import asyncrl_cli.cli
from asyncrl_cli import __version__
from asyncrl_cli.cli import running
from asyncrl_cli.inspect.health import HealthWatch
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.orchestrator import launch
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.launch import DriverStart
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.groups import BufferSettings, Outcome, StepRecord
from asyncrl_cli.records.rewards import Scored
from asyncrl_cli.runs.checkpoints import RUN_FILE, Checkpoint, checkpoint_name, seal
from asyncrl_cli.runs.directory import MODEL, STATE, RunDirectory
from asyncrl_cli.spec.load import dump_spec, load_spec
from tests.cli.conftest import Done, NoChecks, process
from tests.conftest import processes_with
from tests.journal.buffer_stand_ins import candidates, publish_record, rollout

pytestmark = pytest.mark.slow

HEAVY = ("torch", "ray", "vllm", "deepspeed", "mlflow", "numpy", "transformers", "fastapi", "openai")
MODULES = [f"asyncrl_cli.cli.{module.name}" for module in pkgutil.iter_modules(asyncrl_cli.cli.__path__)]
COMMANDS = [
    "init",
    "train",
    "resume",
    "replay",
    "evaluate",
    "serve",
    "convert",
    "runs",
    "track",
    "inspect",
    "plan",
    "staleness",
    "doctor",
    "report",
    "events",
    "watch",
    "checkpoint",
    "validate-spec",
]
Command = Callable[..., Done]
SPEC = "model: {path: org/model}\ntask: {use: chain_sum}\nstop: {steps: 10}\n"


def refused(done: Done, code: int) -> str:
    """The diagnostic that a refused command prints."""
    assert (done.code, done.out) == (code, ""), done
    assert "Traceback" not in done.err
    assert done.err.endswith("\n")
    assert done.err.startswith("error: ")
    return done.err.rstrip("\n")


def make_run(runs_dir: Path, run_id: str, started: str, **state: Any) -> RunDirectory:
    """A run's folder as its driver leaves it."""
    run = RunDirectory(runs_dir / run_id)
    (run.path / "checkpoints").mkdir(parents=True)
    run.write_json("manifest.json", {"started": started, "spec_file": str(runs_dir / "spec.yaml")})
    run.update(**state)
    return run


# -- the help


def test_help_lists_the_commands(asyncrl: Command, tmp_path: Path) -> None:
    done = asyncrl("--help")
    assert done.code == 0
    sections = re.findall(r"^(\w[\w ]+):\n((?:  .+\n)+)", done.out.partition("Options:")[2], re.MULTILINE)
    assert [section for section, _ in sections] == ["Before a run", "Train", "Look at a run", "Use a model"]
    listed = [line.split()[0] for _, lines in sections for line in lines.splitlines()]
    assert sorted(listed) == sorted(COMMANDS)
    assert asyncrl().err.strip() == done.out.strip(), "no command shows the help"


def test_command_modules_import_nothing_heavy() -> None:
    """One after the other in one process: the first module that imports a heavy one is named."""
    script = f"""
import importlib, sys
for module in {MODULES!r}:
    importlib.import_module(module)
    assert not set({HEAVY!r}) & set(sys.modules), module
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# -- runs


def test_runs_without_a_run_prints_a_line(asyncrl: Command, tmp_path: Path) -> None:
    done = asyncrl("runs")
    assert (done.code, done.out, done.err) == (0, "no runs in runs yet\n", "")
    assert asyncrl("runs", "--json").out == "[]\n"
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Runs in every state; ``driven`` is driven by this process."""
    runs_dir = tmp_path / "runs"
    accuracy = {"greedy": 0.75, "sampled": 0.5}
    done = make_run(
        runs_dir, "done", "2026-01-01T00:00:00+00:00", phase="finished", step=10, steps=10, accuracy=accuracy
    )
    manifest = done.manifest | {"command": ["asyncrl", "train", "a.yaml", "--set", "trainer.ranks=2", "--set=seed=1"]}
    done.write_json("manifest.json", manifest)
    done.write_json("state.json", asdict(done.state) | {"updated": 1767225600.0 + 720})
    make_run(runs_dir, "killed", "2026-01-02T00:00:00+00:00", phase="running", step=4, steps=10)
    make_run(
        runs_dir,
        "stopped",
        "2026-01-03T00:00:00+00:00",
        phase="interrupted",
        step=5,
        steps=10,
        findings=("equal_groups", "entropy"),
    )
    make_run(runs_dir, "broken", "2026-01-04T00:00:00+00:00", phase="failed", step=0, steps=10, reason="no memory")
    make_run(runs_dir, "early", "2026-01-05T00:00:00+00:00", phase="starting", steps=10)
    engines = {"serving": 1, "wanted": 2}
    driven = make_run(
        runs_dir, "driven", "2026-01-06T00:00:00+00:00", phase="running", step=9, steps=1000, engines=engines
    )
    (make_run(runs_dir, "damaged", "2026-01-07T00:00:00+00:00").path / "state.json").write_text("{")
    driven.lock()
    return tmp_path


def test_runs_show_their_status(asyncrl: Command, filled: Path) -> None:
    done = asyncrl("runs")
    assert (done.code, done.err) == (0, "")
    header, *lines = done.out.splitlines()
    columns = ["run", "phase", "step", "health", "engines", "greedy", "sampled", "took", "started", "settings"]
    assert header.split() == columns
    reason = lines.pop(4)
    assert reason == "    no memory", "below the run that failed"
    assert [re.split("  +", line)[:7] for line in lines] == [
        ["done", "finished", "10/10", "ok", "-", "0.750", "0.500"],
        ["killed", "died", "4/10", "ok", "-", "-", "-"],
        ["stopped", "interrupted", "5/10", "equal_groups +1", "-", "-", "-"],
        ["broken", "failed", "0/10", "-", "-", "-", "-"],
        ["early", "died", "0/10", "-", "-", "-", "-"],
        ["driven", "running", "9/1000", "ok", "1/2", "-", "-"],
        ["damaged", "died", "0/0", "-", "-", "-", "-"],
    ]
    assert lines[0].endswith("  12 min 0 s  2026-01-01 00:00:00  trainer.ranks=2 seed=1"), "its settings distinguish it"
    assert lines[6].endswith("  -  2026-01-07 00:00:00")
    starts = [header.index(word) for word in ("phase", "started")]
    assert all(line[column - 1] == " " != line[column] for line in lines for column in starts), "columns line up"


def test_runs_as_json(asyncrl: Command, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    rows = json.loads(asyncrl("runs", "--json", "--runs-dir", filled / "runs").out)
    assert [row["phase"] for row in rows] == [*("finished", "died", "interrupted", "failed", "died", "running", "died")]
    expected = {"run": "done", "step": 10, "steps": 10, "accuracy": {"greedy": 0.75, "sampled": 0.5}, "took_s": 720}
    assert rows[0].items() >= (expected | {"settings": ["trainer.ranks=2", "seed=1"]}).items()
    assert rows[3]["reason"] == "no memory"


def test_a_run_that_died_took_as_long_as_its_processes_wrote_logs(
    asyncrl: Command, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    early = RunDirectory(filled / "runs/early")
    started = datetime.fromisoformat(early.manifest["started"]).timestamp()
    (early.path / "logs").mkdir(exist_ok=True)
    (early.path / "logs/trainer-0.log").write_text("warm start: 12 of 480 updates\n")
    os.utime(early.path / "logs/trainer-0.log", (started + 90, started + 90))
    early.write_json(STATE, json.loads((early.path / STATE).read_text()) | {"updated": started + 1})
    rows = json.loads(asyncrl("runs", "--json", "--runs-dir", filled / "runs").out)
    assert {row["run"]: row["took_s"] for row in rows}["early"] == pytest.approx(90)


# -- train, when it is refused


def test_a_missing_task_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("chain_sum", "no_such_module:Task"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    token = secrets.token_hex(8)
    environment = {"ASYNCRL_TEST": token, "TMPDIR": str(temporary)}
    shown = refused(process("train", "spec.yaml", cwd=tmp_path, environment=environment), 2)
    assert f"no module 'no_such_module' in {tmp_path} or on Python's path" in shown
    assert len(shown.splitlines()) == 3
    assert processes_with(f"ASYNCRL_TEST={token}".encode()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.yaml", "tmp"]
    assert list(temporary.iterdir()) == []


def test_a_runs_folder_that_cannot_be_written(asyncrl: Command, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "file").symlink_to("gone")
    shown = refused(asyncrl("train", "spec.yaml", "--set", "runs_dir=file/runs"), 2)
    assert "\n --> runs_dir\nhint: " in shown
    assert str(tmp_path / "file") in shown


def test_a_plan_takes_one_measurement(asyncrl: Command, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    done = asyncrl("plan", "spec.yaml", "--calibrate", "--calibrate-from", "latest")
    assert done.code == 2 and "--calibrate: cannot be combined with --calibrate-from" in done.err


def test_a_plan_without_measurements_is_refused(asyncrl: Command, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    assert "nothing is measured" in refused(asyncrl("plan", "spec.yaml"), 2)
    assert "nosuch" in refused(asyncrl("plan", "spec.yaml", "--calibrate-from", "nosuch"), 2)


def test_a_dry_run_without_gpus_shows_every_check_and_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("chain_sum", "leaves:reward"))
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    options = ("--set", "trainer.gpus_per_rank=1", "--dry-run", "--json")
    done = process("train", "spec.yaml", *options, cwd=tmp_path, environment=hidden)
    assert done.code == 2
    found = {finding["check"]: finding for finding in json.loads(done.out)["findings"]}
    assert "needs 1 GPU (1 engine × 0 + 1 rank × 1), and this machine has no GPU" in found["devices"]["found"]
    assert found["task and data"]["found"].startswith(f"{tmp_path}/leaves.py:1: importing the task called sys.exit(3)")
    assert "model 'org/model'" in found["model files"]["found"] or "'org/model'" in found["model files"]["found"]
    assert found["tokenizer"]["found"] == "not checked, because it needs model files, which failed"
    failures = {name for name, finding in found.items() if finding["status"] == "failure"}
    assert failures == {"devices", "task and data", "model files"}
    assert all(found[name]["hint"] for name in failures)
    made = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # of the imported task
    assert made == {"leaves.py", "spec.yaml"}


# -- resume, when it is refused


def resumable(runs_dir: Path, step: int = 0, checkpoint: int | None = None, **state: Any) -> RunDirectory:
    """A run with a spec. If ``step`` is above 0, it has a journal with this many trained steps, and a checkpoint.

    The journal's batches have one group of one rollout, which is enough for a resume here.
    """
    usual = {"phase": "interrupted", "step": step, "steps": 10}
    run = make_run(runs_dir, "run-1", "2026-01-01T00:00:00+00:00", **usual | state)
    (runs_dir / "spec.yaml").write_text(SPEC)
    run.write_text("spec.yaml", dump_spec(load_spec(runs_dir / "spec.yaml").spec, {}))
    if step:
        record(run, step)
        save(run, step if checkpoint is None else checkpoint)
    return run


def record(run: RunDirectory, steps: int) -> None:
    """Record this many steps, each taken, trained and published."""
    book = DurableLedger(run.path / FILE, BufferSettings(1, 1, 0, "wait", 10, 1, reject_uniform=False))
    for step in range(steps):
        (admission,) = book.admit(candidates(step + 1, 1))
        name = training_rollout_id(admission.group_id, 0)
        book.record([rollout(name, [step])], [Outcome(name, Scored(1.0))])
        assert book.take(step) is None
        book.journal.trained(StepRecord(step, "digest", {}))
        book.publish(publish_record(step + 1, step + 1))
    book.journal.commit(book.journal.noted())
    book.journal.close()


def save(run: RunDirectory, step: int) -> None:
    """Save an intact checkpoint of a step, without the trainer's part."""
    trainer = load_spec(run.path / "spec.yaml").spec.trainer
    layout = {"ranks": trainer.ranks, "zero_stage": trainer.zero_stage, "dtype": trainer.dtype}
    checkpoint = Checkpoint(run.path / "checkpoints" / checkpoint_name(step), step)
    checkpoint.folder.mkdir()
    (checkpoint.folder / RUN_FILE).write_text(json.dumps({"next_group": step, "prompts": [], "trainer": layout}))
    seal(checkpoint.folder)


def test_resume_of_a_run_whose_journal_is_gone_or_damaged(asyncrl: Command, tmp_path: Path) -> None:
    run = resumable(tmp_path / "runs", step=3)
    before = (run.path / FILE).read_bytes()
    (run.path / FILE).write_bytes(b"x" * len(before))
    assert "--without-journal" in refused(asyncrl("resume", "latest"), 2)
    (run.path / FILE).unlink()
    assert "the run's journal is gone" in refused(asyncrl("resume", "latest"), 2)


def test_resume_of_a_run_of_another_version_names_both_versions(asyncrl: Command, tmp_path: Path) -> None:
    run = resumable(tmp_path / "runs", step=3, checkpoint=5)
    installed = version("torch")
    run.write_text("manifest.json", json.dumps({**run.manifest, "asyncrl": "0.0.9", "packages": {"torch": "2.0.0"}}))
    done = asyncrl("resume", "run-1")
    assert done.code == 2
    first, error, *_ = done.err.splitlines()
    named = f"asyncrl 0.0.9 (now {__version__}), torch 2.0.0 (now {installed})"
    assert first == f"! run-1 was started with {named}: see docs/operations.md, Upgrade"
    assert error.startswith("error: the journal ends at step 3")


def test_resume_of_a_run_that_is_driven(asyncrl: Command, tmp_path: Path) -> None:
    run = resumable(tmp_path / "runs", step=3)
    run.lock()
    shown = refused(asyncrl("resume", "latest"), 2)
    assert shown.startswith(f"error: the run is being driven by pid {os.getpid()} on ")


def test_resume_of_a_finished_run(asyncrl: Command, tmp_path: Path) -> None:
    run = resumable(tmp_path / "runs", step=10, phase="finished")
    (run.path / MODEL).mkdir()
    (run.path / MODEL / "config.json").write_text("{}")
    shown = refused(asyncrl("resume", "run-1"), 2)
    assert shown.endswith("asyncrl resume run-1 --steps 20") and "10 steps" in shown
    shown = refused(asyncrl("resume", "run-1", "--steps", "7"), 2)
    assert "asyncrl resume run-1 --steps 20" in shown
    run.update(phase="interrupted")
    shown = refused(asyncrl("resume", "run-1", "--steps", "7"), 2)
    assert "10 steps" in shown and "\n --> run-1\n" in shown
    assert load_spec(run.path / "spec.yaml").spec.stop.steps == 10, "a rejected --steps changes nothing"


def test_a_refused_change_leaves_the_spec_as_it_was(tmp_path: Path) -> None:
    run = resumable(tmp_path / "runs", step=3)
    before = (run.path / "spec.yaml").read_bytes()
    changes = ("--set", "seed=7", "--set", "rollout.group_size=2", "--set", "evaluation.every=3")
    shown = refused(process("resume", "run-1", *changes, "--steps", "20", cwd=tmp_path), 2)
    assert "rollout.group_size: cannot change for a recorded run: recorded groups have this size" in shown
    assert "seed: cannot change for a recorded run: " in shown
    assert "evaluation.every" not in shown, "this key may change"
    assert (run.path / "spec.yaml").read_bytes() == before
    assert not run.is_driven, "the lock is given back"


def test_a_journal_that_is_older_than_the_checkpoint_is_refused(asyncrl: Command, tmp_path: Path) -> None:
    run = resumable(tmp_path / "runs", step=3, checkpoint=5)
    before = (run.path / "spec.yaml").read_bytes()
    shown = refused(asyncrl("resume", "run-1", "--steps", "20"), 2)
    assert shown.startswith("error: the journal ends at step 3, but the newest checkpoint has step 5: ")
    assert f"\n --> runs/run-1/{FILE}\nhint: " in shown
    assert shown.endswith("asyncrl resume run-1 --without-journal")
    assert (run.path / "spec.yaml").read_bytes() == before


@pytest.fixture
def resumed(asyncrl: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Resumes a run until it would start; gives the resumed run's spec and start."""

    def drive(experiment: Experiment, run: RunDirectory, start: DriverStart, quiet: bool) -> None:
        spec, checkpoint = experiment.spec, start.checkpoint
        print(spec.runs_dir, spec.stop.steps, start.kind, checkpoint and checkpoint.step, repr(start.note))
        raise SystemExit(7)

    def resume(runs_dir: Path, *arguments: str) -> str:
        done = asyncrl("resume", "run-1", "--accept-changed-data", "--runs-dir", runs_dir, *arguments)
        assert (done.code, done.err) == (7, "")
        return done.out.removesuffix("\n")

    monkeypatch.setattr(running, "start_checks", NoChecks)
    monkeypatch.setattr(running, "drive", drive)
    return resume


@pytest.mark.parametrize("name", ["runs", "a: b", "a #b", "${env:HOME}"])
def test_a_resumed_run_stays_in_its_folder(resumed: Callable[..., str], tmp_path: Path, name: str) -> None:
    run = resumable(tmp_path / name, step=3)
    assert resumed(tmp_path / name, "--steps", "20") == f"{tmp_path / name} 20 resume 3 'stop.steps=20'"
    assert load_spec(run.path / "spec.yaml").spec.stop.steps == 20


@pytest.mark.parametrize("recorded_steps", [0, 3])
def test_a_run_without_a_checkpoint_can_be_resumed(
    resumed: Callable[..., str], tmp_path: Path, recorded_steps: int
) -> None:
    run = resumable(tmp_path)
    if recorded_steps:
        record(run, recorded_steps)
    assert resumed(tmp_path) == f"{tmp_path} 10 resume None ''"


def test_the_closing_lines_of_a_run_that_learned_nothing_name_the_cause_and_do_not_advise_to_continue(
    tmp_path: Path,
) -> None:
    run = RunDirectory.create(tmp_path, "run")
    run.update(step=3, steps=3)
    spec = load_spec(Path(__file__).parents[2] / "specs/quickstart.yaml").spec
    row = {"reward/mean": 0.5, "reward/std": 0.0, "reward/uniform_groups": 1.0, "train/updates": 0.0}
    idle = HealthWatch(spec.model_dump(mode="json"), [row | {"step": float(step)} for step in (1, 2, 3)])
    lines = running.summary(run, launch.RunResult(1.0, health=idle), spec).splitlines()
    verdict = lines.index("! 0 of 96 groups had different rewards: nothing was learned")
    assert lines[verdict + 1].startswith("! 32 of 32 groups had equal rewards (mean 0.5), since step 1. Usual cause: ")
    assert verdict < lines.index("next:") and not any("asyncrl resume" in line for line in lines)
    healthy = running.summary(run, launch.RunResult(1.0), spec)
    assert "asyncrl resume" in healthy and "!" not in healthy
