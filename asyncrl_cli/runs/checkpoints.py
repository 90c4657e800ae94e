"""Checkpoints on disk: their format, how damage is found, and which checkpoints are kept.

    checkpoints/step-000040/
      state/        DeepSpeed's shards, and each rank's random-number states
      run.json      the state of the run, and the layout of its trainer
      files.json    size and BLAKE3 checksum of every other file

Invariant: a folder called ``step-…`` was complete once, as it was written under a hidden name, synced and renamed, so
any missing or different file in it is damage. Hidden folders are left over from an interrupted save, removal or
conversion. ``checkpoints/archived-1`` and so on have checkpoints of steps that were trained again from an older one;
no command reads them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.files import atomic_write, rename, sync
from asyncrl_cli.runs.directory import RunDirectory

if TYPE_CHECKING:
    from asyncrl_cli.spec.sections import CheckpointSpec

STATE = "state"
"""The trainer's part of a checkpoint."""
RUN_FILE = "run.json"
FILES_FILE = "files.json"
ARCHIVING = ".archiving"
"""In a run's ``checkpoints`` while some are archived: the last step with a checkpoint that still counts."""
NAME = re.compile(r"step-(\d{6,})")
DIGEST_THREADS = 8
PIECE_BYTES = 2**18
Check = Callable[[], None]
"""Raises an exception if the result of the work is no longer needed."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The size and the BLAKE3 checksum of a file."""

    bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """The ranks of the trainer that wrote a checkpoint, and the ``dtype`` of the trained weights."""

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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint, and the step after which it was taken."""

    folder: Path
    step: int

    @classmethod
    def at(cls, folder: Path) -> Checkpoint:
        """The checkpoint in a folder called ``step-NNNNNN``; nothing is read."""
        match = NAME.fullmatch(folder.name)
        if match is None:
            raise ValueError(f"{folder} is not called like a checkpoint")
        return cls(folder, int(match[1]))

    @property
    def saved_at(self) -> float:
        """When it was written, in unix seconds."""
        return self.folder.stat().st_mtime

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in _files(self.folder))

    def state(self) -> dict[str, Any]:
        """What the driver saved. Raises ``RunError`` when it cannot be read."""
        try:
            state = json.loads((self.folder / RUN_FILE).read_text())
            return dict(state)
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(f"{RUN_FILE} cannot be read: {error}") from error

    def trainer(self) -> TrainerLayout:
        """The layout of the saved trainer. Raises ``RunError`` when it cannot be read."""
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
    last = _last_kept(folder)
    return [found for found in _all_checkpoints(folder) if last is None or found.step <= last]


def _all_checkpoints(folder: Path) -> list[Checkpoint]:
    found = [Checkpoint.at(path) for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _last_kept(folder: Path) -> int | None:
    """The last step that counts, if a kill interrupted the archiving of later checkpoints."""
    try:
        return int((folder / ARCHIVING).read_text())
    except FileNotFoundError:
        return None


def checkpoint_of(run: RunDirectory, step: int) -> Checkpoint:
    """The run's checkpoint of a step. Raises ``RunError``, which lists the steps that have one."""
    found = {checkpoint.step: checkpoint for checkpoint in complete_checkpoints(run.path / "checkpoints")}
    if step not in found:
        raise RunError(
            f"there is no checkpoint of step {step}",
            location=run.run_id,
            hint=f"steps with a checkpoint: {', '.join(map(str, found))}" if found else "the run has no checkpoint yet",
        )
    return found[step]


def verified_checkpoint(run: RunDirectory, step: int | None = None) -> Checkpoint | None:
    """The run's checkpoint of ``step``, or its newest, after every byte of it was checked; None when there is none.

    Raises ``RunError`` when it is damaged, naming the newest older one that is not, and when there is none of ``step``.
    A damaged one is never skipped silently: a run that continues from an older one repeats steps.
    """
    found = complete_checkpoints(run.path / "checkpoints")
    if step is None and not found:
        return None
    chosen = found[-1] if step is None else checkpoint_of(run, step)
    if not (damages := verify(chosen)):
        return chosen
    older = next((other for other in reversed(found) if other.step < chosen.step and not verify(other)), None)
    raise RunError(
        f"the checkpoint is damaged: {'; '.join(map(str, damages))}",
        location=str(chosen.folder),
        hint=f"the checkpoint of step {older.step} is undamaged: choose it with --step {older.step}"
        if older
        else "every older checkpoint is damaged: restore this folder from a copy, or start a new run",
    )


def newest_undamaged(run: RunDirectory, step: int) -> Checkpoint | None:
    """The newest checkpoint of ``step`` or an earlier one that is as it was written, for a run that is active: older
    ones only repeat more steps."""
    found = reversed(complete_checkpoints(run.path / "checkpoints"))
    return next((checkpoint for checkpoint in found if checkpoint.step <= step and not verify(checkpoint)), None)


class Cancelled(Exception):
    """The result of this work is no longer needed."""


