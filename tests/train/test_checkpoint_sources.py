"""Which checkpoints a trainer can load, and how; others are refused before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.checkpoints import Checkpoint
from asyncrl_cli.spec.sections import TrainerSpec
from asyncrl_cli.train.checkpoints import find_source, load_state, reading_tensors, to_universal
from asyncrl_cli.train.model.saving import consolidate, export_model


def empty_checkpoint(folder: Path, ranks: int, zero_stage: int, **further: int) -> Checkpoint:
    """A checkpoint that has only the layout of its trainer."""
    (folder / "step-000007/state").mkdir(parents=True)
    layout = {"ranks": ranks, "zero_stage": zero_stage, "dtype": "float32"} | further
    (folder / "step-000007/run.json").write_text(json.dumps({"trainer": layout}))
    (folder / "step-000007/state/trainer.json").write_text('{"updates": 7, "optimizer_steps": 5}')
    return Checkpoint.from_folder(folder / "step-000007")


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(RunError, match="the model cannot be written"):
        export_model(Checkpoint(tmp_path / "step-000001", 1), "", Path("/proc/models/mine"), None)
    with pytest.raises(RunError, match="the folder is not empty"):
        export_model(Checkpoint(tmp_path / "step-000001", 1), "", tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("saved", "wanted", "universal"),
    [
        ((2, 3), (2, 3), False),
        ((2, 3), (1, 3), True),
        ((1, 1), (1, 2), True),
        ((2, 2), (3, 1), True),
        ((2, 0), (5, 0), False),
    ],
)
def test_trainer_loads_its_shards_or_a_universal_checkpoint(
    tmp_path: Path, saved: tuple[int, int], wanted: tuple[int, int], universal: bool
) -> None:
    source = find_source(empty_checkpoint(tmp_path, *saved), TrainerSpec(ranks=wanted[0], zero_stage=wanted[1]))
    assert source.is_universal == universal
    assert source.folder.name == (".universal-step-000007" if universal else "step-000007")


@pytest.mark.parametrize(("saved", "wanted"), [(3, 2), (1, 3), (0, 3), (2, 0)])
def test_shards_that_cannot_be_read_are_refused(tmp_path: Path, saved: int, wanted: int) -> None:
    checkpoint = empty_checkpoint(tmp_path, 1, saved)
    with pytest.raises(RunError, match=f"saved with trainer.zero_stage {saved} and cannot be loaded with {wanted}"):
        find_source(checkpoint, TrainerSpec(zero_stage=wanted))
    with pytest.raises(RunError, match=r"saved with trainer.dtype float32 .* .set trainer.dtype to float32"):
        find_source(checkpoint, TrainerSpec(zero_stage=saved, dtype="bfloat16"))


@pytest.mark.slow
def test_a_conversion_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    source = find_source(empty_checkpoint(tmp_path, 2, 3), TrainerSpec(ranks=1, zero_stage=3))
    with pytest.raises(RunError, match=r"FileNotFoundError: can't find \*_optim_states.pt.*.set trainer.ranks to 2"):
        to_universal(source)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000007"]


def test_missing_counters_are_damage(tmp_path: Path) -> None:
    checkpoint = empty_checkpoint(tmp_path, 1, 3)
    (checkpoint.folder / "state/trainer.json").write_text('{"updates": 7}')
    with pytest.raises(RunError, match=r"the checkpoint is damaged: state/trainer\.json cannot be read"):
        find_source(checkpoint, TrainerSpec(zero_stage=3))


@pytest.mark.parametrize(("wanted", "universal"), [((4, 2), False), ((4, 4), True), ((2, 2), True), ((4, 1), None)])
def test_divided_experts_load_into_divided_ones(
    tmp_path: Path, wanted: tuple[int, int], universal: bool | None
) -> None:
    checkpoint = empty_checkpoint(tmp_path, 4, 3, expert_parallel=2)
    trainer = TrainerSpec(ranks=wanted[0], expert_parallel=wanted[1])
    if universal is None:
        with pytest.raises(RunError, match=r"saved with trainer.expert_parallel 2 and cannot be loaded with 1"):
            find_source(checkpoint, trainer)
        return
    assert find_source(checkpoint, trainer).is_universal == universal


class Code:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_export_runs_no_code_from_a_checkpoint(tmp_path: Path, zero_stage: int) -> None:
    checkpoint = empty_checkpoint(tmp_path, 1, zero_stage)
    code = {"module": {"model.weight": torch.zeros(1)}, "further": Code(tmp_path / "made")}
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(code, checkpoint.folder / "state" / name)
    with pytest.raises(RunError, match=r"has more than tensors, .* it names posix\.mkdir"):
        consolidate(checkpoint)
    assert not (tmp_path / "made").exists()


def test_resume_runs_no_code_from_a_checkpoint(tmp_path: Path) -> None:
    source = find_source(empty_checkpoint(tmp_path, 1, 3), TrainerSpec(zero_stage=3))
    shards, random_states = (source.root / "state" / name for name in ("model.pt", "random-0.pt"))
    torch.save(Code(tmp_path / "made"), shards)
    torch.save(Code(tmp_path / "made"), random_states)
    optimizer = SimpleNamespace(param_groups=[])
    reads = SimpleNamespace(
        optimizer=optimizer, load_checkpoint=lambda *_, **__: torch.load(shards, weights_only=False)
    )
    reads_nothing = SimpleNamespace(optimizer=optimizer, load_checkpoint=lambda *_, **__: None)
    for engine in (reads, reads_nothing):
        with pytest.raises(RunError, match="more than tensors"):
            load_state(engine, source, 0)
    assert not (tmp_path / "made").exists()


class Attribute:
    """An object that is pickled as a call of ``getattr``."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._arguments


def test_enums_of_older_pythons_are_read_and_no_other_attributes(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3 pickle the member of an enum as ``getattr(class, name)``."""
    file = tmp_path / "state.pt"

    def read(*arguments: Any) -> object:
        torch.save(Attribute(*arguments), file)
        with reading_tensors(tmp_path):
            return torch.load(file)

    assert read(ZeroStageEnum, "weights") is ZeroStageEnum.weights
    for arguments in ((ZeroStageEnum, "mro"), (ZeroStageEnum, "__init__"), (torch.Tensor, "backward")):
        with pytest.raises(RunError, match="more than tensors"):
            read(*arguments)


@pytest.mark.slow
def test_a_conversion_runs_no_code_from_a_checkpoint(tmp_path: Path) -> None:
    source = find_source(empty_checkpoint(tmp_path, 2, 3), TrainerSpec(ranks=1, zero_stage=3))
    for rank in range(2):
        for kind in ("model", "optim"):
            name = f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
            torch.save(Code(tmp_path / "made"), source.root / "state" / name)
    with pytest.raises(RunError, match="more than tensors"):
        to_universal(source)
    assert not (tmp_path / "made").exists()
