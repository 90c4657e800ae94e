"""`asyncrl checkpoint` on runs without a driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.schema import FILE, open_for_reading, open_for_writing
from asyncrl_cli.runs import checkpoints
from asyncrl_cli.runs.checkpoints import (
    Checkpoint,
    Damage,
    checkpoint_name,
    complete_checkpoints,
    remove,
    seal,
    verified_checkpoint,
    verify,
)
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.load import dump_spec, load_spec
from tests.cli.conftest import Done

pytestmark = pytest.mark.slow

SPEC = """
model:
  init: {architecture: llama, config: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 1}}
task: {use: chain_sum}
stop: {steps: 100}
checkpoints: {every: 10, keep_last: 1, keep_every: 30, keep_best: 1}
"""
SAVED = 1_767_225_600.0
"""Unix time just before the first checkpoint."""
ACCURACIES = {10: 0.25, 20: 0.75, 30: 0.5}


@pytest.fixture
def asyncrl(asyncrl: Callable[..., Done]) -> Callable[..., Done]:
    return partial(asyncrl, "checkpoint")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with checkpoints of five steps; the first three were evaluated."""
    run = RunDirectory.create(tmp_path / "runs", "test")
    run.unlock()
    (tmp_path / "spec.yaml").write_text(SPEC)
    run.write_json("manifest.json", {"started": "2026-01-01T00:00:00+00:00"})
    run.write_text("spec.yaml", dump_spec(load_spec(tmp_path / "spec.yaml").spec, {}))
    for step in (10, 20, 30, 40, 50):
        make_checkpoint(run, step)
    with closing(open_for_writing(run.path / FILE)) as journal:
        for step, accuracy in ACCURACIES.items():
            for kind, value in (("greedy", accuracy), ("sampled", 0.99)):
                journal.execute("INSERT INTO evaluations VALUES (?, ?, 0, ?, 0, 0, 8, 0, 0)", (step, kind, value))
        for step in (10, 20, 30, 40, 50):
            saved = (step, SAVED + step, checkpoint_name(step))
            journal.execute("INSERT INTO checkpoints VALUES (?, ?, ?, 1.0, 0.1, NULL, NULL, '')", saved)
    return run


def make_checkpoint(run: RunDirectory, step: int) -> Checkpoint:
    folder = run.path / "checkpoints" / checkpoint_name(step)
    (folder / "state").mkdir(parents=True)
    (folder / "state/shard").write_bytes(b"x" * 2000)
    trainer = {"ranks": 2, "zero_stage": 0, "dtype": "float32"}
    (folder / "run.json").write_text(json.dumps({"step": step, "trainer": trainer}))
    seal(folder)
    return Checkpoint(folder, step)


def steps_of(run: RunDirectory) -> list[int]:
    return [checkpoint.step for checkpoint in complete_checkpoints(run.path / "checkpoints")]


def damage(run: RunDirectory, step: int) -> None:
    path = run.path / "checkpoints" / checkpoint_name(step) / "state/shard"
    path.write_bytes(b"y" + path.read_bytes()[1:])


def test_list_says_why_each_checkpoint_is_kept(asyncrl: Any, run: RunDirectory) -> None:
    (run.path / "checkpoints/step-000040/state/shard").unlink()
    code, out, _ = asyncrl("list")
    assert code == 0
    header, *rows = [" ".join(line.split()) for line in out.splitlines()]
    assert header == "step size age files greedy upload kept because"
    assert [row.split()[0] for row in rows] == ["10", "20", "30", "40", "50"]
    assert "0.250 - nothing: `prune` removes it" in rows[0]
    assert rows[1].endswith("ok 0.750 - best 1")
    assert rows[2].endswith("0.500 - every 30")
    assert "1 damaged - - nothing" in rows[3]
    assert rows[4].endswith("- - last 1")


