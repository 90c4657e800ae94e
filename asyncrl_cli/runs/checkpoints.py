"""Checkpoints on disk: their format, detection of damage, and retention (decision 0009).

    checkpoints/step-000040/
      state/        DeepSpeed's shards, and each rank's random-number states
      run.json      the state of the run, and the layout of its trainer
      files.json    size and BLAKE3 checksum of every other file

Invariant: a folder called ``step-…`` was complete once, because it was written under a hidden name, synced and renamed.
So any missing or different file in it is damage. Hidden folders are left over from an interrupted save, removal or
conversion. ``checkpoints/archived-1`` and so on have checkpoints of steps that were trained again from an older
checkpoint; no command reads them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from asyncrl_cli.core.errors import RunArgumentError, RunError
from asyncrl_cli.core.files import atomic_write, rename, sync
from asyncrl_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from asyncrl_cli.spec.sections import CheckpointSpec

STATE = "state"
"""The trainer's part of a checkpoint."""
RUN_FILE = "run.json"
FILES_FILE = "files.json"
ARCHIVING = ".archiving"
"""A file in a run's ``checkpoints`` while some are archived. It has the last step with a checkpoint that counts."""
NAME = re.compile(r"step-(\d{6,})")
DIGEST_THREADS = 8
PIECE_BYTES = 2**18
Check = Callable[[], None]
"""Raises an exception if the result of the work is no longer needed."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A file's size and BLAKE3 checksum."""

    bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """The layout of the trainer that wrote a checkpoint. ``dtype``: the trained weights' dtype."""

    ranks: int
    zero_stage: int
    dtype: str
    expert_parallel: int = 1


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file of a checkpoint."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


class Lease:
    """A reader's lock on a checkpoint's list of files. While this object exists, ``remove_unread`` deletes nothing."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / FILES_FILE, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # it is just being removed, or the file system has no locks
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __del__(self) -> None:
        with suppress(AttributeError):  # the file could not be opened
            os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint, and the step after which it was taken."""

    folder: Path
    step: int
    lease: Lease | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_folder(cls, folder: Path) -> Checkpoint:
        """The checkpoint in a folder called ``step-NNNNNN``; nothing is read."""
        match = NAME.fullmatch(folder.name)
        if match is None:
            raise ValueError(f"{folder} is not called like a checkpoint")
        return cls(folder, int(match[1]))

    @property
    def saved_at(self) -> float:
        """Time of writing, in unix seconds."""
        return self.folder.stat().st_mtime

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in _files(self.folder))

    def state(self) -> dict[str, Any]:
        """The driver's saved state. Raises ``RunError`` if it cannot be read."""
        try:
            state = json.loads((self.folder / RUN_FILE).read_text())
            return dict(state)
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(f"{RUN_FILE} cannot be read: {error}") from error

    def trainer(self) -> TrainerLayout:
        """The layout of the saved trainer. Raises ``RunError`` if it cannot be read."""
        try:
            return TrainerLayout(**self.state()["trainer"])
        except (KeyError, TypeError) as error:
            raise self._damaged(f"{RUN_FILE} lacks the layout of the trainer") from error

    def _damaged(self, how: str) -> RunError:
        return RunError(f"the checkpoint is damaged: {how}", location=str(self.folder), hint="use an older one")


def checkpoint_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:06d}"


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a run's ``checkpoints`` folder, oldest first."""
    if not folder.is_dir():
        return []
    last_valid_step = _last_valid_step(folder)
    return [
        checkpoint
        for checkpoint in _all_checkpoints(folder)
        if last_valid_step is None or checkpoint.step <= last_valid_step
    ]