def seal(folder: Path, check: Check = lambda: None, written: Mapping[str, Digest] | None = None) -> None:
    """List every file of a checkpoint with its checksum, and sync all of it to disk.

    ``written``: checksums by the path in the folder, of files that are on disk already; the others are read. Raises
    what ``check`` raises, which is called every few hundred kilobytes, by several threads, and ``RunError`` when
    a file that was written is not here, or not whole.
    """
    found = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    digests = dict(written or {})
    for name, digest in digests.items():
        if name not in found or found[name].stat().st_size != digest.bytes:
            raise RunError(
                f"a trainer rank wrote {name}, and the driver's host does not have all of it",
                location=str(folder),
                hint="put runs_dir where all hosts have the same files, such as NFS",
            )
    others = [path for name, path in found.items() if name not in digests]
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        for path, checksum in zip(others, threads.map(partial(_digest, check=check), others), strict=True):
            digests[path.relative_to(folder).as_posix()] = Digest(path.stat().st_size, checksum)
    listing = {name: asdict(digests[name]) for name in found}
    (folder / FILES_FILE).write_text(json.dumps(listing, indent=1) + "\n")
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    for path in (*others, folder / FILES_FILE, *folders, folder):
        check()
        sync(path)


def verify(checkpoint: Checkpoint, contents: bool = True, check: Check = lambda: None) -> list[Damage]:
    """The damaged files; empty if the checkpoint is undamaged. Without ``contents`` only names and sizes are compared.

    Raises what ``check`` raises, which is called every few hundred kilobytes.
    """
    try:
        listing = json.loads((checkpoint.folder / FILES_FILE).read_text())
        wanted = {name: (int(entry["bytes"]), str(entry["blake3"])) for name, entry in listing.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return [Damage(FILES_FILE, "cannot be read")]
    damages = []
    for name, (size, digest) in sorted(wanted.items()):
        path = checkpoint.folder / name
        try:
            found = path.stat().st_size
            if found != size:
                damages.append(Damage(name, f"has {found} bytes instead of {size}"))
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
    """For every step the reasons why its checkpoint is kept; a checkpoint without a reason is removed.

    ``accuracies`` by step; a step that is not in it was not evaluated and is never among the best. Of equally good
    ones the newest counts first. The checkpoints of ``awaited`` steps, which are still being evaluated, are kept if
    ``keep_best`` is set. Checkpoints of ``uploading`` steps are always kept. 0 turns ``keep_every`` or ``keep_best``
    off; ``keep_last`` is at least 1.
    """
    newest = sorted(steps, reverse=True)[: keep.keep_last]
    judged = sorted(((accuracies[step], step) for step in steps if step in accuracies), reverse=True)
    best = [step for _, step in judged[: keep.keep_best]]
    reasons: dict[int, tuple[str, ...]] = {}
    for step in sorted(steps):
        held = {
            f"last {keep.keep_last}": step in newest,
            f"every {keep.keep_every}": bool(keep.keep_every) and step % keep.keep_every == 0,
            f"best {keep.keep_best}": step in best,
            "upload running": step in uploading,
            "evaluation running": bool(keep.keep_best) and step in awaited and step not in accuracies,
        }
        reasons[step] = tuple(reason for reason, holds in held.items() if holds)
    return reasons


def remove(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint."""
    # Rename first: if this process dies halfway, the rest must not look like a checkpoint (decision 0011).
    doomed = checkpoint.folder.with_name(f".removing-{checkpoint.folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    rename(checkpoint.folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def archive_later(folder: Path, step: int | None) -> Path | None:
    """Move the checkpoints of later steps to ``archived-N``, because the run trains those steps again.

    Otherwise a trainer that restarts would load them, and a save would keep them instead of its own. Without a step it
    only completes an earlier call that a kill has interrupted; until then these checkpoints do not count. Returns the
    new folder; None when there are none.
    """
    if not folder.is_dir():
        return None
    marker = folder / ARCHIVING
    first = min((mark for mark in (step, _last_kept(folder)) if mark is not None), default=None)
    later = [] if first is None else [found.folder for found in _all_checkpoints(folder) if found.step > first]
    if not later:
        marker.unlink(missing_ok=True)
        return None
    # Mark before the first rename: from here on they do not count, even if a kill interrupts the renames.
    with atomic_write(marker, durable=True) as file:
        file.write(str(first).encode())
    archive = next(path for number in count(1) if not (path := folder / f"archived-{number}").exists())
    archive.mkdir()
    for path in later:
        os.rename(path, archive / path.name)
    sync(archive)
    sync(folder)
    marker.unlink()
    return archive


def sweep(folder: Path) -> None:
    """Delete the remains of interrupted saves, removals and conversions. For the driver, when none of them runs."""
    for path in folder.glob(".*step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    """Every file of a checkpoint except its list of files."""
    return (path for path in folder.rglob("*") if path.is_file() and path != folder / FILES_FILE)


def _digest(path: Path, check: Check) -> str:
    from blake3 import blake3

    digest, piece = blake3(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:  # not memory-mapped: so a disk error raises OSError instead of a signal
        while size := file.readinto(piece):
            check()
            digest.update(piece[:size])
    return digest.hexdigest()


class DigestedFile:
    """A new file that is written sequentially; when it is closed, it is synced to disk."""

    def __init__(self, path: str | Path) -> None:
        from blake3 import blake3

        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._hash = blake3(max_threads=blake3.AUTO)
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        self._bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Writers of files expect this method."""
        self._file.flush()

    @property
    def digest(self) -> Digest:
        """The digest of everything written so far."""
        return Digest(self._bytes, self._hash.hexdigest())
