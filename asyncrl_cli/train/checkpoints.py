"""The trainer's part of a checkpoint: DeepSpeed's shards, loaded by the same or another number of ranks.

The same number of ranks load their own shards. Another number, with ZeRO 1, 2 or 3, loads DeepSpeed's universal
checkpoint, which has full parameters and full Adam moments; each rank takes its part. Rank 0 makes it in a hidden
folder next to the checkpoint, and removes it when all ranks have read it. With ZeRO 0 nothing is sharded, and every
rank loads the same file (decision 0009).

A rank copies its state into this host's memory and continues to train while a thread writes the copy.

    state/
      *.pt              DeepSpeed's
      trainer.json      the number of updates that changed the weights
      random-N.pt       rank N's random-number states
    critic/state/       the same for the critic, where there is one
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.checkpoints import STATE, Checkpoint, Digest, DigestedFile
from asyncrl_cli.spec.sections import TrainerSpec
from asyncrl_cli.system.memory import available_memory

log = logging.getLogger(__name__)

UNIVERSAL = "universal"
COUNTER_FILE = "trainer.json"
CRITIC = "critic"
"""The folder of a checkpoint's critic."""
FORCE_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
MOST_MEMORY = 0.9
"""Share of the host's available memory that copies of the ranks' states may take."""


def _zero_stage(enum: object, name: str) -> object:
    """Stand for ``getattr`` in a checkpoint: Python 3.11.0 to 3.11.3 pickle the member of an enum as such a call."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    members: Mapping[str, object] = ZeroStageEnum.__members__
    if enum is not ZeroStageEnum or name not in members:
        raise pickle.UnpicklingError("GLOBAL builtins.getattr is called with other arguments")
    return members[name]


@contextmanager
def reading_tensors(folder: Path) -> Iterator[None]:
    """Inside the block, torch reads only tensors and plain values from files, and runs no code.

    Torch files are pickles, which can call any function: the author of the checkpoint in ``folder`` could run code
    here. Raises ``RunError`` when a file needs more than a few harmless classes.
    """
    import numpy as np
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from torch.serialization import safe_globals

    rebuild_array = np.array(0).__reduce__()[0]
    assert callable(rebuild_array)
    of_arrays = [rebuild_array, np.ndarray, np.dtype, type(np.dtype("uint32"))]  # NumPy's random-number state
    previous_setting = os.environ.get(FORCE_TENSORS)
    os.environ[FORCE_TENSORS] = "1"  # overrides weights_only=False, which DeepSpeed passes
    try:
        enums = [ZeroStageEnum, (_zero_stage, "builtins.getattr")]
        with safe_globals([LossScaler, fragment_address, *enums, *of_arrays]):
            yield
    except pickle.UnpicklingError as error:
        global_name = re.search(r"GLOBAL (\S+)", str(error))
        content = f"it names {global_name[1]}" if global_name else str(error).splitlines()[0]
        raise RunError(
            f"the checkpoint has more than tensors, and nothing more was read: {content}",
            location=str(folder),
            hint="asyncrl writes no such checkpoint; use one from a source that you trust",
        ) from None
    finally:
        if previous_setting is None:
            del os.environ[FORCE_TENSORS]
        else:
            os.environ[FORCE_TENSORS] = previous_setting


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that one engine loads."""

    checkpoint: Checkpoint
    root: Path  # the folder that was saved
    optimizer_steps: int  # updates that changed the weights
    folder: Path  # ``root``, or the folder for the universal checkpoint made from it

    @property
    def is_universal(self) -> bool:
        return self.folder != self.root


def check_layout(checkpoint: Checkpoint, trainer: TrainerSpec) -> None:
    """Raise ``RunError`` when a trainer of this spec cannot load a checkpoint; the number of ranks may differ."""
    saved = checkpoint.trainer()
    # ZeRO 1 and 2 shard the same state. Every other stage has its own format.
    same_shards = saved.zero_stage == trainer.zero_stage or {saved.zero_stage, trainer.zero_stage} == {1, 2}
    were, are = saved.expert_parallel, trainer.expert_parallel
    for key, was, is_now, fits in (
        ("zero_stage", saved.zero_stage, trainer.zero_stage, same_shards),
        ("dtype", saved.dtype, trainer.dtype, saved.dtype == trainer.dtype),
        # AutoEP's weights have other names and shapes than the model's (decision 0055).
        ("expert_parallel", were, are, (were > 1) == (are > 1)),
    ):
        if not fits:
            raise RunError(
                f"the checkpoint was saved with trainer.{key} {was} and cannot be loaded with {is_now}",
                location=str(checkpoint.folder),
                hint=f"set trainer.{key} to {was}, or start a new run from `asyncrl checkpoint export`",
            )