def test_uploads_are_listed(asyncrl: Any, run: RunDirectory) -> None:
    spec = (run.path / "spec.yaml").read_text().replace("upload: null", "upload: file:///backup")
    run.write_text("spec.yaml", spec)
    with closing(open_for_writing(run.path / FILE)) as journal:
        journal.execute("UPDATE checkpoints SET uploaded_at = 1 WHERE step = 20")
        journal.execute("UPDATE checkpoints SET upload_failure = 'no space' WHERE step = 30")
    _, out, _ = asyncrl("list")
    header, *rows = [" ".join(line.split()) for line in out.splitlines()]
    assert header == "step size age files greedy upload kept because"
    assert "0.750 done best 1" in rows[1] and "0.500 failed every 30" in rows[2] and "- - last 1" in rows[4]
    listed = {row["step"]: row["upload"] for row in json.loads(asyncrl("list", "--json")[1])["checkpoints"]}
    assert (listed[20], listed[30], listed[50]) == ("done", "no space", None)


def test_list_as_json(asyncrl: Any, run: RunDirectory) -> None:
    (run.path / "checkpoints/step-000040/state/shard").unlink()
    code, out, _ = asyncrl("list", run.run_id[:6], "--json")
    assert code == 0
    document = json.loads(out)
    assert document["run"] == run.run_id
    by_step = {row["step"]: row for row in document["checkpoints"]}
    assert by_step[20]["accuracy"] == 0.75
    assert by_step[20]["saved_at"] == SAVED + 20, "by the journal: a copied folder has another time"
    assert by_step[50]["accuracy"] is None
    assert by_step[20]["kept"] == ["best 1"]
    assert by_step[20]["bytes"] > 2000
    assert by_step[20]["damages"] == []
    assert by_step[40]["damages"] == [{"file": "state/shard", "problem": "is missing"}]
    assert by_step[20]["folder"] == str(run.path / "checkpoints/step-000020")


def test_list_without_a_journal_and_without_checkpoints(asyncrl: Any, run: RunDirectory) -> None:
    (run.path / FILE).unlink()
    code, out, _ = asyncrl("list")
    assert code == 0
    assert "best 1" not in out
    for checkpoint in complete_checkpoints(run.path / "checkpoints"):
        checkpoint.folder.rename(run.path / checkpoint.folder.name)
    assert asyncrl("list") == (0, f"{run.run_id} has no checkpoint yet\n", "")
    for command in ("verify", "export --to there"):
        code, out, error = asyncrl(*command.split())
        assert (code, out) == (2, "")
        assert error.startswith(f"error: the run has no checkpoint\n --> {run.run_id}\nhint: ")


def test_verify_reads_every_byte(asyncrl: Any, run: RunDirectory) -> None:
    code, out, error = asyncrl("verify")
    assert (code, error) == (0, "")
    assert out.splitlines()[0] == "step 10: undamaged (2.1 kB)"
    damage(run, 20)
    code, out, error = asyncrl("verify", "latest")
    assert code == 1
    assert error == "step 20: state/shard has changed\n"
    assert len(out.splitlines()) == 4
    assert asyncrl("verify", "--step", 20)[0] == 1
    assert asyncrl("verify", "--step", 30)[0] == 0


def test_prune_uses_the_rules_in_the_spec(asyncrl: Any, run: RunDirectory) -> None:
    code, out, _ = asyncrl("prune", "--dry-run")
    assert (code, out) == (0, "would remove the checkpoints of steps 10, 40 (4.1 kB); 3 kept\n")
    assert steps_of(run) == [10, 20, 30, 40, 50]
    code, out, _ = asyncrl("prune")
    assert (code, out) == (0, "removed the checkpoints of steps 10, 40 (4.1 kB); 3 kept\n")
    assert steps_of(run) == [20, 30, 50]
    with closing(open_for_reading(run.path / FILE)) as journal:
        gone = journal.execute("SELECT step FROM checkpoints WHERE removed_at IS NOT NULL ORDER BY step").fetchall()
    assert gone == [(10,), (40,)]
    assert asyncrl("prune")[1] == "removed nothing; 3 kept\n"


