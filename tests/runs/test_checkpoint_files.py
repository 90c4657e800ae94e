"""Checkpoints on disk are complete or absent, damage is named, and only checkpoints without a reason are removed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs import checkpoints
from asyncrl_cli.runs.checkpoints import (
    Checkpoint,
    Damage,
    Digest,
    DigestedFile,
    archive_later,
    checkpoint_name,
    checkpoint_of,
    complete_checkpoints,
    keep_reasons,
    remove,
    seal,
    sweep,
    verified_checkpoint,
    verify,
)
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import CheckpointSpec

pytestmark = pytest.mark.slow

SHARD = "state/zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "test")


def make(run: RunDirectory, step: int) -> Checkpoint:
    """An intact checkpoint with a different shard for each step."""
    folder = run.path / "checkpoints" / checkpoint_name(step)
    (folder / "state").mkdir(parents=True)
    (folder / SHARD).write_bytes(b"shard of %d" % step)
    (folder / "run.json").write_text(json.dumps({"step": step, "trainer": TRAINER}))
    seal(folder)
    return Checkpoint(folder, step)


@given(parts=st.lists(st.binary(max_size=2000), max_size=5))
def test_a_checksum_made_while_writing_equals_the_files_checksum(
    parts: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("digested") / "file"
    with DigestedFile(path) as file:
        for part in parts:
            assert file.write(memoryview(part)) == len(part)
        digest = file.digest
    assert path.read_bytes() == b"".join(parts)
    assert digest == Digest(path.stat().st_size, blake3(path.read_bytes()).hexdigest())


def test_torch_saves_through_a_digested_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from asyncrl_cli.train.checkpoints import save_file

    state = {"weights": torch.randn(300_000), "step": 3}
    digest = save_file(state, tmp_path / "shard.pt")
    assert digest.blake3 == blake3((tmp_path / "shard.pt").read_bytes()).hexdigest()
    for mapped in (False, True):
        loaded = torch.load(tmp_path / "shard.pt", mmap=mapped)
        assert torch.equal(loaded["weights"], state["weights"]) and loaded["step"] == 3


def test_files_that_ranks_have_digested_are_not_read_again(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run.path / "checkpoints" / checkpoint_name(40)
    (folder / "state").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"step": 40, "trainer": TRAINER}))
    with DigestedFile(folder / SHARD) as file:
        file.write(b"shard of 40")
    with monkeypatch.context() as patched:
        read = []
        digest = checkpoints._digest
        patched.setattr(checkpoints, "_digest", lambda path, check: (read.append(path.name), digest(path, check))[1])
        seal(folder, rank_digests={SHARD: file.digest})
    assert read == ["run.json"]
    assert verify(Checkpoint(folder, 40)) == []
    (folder / SHARD).write_bytes(b"shard of 41")
    assert verify(Checkpoint(folder, 40)) == [Damage(SHARD, "has changed")]


@pytest.mark.parametrize("content", [None, b"shard of"])
def test_a_shard_that_does_not_reach_the_drivers_host_is_refused(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "state").mkdir()
    if content is not None:
        (tmp_path / SHARD).write_bytes(content)
    with pytest.raises(RunError, match=f"wrote {SHARD}"):
        seal(tmp_path, rank_digests={SHARD: Digest(11, "0" * 64)})
    assert not (tmp_path / "files.json").exists()


TRAINER = {"ranks": 2, "zero_stage": 3, "dtype": "float32"}


def test_complete_checkpoints_are_listed_by_step(run: RunDirectory) -> None:
    made = [make(run, step) for step in (2_000_000, 40, 5)]
    folder = run.path / "checkpoints"
    for name in (".saving-step-000009", ".removing-step-000001", "step-x", "notes", "step-12"):
        (folder / name).mkdir()
    (folder / "step-000077").write_text("a file")
    assert complete_checkpoints(folder) == made[::-1]
    assert complete_checkpoints(run.path / "missing") == []
    assert Checkpoint.from_folder(made[1].folder) == made[1]
    with pytest.raises(ValueError, match="not called like a checkpoint"):
        Checkpoint.from_folder(folder / "notes")


@pytest.mark.parametrize("text", [None, "", "[1]", "{}", '{"trainer": {"ranks": 1}}', '{"trainer": 3}'])
def test_an_empty_run_file_is_damage(run: RunDirectory, text: str | None) -> None:
    checkpoint = make(run, 40)
    (checkpoint.folder / "run.json").unlink()
    if text is not None:
        (checkpoint.folder / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"the checkpoint is damaged: run\.json"):
        checkpoint.trainer()


@given(at=st.integers(0, len("shard of 40") - 1), bit=st.integers(0, 7))
def test_a_single_bit_is_found(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    checkpoint = make(RunDirectory.create(tmp_path_factory.mktemp("runs"), "test"), 40)
    path = checkpoint.folder / SHARD
    contents = bytearray(path.read_bytes())
    contents[at] ^= 1 << bit
    path.write_bytes(contents)
    assert verify(checkpoint) == [Damage(SHARD, "has changed")]
    assert verify(checkpoint, contents=False) == []


def test_every_damaged_file_is_named(run: RunDirectory) -> None:
    checkpoint = make(run, 40)
    (checkpoint.folder / SHARD).write_bytes(b"half")
    (checkpoint.folder / "run.json").unlink()
    assert list(map(str, verify(checkpoint, contents=False))) == [
        "run.json is missing",
        f"{SHARD} has 4 bytes instead of 11",
    ]
    (checkpoint.folder / "files.json").write_text('{"run.json": 3}')
    assert list(map(str, verify(checkpoint))) == ["files.json cannot be read"]
    (checkpoint.folder / "files.json").unlink()
    assert list(map(str, verify(checkpoint))) == ["files.json cannot be read"]


def test_a_run_continues_from_the_newest_checkpoint(run: RunDirectory) -> None:
    assert verified_checkpoint(run) is None
    made = [make(run, step) for step in (20, 40)]
    assert verified_checkpoint(run) == made[1]
    assert verified_checkpoint(run, 20) == made[0] == checkpoint_of(run, 20)
    with pytest.raises(RunError, match=r"there is no checkpoint of step 30 \(steps with a checkpoint: 20, 40\)"):
        verified_checkpoint(run, 30)


def test_a_damaged_checkpoint_is_never_skipped(run: RunDirectory) -> None:
    made = [make(run, step) for step in (10, 20, 40)]
    for checkpoint in made[1:]:
        (checkpoint.folder / SHARD).unlink()
    problem = rf"damaged: {SHARD} is missing \(the checkpoint of step 10 is undamaged: choose it with --step 10\)"
    for step in (None, 40, 20):
        with pytest.raises(RunError, match=problem) as error:
            verified_checkpoint(run, step)
        assert error.value.location == str(made[1 if step == 20 else 2].folder)
    (made[0].folder / "run.json").unlink()
    with pytest.raises(RunError, match="every older checkpoint is damaged"):
        verified_checkpoint(run)


def test_half_a_removal_is_not_a_checkpoint(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run.path / "checkpoints"
    checkpoint = make(run, 40)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # the process dies here
        remove(checkpoint)
    assert complete_checkpoints(folder) == []
    assert [path.name for path in folder.iterdir()] == [".removing-step-000040"]
    again = make(run, 40)
    remove(again)
    assert list(folder.iterdir()) == []
    for name in (".saving-step-000040", ".universal-step-000020", ".step-000001"):
        (folder / name / "state").mkdir(parents=True)
    make(run, 5)
    sweep(folder)
    assert [path.name for path in folder.iterdir()] == ["step-000005"]


def test_later_checkpoints_are_archived_when_their_steps_are_trained_again(run: RunDirectory) -> None:
    folder = run.path / "checkpoints"
    for step in (10, 20, 30):
        make(run, step)
    assert archive_later(folder, 20) == folder / "archived-1"
    assert archive_later(folder, 10) == folder / "archived-2"
    assert archive_later(folder, 10) is None
    sweep(folder)
    found = {name: complete_checkpoints(folder / name) for name in (".", "archived-1", "archived-2")}
    assert {name: [at.step for at in of] for name, of in found.items()} == {
        ".": [10],
        "archived-1": [30],
        "archived-2": [20],
    }


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_archiving_that_a_kill_interrupts(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    folder = run.path / "checkpoints"
    for step in (10, 20, 30, 40):
        make(run, step)
    rename, left = os.rename, [moved]

    def killed(old: Path, new: Path) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr("os.rename", killed)
        with pytest.raises(KeyboardInterrupt):
            archive_later(folder, 10)
    assert [found.step for found in complete_checkpoints(folder)] == [10]
    archive_later(folder, None)
    make(run, 50)
    assert [found.step for found in complete_checkpoints(folder)] == [10, 50]
    assert len(list(folder.glob("archived-*/*"))) == 3


def test_sealed_files_are_on_disk(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr("os.fsync", fsync)
    folder = make(run, 40).folder
    assert set(synced) == {folder, *folder.rglob("*")}


# -- retention

STEPS = st.sets(st.integers(0, 60), max_size=12)
ACCURACIES = st.dictionaries(st.integers(0, 60), st.sampled_from([0.0, 0.25, 0.5, 0.75]), max_size=20)


def kept(
    steps: Collection[int],
    accuracies: dict[int, float],
    last: int,
    every: int,
    best: int,
    awaited: Collection[int] = (),
) -> set[int]:
    keep = CheckpointSpec(keep_last=last, keep_every=every, keep_best=best)
    return {step for step, why in keep_reasons(steps, accuracies, keep, awaited).items() if why}


@given(
    steps=STEPS,
    accuracies=ACCURACIES,
    awaited=STEPS,
    keep_last=st.integers(1, 5),
    keep_every=st.integers(0, 7),
    keep_best=st.integers(0, 4),
)
def test_checkpoints_are_kept_by_the_rules(
    steps: set[int], accuracies: dict[int, float], awaited: set[int], keep_last: int, keep_every: int, keep_best: int
) -> None:
    stays = kept(steps, accuracies, keep_last, keep_every, keep_best, awaited)
    assert stays <= steps
    newest = set(sorted(steps)[-keep_last:])
    every = {step for step in steps if keep_every and step % keep_every == 0}
    assert stays >= newest | every
    pending = {step for step in steps & awaited if keep_best and step not in accuracies}
    assert stays >= pending
    for_accuracy = stays - newest - every - pending
    assert len(for_accuracy) <= keep_best
    assert for_accuracy <= accuracies.keys()
    # No removed checkpoint is better than a checkpoint kept only for its accuracy, and `best` checkpoints are kept.
    gone = [accuracies[step] for step in steps - stays if step in accuracies]
    assert all(accuracies[step] >= max(gone, default=0.0) for step in for_accuracy)
    assert len([step for step in stays if step in accuracies]) >= min(keep_best, len(steps & accuracies.keys()))


@given(steps=st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True).map(sorted), accuracies=ACCURACIES)
def test_pruning_after_every_step_keeps_what_pruning_at_the_end_keeps(
    steps: list[int], accuracies: dict[int, float]
) -> None:
    there: set[int] = set()
    for step in steps:
        known = {at: value for at, value in accuracies.items() if at <= step}
        there = kept({*there, step}, known, 1, 10, 2)
    assert there == kept(steps, accuracies, 1, 10, 2)


def test_the_reasons_are_given() -> None:
    keep = CheckpointSpec(keep_last=1, keep_every=20, keep_best=1)
    accuracies = {0: 0.1, 5: 0.5, 10: 0.5, 20: 0.1}
    reasons = keep_reasons([0, 3, 5, 10, 15, 20], accuracies, keep, awaited=[15], uploading=(3,))
    assert reasons == {
        0: ("every 20",),
        3: ("upload running",),
        5: (),
        10: ("best 1",),
        15: ("evaluation running",),
        20: ("last 1", "every 20"),
    }
