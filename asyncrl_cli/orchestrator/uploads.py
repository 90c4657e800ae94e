"""Copies complete checkpoints to an fsspec URL.

Invariant: an upload delays no step and ends no run. Uploads have their own thread. A failure is a warning and a row in
the journal; the upload is tried again after the next checkpoint and at a resume.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from asyncrl_cli.core.background import Background
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.progress import checkpoints_to_upload
from asyncrl_cli.journal.schema import FILE, reading
from asyncrl_cli.runs.checkpoints import FILES_FILE, Checkpoint, complete_checkpoints, verify
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import CheckpointSpec

LIMIT_S, BYTES_PER_S = 600.0, 20e6
"""A run's end waits for uploads for ``LIMIT_S`` seconds, and a second per ``BYTES_PER_S``."""
LOOK_S = 0.1
"""Seconds between two checks whether the uploads have ended."""


class Uploads:
    """One run's uploads. Use it from the event loop."""

    def __init__(self, spec: CheckpointSpec, run: RunDirectory, buffer: Buffer, warn: Callable[[str], None]) -> None:
        self._target = spec.upload
        self._run = run
        self._buffer = buffer
        self._warn = warn
        self._loop = asyncio.get_running_loop()
        self._background = Background("upload")
        self._warnings: set[str] = set()
        self.waiting: set[int] = set()
        """Steps with a checkpoint that must not be deleted yet, because its upload has not ended."""

    def begin(self) -> None:
        """Upload the journal's checkpoints that are not uploaded yet, without waiting."""
        if self._target is None:
            return
        newest_steps = {checkpoint.step for checkpoint in complete_checkpoints(self._run.path / "checkpoints")[-1:]}
        self.waiting |= newest_steps

        def job() -> None:
            try:
                with reading(self._run.path / FILE) as connection:
                    steps = checkpoints_to_upload(connection)
                for checkpoint in complete_checkpoints(self._run.path / "checkpoints"):
                    # Once the driver has left its loop, nobody waits for a further copy.
                    if checkpoint.step in steps and not self._loop.is_closed() and checkpoint.folder.is_dir():
                        self._upload(checkpoint)
            except Exception as error:
                self._warn(hide(f"checkpoints.upload: {error}"))
            finally:
                self.waiting -= newest_steps  # also if an earlier driver has uploaded it

        self._background.submit(job)

    async def finish(self) -> None:
        """Wait a limited time for the uploads that have begun."""
        checkpoints = complete_checkpoints(self._run.path / "checkpoints")
        limit_s = LIMIT_S + sum(each.size for each in checkpoints if each.step in self.waiting) / BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                while self.waiting:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            steps = ", ".join(map(str, sorted(self.waiting)))
            self._warn(f"checkpoints.upload: not done after {limit_s:.0f} s for steps {steps}; copy them yourself")

    def _upload(self, checkpoint: Checkpoint) -> None:
        assert self._target is not None
        step, failure = checkpoint.step, ""
        self.waiting.add(step)
        try:
            if damages := verify(checkpoint):
                raise OSError(f"the checkpoint is damaged: {damages[0]}")
            copy(checkpoint.folder, f"{self._target.rstrip('/')}/{self._run.run_id}/{checkpoint.folder.name}")
        except Exception as error:  # file systems raise any error, and the run continues
            failure = hide(str(error) or type(error).__name__)
            text = f"checkpoints.upload: the checkpoint of step {step} was not uploaded: {failure}"
            if text not in self._warnings:  # it is tried again after every checkpoint
                self._warnings.add(text)
                self._warn(text)
        finally:
            recording = self._buffer.uploaded(step, failure)
            try:
                asyncio.run_coroutine_threadsafe(recording, self._loop).result()  # the journal limits the wait
            except RuntimeError:  # the loop has ended; a resume uploads it again
                recording.close()
            self.waiting.discard(step)


def copy(folder: Path, url: str) -> None:
    """Copy a checkpoint's files to an fsspec URL, and compare their sizes. The list of files comes last, so a copy that
    has it is complete, and stays if it is of this checkpoint. Raises the file system's errors."""
    import fsspec

    files, root = fsspec.core.url_to_fs(url)
    file_list = f"{root}/{FILES_FILE}"
    if files.exists(file_list) and files.cat_file(file_list) == (folder / FILES_FILE).read_bytes():
        return
    if files.exists(root):  # of this step before it was trained again; its list of files must not stay
        files.rm(root, recursive=True)
    paths = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.name == FILES_FILE)
    for path in paths:
        target = f"{root}/{path.relative_to(folder).as_posix()}"
        files.makedirs(target.rpartition("/")[0], exist_ok=True)
        files.put_file(str(path), target)
        if (size := files.info(target)["size"]) != path.stat().st_size:
            raise OSError(f"{path.name} has {size} bytes at its destination, not {path.stat().st_size}")