def test_prune_options_replace_the_rules_in_the_spec(asyncrl: Any, run: RunDirectory) -> None:
    code, out, _ = asyncrl("prune", "--keep-last", 2, "--keep-every", 0, "--keep-best", 2)
    assert (code, out) == (0, "removed the checkpoints of steps 10 (2.1 kB); 4 kept\n")
    assert steps_of(run) == [20, 30, 40, 50]


def test_prune_is_refused_while_the_run_is_driven(asyncrl: Any, run: RunDirectory) -> None:
    run.lock()
    code, out, error = asyncrl("prune")
    assert (code, out) == (1, "")
    assert "the run is being driven by pid" in error
    assert steps_of(run) == [10, 20, 30, 40, 50]
    assert asyncrl("prune", "--dry-run")[0] == 0


def test_prune_keeps_a_checkpoint_while_another_command_reads_it(
    asyncrl: Any, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = verified_checkpoint(run, 10)  # as `evaluate` holds it
    code, out, error = asyncrl("prune")
    assert (code, out) == (0, "removed the checkpoints of steps 40 (2.1 kB); 4 kept\n")
    assert "the checkpoint of step 10 is kept: another command reads it" in error
    del evaluated
    assert asyncrl("prune")[1] == "removed the checkpoints of steps 10 (2.1 kB); 3 kept\n"

    def deleted_meanwhile(checkpoint: Checkpoint) -> list[Damage]:
        remove(checkpoint)
        return verify(checkpoint)

    monkeypatch.setattr(checkpoints, "verify", deleted_meanwhile)
    with pytest.raises(RunError, match="the checkpoint of step 20 was just deleted"):
        verified_checkpoint(run, 20)


def test_prune_does_not_guess_which_are_best(asyncrl: Any, run: RunDirectory) -> None:
    (run.path / FILE).unlink()
    code, _, error = asyncrl("prune")
    assert code == 1
    assert "the run's journal has no greedy accuracy" in error
    assert steps_of(run) == [10, 20, 30, 40, 50]
    assert asyncrl("prune", "--keep-best", 0)[0] == 0
    assert steps_of(run) == [30, 50]


def test_export_writes_what_transformers_loads(
    asyncrl: Any, run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from asyncrl_cli.train.model.initial import build_initial_model

    init = load_spec(run.path / "spec.yaml").spec.model.init
    assert init is not None
    build_initial_model(init, 64, 3, run.path / "model_stub")
    weights = AutoModelForCausalLM.from_pretrained(run.path / "model_stub").state_dict()
    (run.path / "model_stub/model.safetensors").unlink()
    folder = run.path / "checkpoints/step-000030"
    (folder / "state/shard").unlink()
    module = {f"model.{name}": tensor for name, tensor in weights.items()}
    torch.save({"module": module}, folder / "state/mp_rank_00_model_states.pt")
    seal(folder)

    capsys.readouterr()
    code, out, _ = asyncrl("export", "--step", 30, "--to", tmp_path / "out/model")
    assert (code, out) == (0, f"the model of step 30 is in {tmp_path / 'out/model'}\n")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out/model").decode([40, 41]) != ""

    capsys.readouterr()
    code, _, error = asyncrl("export", "--step", 30, "--to", tmp_path / "out/model")
    assert (code, error.splitlines()[:2]) == (1, ["error: the folder is not empty", f" --> {tmp_path / 'out/model'}"])
    (tmp_path / "file").touch()
    code, _, error = asyncrl("export", "--step", 30, "--to", tmp_path / "file")
    assert (code, error.splitlines()[:2]) == (1, ["error: a file with this name exists", f" --> {tmp_path / 'file'}"])
    (folder / "run.json").write_text("{}")
    code, _, error = asyncrl("export", "--step", 30, "--to", tmp_path / "other")
    assert code == 1
    assert "the checkpoint is damaged: run.json has 2 bytes" in error
    assert "the checkpoint of step 20 is undamaged: choose it with --step 20" in error
    assert not (tmp_path / "other").exists()