def find_source(checkpoint: Checkpoint, trainer: TrainerSpec, engine_name: str = "") -> Source:
    """Return the source that a trainer of this spec loads for the policy, or for ``CRITIC``.

    Raises ``RunError`` when it cannot load this checkpoint.
    """
    saved, root = checkpoint.trainer(), checkpoint.folder / engine_name
    check_layout(checkpoint, trainer)
    if engine_name and not root.is_dir():
        raise RunError(
            f"the checkpoint has no {engine_name}: it was saved by an algorithm without one",
            location=str(checkpoint.folder),
            hint="resume with the algorithm that saved it, or start a new run from `asyncrl checkpoint export`",
        )
    try:
        optimizer_steps = int(json.loads((root / STATE / COUNTER_FILE).read_text())["optimizer_steps"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"the checkpoint is damaged: {STATE}/{COUNTER_FILE} cannot be read: {error}", location=str(root)
        ) from error
    were, are = ((layout.ranks, layout.zero_stage, layout.expert_parallel) for layout in (saved, trainer))
    if saved.zero_stage == 0 or were == are:
        return Source(checkpoint, root=root, optimizer_steps=optimizer_steps, folder=root)
    folder = checkpoint.folder.with_name("-".join(filter(None, (f".{UNIVERSAL}", engine_name, checkpoint.folder.name))))
    return Source(checkpoint, root=root, optimizer_steps=optimizer_steps, folder=folder)


def to_universal(source: Source) -> None:
    """Make the universal checkpoint at ``source.folder``. It needs as much disk as the checkpoint, for a while twice.

    Does nothing for a trainer that never stepped, because DeepSpeed's converter fails on it. Raises ``RunError`` with
    the converter's last line when it fails.
    """
    if not source.optimizer_steps:
        return
    shutil.rmtree(source.folder, ignore_errors=True)
    source.folder.mkdir()
    parent = source.folder.parent
    # Paths relative to the parent: the converter uses them as regular expressions, and a user's path may have a plus.
    program = [sys.executable, "-c", f"from {__name__} import convert; convert()", "--inject_missing_state"]
    folders = {
        "input": source.root.relative_to(parent) / STATE,
        "output": source.folder.relative_to(parent) / UNIVERSAL,
    }
    converter = subprocess.run(
        [*program, *(f"--{option}_folder={folder}" for option, folder in folders.items())],
        cwd=parent,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if converter.returncode:
        shutil.rmtree(source.folder, ignore_errors=True)
        reason = (converter.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(
            f"the checkpoint could not be converted for another number of ranks: {reason}",
            location=str(source.checkpoint.folder),
            hint=f"set trainer.ranks to {source.checkpoint.trainer().ranks}, with which it was saved",
        )


def convert() -> None:
    """DeepSpeed's converter as a program, with its arguments."""
    from deepspeed.checkpoint import ds_to_universal

    with reading_tensors(Path.cwd()):
        ds_to_universal.main(ds_to_universal.parse_arguments())


class Snapshot:
    """One rank's files of a checkpoint: copies of its state, written while training continues."""

    def __init__(self) -> None:
        self.files: dict[Path, Any] = {}
        """States to be written. The caller may add states that nothing else changes."""
        self._digests: dict[Path, Digest] = {}
        self._sharers = 0
        self._writing = threading.Lock()  # ``write`` runs in another thread

    @contextmanager
    def recording(self, sharers: int) -> Iterator[None]:
        """Take a new snapshot in the block. ``sharers``: ranks that do this on the host at the same time."""
        import torch

        with self._writing:  # waits for a running ``write`` of the last snapshot
            self.files, self._digests, self._sharers = {}, {}, sharers
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # before the next update changes what is being copied

    def add(self, state: Any, path: Path) -> None:
        """Begin to copy a state that torch can save; the block of ``recording`` waits for the end. Without memory for a
        copy, write the file now."""
        import torch
        from torch.utils._pytree import tree_leaves

        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        # Tensors that share a storage share it in the copy and in the file, as in ``torch.save``. The memory's address
        # cannot be the key, because all empty storages have address 0.
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        if not self._has_room(sum(storage.nbytes() for storage in storages.values())):
            self._digests[path] = save_file(state, path)
            return
        copied = {}
        for key, storage in storages.items():
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
            copied[key] = memory.untyped_storage().copy_(storage, non_blocking=True)
        views = {}
        for tensor in tensors:
            view, copied_storage = torch.empty(0, dtype=tensor.dtype), copied[tensor.untyped_storage()._cdata]
            views[id(tensor)] = view.set_(copied_storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        self.files[path] = copy.deepcopy(state, views)

    def write(self) -> dict[Path, Digest]:
        """Write the copies, in any thread; returns the checksums of all files of this rank. They are on disk."""
        with self._writing:
            while self.files:
                path, state = self.files.popitem()  # frees each copy's memory once it is written
                self._digests[path] = save_file(state, path)
            return self._digests

    def _has_room(self, nbytes: int) -> bool:
        import torch

        pinned = torch.cuda.host_memory_stats()  # memory that torch keeps for the next copies; empty on CPUs
        spare = pinned.get("allocated_bytes.current", 0) - pinned.get("active_bytes.current", 0)
        # Times the ranks of this host: they all copy now, and see the same available memory.
        if not (fits := bool(self._sharers * (nbytes - spare) <= MOST_MEMORY * available_memory())):
            log.warning("training waits while %d bytes are written: this host has no memory for a copy", nbytes)
        return fits


def save_state(engine: Any, snapshot: Snapshot, folder: Path, rank: int) -> None:
    """Add this rank's shards and random-number states to ``snapshot``, and write the counter; collective."""
    import numpy as np
    import torch
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    class SnapshotWriter(TorchCheckpointEngine):  # type: ignore[misc]
        def save(self, state_dict: Any, path: str) -> None:
            snapshot.add(state_dict, Path(path))

    engine.checkpoint_engine = SnapshotWriter()
    engine.save_checkpoint(str(folder), tag=STATE)
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    snapshot.files[_random_states(folder, rank)] = states
    if rank == 0:
        # DeepSpeed's count of steps includes skipped updates.
        optimizer_steps = int(engine.global_steps - engine.skipped_steps)
        (folder / STATE / COUNTER_FILE).write_text(json.dumps({"optimizer_steps": optimizer_steps}) + "\n")


def save_file(state: Any, path: Path) -> Digest:
    """Write a state that torch can save; returns the file's checksum."""
    import torch

    with DigestedFile(path) as file:
        torch.save(state, file)  # type: ignore[arg-type]  # it only writes and flushes
        return file.digest


def load_state(engine: Any, source: Source, rank: int) -> None:
    """Load this rank's part into a fresh engine; collective. Deletes the universal checkpoint.

    A rank that did not exist when the checkpoint was saved keeps its initial random-number states. The optimizer keeps
    the spec's settings (weight decay, betas, clipping), which a resume may have changed.
    """
    import numpy as np
    import torch

    optimizer = engine.optimizer
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step", "lr")}
        for group in optimizer.param_groups
    ]
    clip_norm = getattr(optimizer, "clip_grad", None)  # DeepSpeed's, under ZeRO
    if not source.is_universal:
        with reading_tensors(source.folder):
            engine.load_checkpoint(str(source.folder), tag=STATE)
    elif source.optimizer_steps:
        with reading_tensors(source.folder):
            engine.load_checkpoint(str(source.folder), tag=UNIVERSAL)
        # DeepSpeed's loader gives all parts of the optimizer the same step counter, and each part would advance it:
        # with two parts Adam would count every update twice.
        for parameter, state in engine.basic_optimizer.state.items():
            state["step"] = state["step"].to(parameter.device, copy=True)
        torch.distributed.barrier()  # all ranks have read it
        if rank == 0:
            shutil.rmtree(source.folder, ignore_errors=True)
    # Otherwise the trainer never stepped: nothing was converted, and the engine already has the initial weights.
    for group, group_settings in zip(optimizer.param_groups, settings, strict=True):
        group.update(group_settings)
    if clip_norm is not None:
        optimizer.clip_grad = clip_norm
    path = _random_states(source.root, rank)
    if path.is_file():
        with reading_tensors(path):
            states = torch.load(path)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def _random_states(folder: Path, rank: int) -> Path:
    return folder / STATE / f"random-{rank}.pt"