def _all_checkpoints(folder: Path) -> list[Checkpoint]:
    checkpoints = [
        Checkpoint.from_folder(path) for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _last_valid_step(folder: Path) -> int | None:
    """The last step that counts if a kill interrupted the archiving of later checkpoints; None if nothing did."""
    try:
        return int((folder / ARCHIVING).read_text())
    except FileNotFoundError:
        return None


def checkpoint_of(run: RunDirectory, step: int) -> Checkpoint:
    """The run's checkpoint of a step.

    Raises ``RunArgumentError``, with the steps that have a checkpoint, if there is none.
    """
    by_step = {checkpoint.step: checkpoint for checkpoint in complete_checkpoints(run.path / "checkpoints")}
    if step not in by_step:
        raise RunArgumentError(
            f"there is no checkpoint of step {step}",
            location=run.run_id,
            hint=f"steps with a checkpoint: {', '.join(map(str, by_step))}"
            if by_step
            else "the run has no checkpoint yet",
        )
    return by_step[step]


def verified_checkpoint(run: RunDirectory, step: int | None = None, lease: bool = True) -> Checkpoint | None:
    """Check every byte of the run's checkpoint of ``step``, or of its newest, and return it; None if it has none.

    With ``lease``, no other process prunes the checkpoint while the returned object exists; a driver, which prunes its
    own run, needs none. Raises ``RunError`` if there is no checkpoint of ``step``, and if it is damaged: then the error
    names an older, undamaged one. The user decides, because a run that continues from an older checkpoint repeats
    steps.
    """
    checkpoints = complete_checkpoints(run.path / "checkpoints")
    if step is None and not checkpoints:
        return None
    checkpoint = checkpoints[-1] if step is None else checkpoint_of(run, step)
    if lease:
        with suppress(OSError):  # `verify` reports it
            checkpoint = replace(checkpoint, lease=Lease(checkpoint.folder))
    if not (damages := verify(checkpoint)):
        return checkpoint
    if not checkpoint.folder.is_dir():
        hint = f"choose another: asyncrl checkpoint list {run.argument}"
        raise RunError(f"the checkpoint of step {checkpoint.step} was just deleted", location=run.run_id, hint=hint)
    older = newest_undamaged(run, checkpoint.step - 1)
    raise RunError(
        f"the checkpoint is damaged: {'; '.join(map(str, damages))}",
        location=str(checkpoint.folder),
        hint=f"the checkpoint of step {older.step} is undamaged: choose it with --step {older.step}"
        if older
        else "every older checkpoint is damaged: restore this folder from a copy, or start a new run",
    )


def newest_undamaged(run: RunDirectory, step: int | None = None, folder: str = "checkpoints") -> Checkpoint | None:
    """The newest undamaged checkpoint in a run's folder, up to ``step``: an older one only repeats more steps."""
    checkpoints = [saved for saved in complete_checkpoints(run.path / folder) if step is None or saved.step <= step]
    return next((checkpoint for checkpoint in reversed(checkpoints) if not verify(checkpoint)), None)


class Cancelled(Exception):
    """The result of this work is no longer needed."""


def seal(folder: Path, check: Check = lambda: None, rank_digests: Mapping[str, Digest] | None = None) -> None:
    """List every file of a checkpoint with its checksum, and sync all of it to disk.

    ``rank_digests``: checksums of files that are already on disk, by path in the folder; the other files are read.
    Several threads call ``check`` every few hundred kilobytes, and its errors are raised. Raises ``RunError`` if a
    ``rank_digests`` file is missing here or has another size.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    digests = dict(rank_digests or {})
    for name, digest in digests.items():
        if name not in paths or paths[name].stat().st_size != digest.bytes:
            raise RunError(
                f"a trainer rank wrote {name}, and the driver's host does not have all of it",
                location=str(folder),
                hint="put runs_dir where all hosts have the same files, such as NFS",
            )
    unread_paths = [path for name, path in paths.items() if name not in digests]
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        for path, checksum in zip(unread_paths, threads.map(partial(_digest, check=check), unread_paths), strict=True):
            digests[path.relative_to(folder).as_posix()] = Digest(path.stat().st_size, checksum)
    listing = {name: asdict(digests[name]) for name in paths}
    (folder / FILES_FILE).write_text(json.dumps(listing, indent=1) + "\n")
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    for path in (*unread_paths, folder / FILES_FILE, *folders, folder):
        check()
        sync(path)


def verify(checkpoint: Checkpoint, contents: bool = True, check: Check = lambda: None) -> list[Damage]:
    """The damaged files; empty if the checkpoint is undamaged. Without ``contents`` only names and sizes are compared.

    ``check`` is called every few hundred kilobytes, and its errors are raised.
    """
    try:
        listing = json.loads((checkpoint.folder / FILES_FILE).read_text())
        expected_files = {name: (int(entry["bytes"]), str(entry["blake3"])) for name, entry in listing.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return [Damage(FILES_FILE, "cannot be read")]
    damages = []
    for name, (size, digest) in sorted(expected_files.items()):
        path = checkpoint.folder / name
        try:
            size_on_disk = path.stat().st_size
            if size_on_disk != size:
                damages.append(Damage(name, f"has {size_on_disk} bytes instead of {size}"))
            elif contents and _digest(path, check) != digest:
                damages.append(Damage(name, "has changed"))
        except FileNotFoundError:
            damages.append(Damage(name, "is missing"))
        except OSError as error:
            damages.append(Damage(name, f"cannot be read: {error.strerror}"))
    return damages


def keep_reasons(
    steps: Collection[int],
    accuracies: Mapping[int, float],
    keep: CheckpointSpec,
    awaited: Collection[int] = (),
    uploading: Collection[int] = (),
) -> dict[int, tuple[str, ...]]:
    """The reasons why each step's checkpoint is kept. Checkpoints without a reason are deleted.

    ``accuracies``: greedy held-out accuracy by step; among equally good steps the newest is better, and a step without
    an accuracy is never among the best. ``awaited``: steps with a running evaluation, kept if ``keep_best`` is set.
    ``uploading``: steps with a running upload, always kept. 0 turns ``keep_every`` or ``keep_best`` off; ``keep_last``
    is at least 1.
    """
    newest_steps = sorted(steps, reverse=True)[: keep.keep_last]
    judged = sorted(((accuracies[step], step) for step in steps if step in accuracies), reverse=True)
    best_steps = [step for _, step in judged[: keep.keep_best]]
    reasons: dict[int, tuple[str, ...]] = {}
    for step in sorted(steps):
        rules = {
            f"last {keep.keep_last}": step in newest_steps,
            f"every {keep.keep_every}": bool(keep.keep_every) and step % keep.keep_every == 0,
            f"best {keep.keep_best}": step in best_steps,
            "upload running": step in uploading,
            "evaluation running": bool(keep.keep_best) and step in awaited and step not in accuracies,
        }
        reasons[step] = tuple(reason for reason, holds in rules.items() if holds)
    return reasons


def remove(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint."""
    # Rename first: if this process dies halfway, the remains must not look like a checkpoint (decision 0009).
    doomed = checkpoint.folder.with_name(f".removing-{checkpoint.folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    rename(checkpoint.folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unread(checkpoint: Checkpoint) -> bool:
    """Delete a checkpoint unless a process has a ``Lease`` of it. Returns True if it is deleted."""
    with suppress(OSError), (checkpoint.folder / FILES_FILE).open("r+b") as file:  # damaged, or without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        remove(checkpoint)
        return True
    remove(checkpoint)
    return True


def archive_later(folder: Path, step: int | None) -> Path | None:
    """Move the checkpoints of later steps to ``archived-N``, because the run trains these steps again.

    Otherwise a restarting trainer would load them, and a save would keep them instead of its own. Without a step, only
    complete an earlier call that a kill interrupted; until then these checkpoints do not count. Returns the new folder,
    or None if there is nothing to move.
    """
    if not folder.is_dir():
        return None
    marker = folder / ARCHIVING
    last_valid_step = min((mark for mark in (step, _last_valid_step(folder)) if mark is not None), default=None)
    later = (
        []
        if last_valid_step is None
        else [checkpoint.folder for checkpoint in _all_checkpoints(folder) if checkpoint.step > last_valid_step]
    )
    if not later:
        marker.unlink(missing_ok=True)
        return None
    # Mark before the first rename: a kill between two renames must not leave some of them counting.
    with atomic_write(marker, durable=True) as file:
        file.write(str(last_valid_step).encode())
    archive = next(path for index in count(1) if not (path := folder / f"archived-{index}").exists())
    archive.mkdir()
    for path in later:
        os.rename(path, archive / path.name)
    sync(archive)
    sync(folder)
    marker.unlink()
    return archive


def sweep(folder: Path) -> None:
    """Delete the remains of interrupted saves, removals and conversions. Call it in the driver, while none runs."""
    for path in folder.glob(".*step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path != folder / FILES_FILE)


def _digest(path: Path, check: Check) -> str:
    from blake3 import blake3

    digest, buffer = blake3(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:  # not memory-mapped: a disk error must raise OSError, not a signal
        while size := file.readinto(buffer):
            check()
            digest.update(buffer[:size])
    return digest.hexdigest()


class DigestedFile:
    """A new file for sequential writes with a running checksum. Closing it syncs it to disk."""

    def __init__(self, path: str | Path) -> None:
        from blake3 import blake3

        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._hash = blake3(max_threads=blake3.AUTO)
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        self._bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Flush to the kernel; torch's writer calls this."""
        self._file.flush()

    @property
    def digest(self) -> Digest:
        """The digest of all data written so far."""
        return Digest(self._bytes, self._hash.hexdigest())
