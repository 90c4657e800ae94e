"""The result of ``asyncrl_cli.load_run``: a run's records for programs. Needs neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.inspect.decoding import open_decoder
from asyncrl_cli.journal.history import metrics_rows
from asyncrl_cli.journal.queries import group_record, snapshot, table_rows
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.records.generation import sequence_of
from asyncrl_cli.runs.catalogue import find_run
from asyncrl_cli.runs.directory import RunDirectory


class RunData:
    """A run on this machine: live, ended or copied.

    Each access reads the table again. A table is a pandas ``DataFrame``, or without pandas a list of dictionaries.
    Steps are counted from 1; times are Unix seconds. Raises ``JournalError`` for a damaged journal.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run_id = run.run_id
        self.path = run.path
        self._run = run

    @property
    def metrics(self) -> Any:
        """One row per trained step: ``step``, ``version``, ``time`` and the metrics of docs/metrics.md."""
        with snapshot(self.path / FILE) as connection:
            return _table(metrics_rows(connection))

    @property
    def groups(self) -> Any:
        """One row per admitted group; ``step`` is null until it is in a batch."""
        return self._journal("groups")

    @property
    def rollouts(self) -> Any:
        """One row per recorded rollout; ``metrics/NAME`` are the task's other measurements."""
        return self._journal("rollouts")

    @property
    def evaluations(self) -> Any:
        """One row per evaluation and kind (``greedy``, ``sampled``, or the name of a set)."""
        return self._journal("evaluations")

    @property
    def samples(self) -> Any:
        """One row per response of an evaluation, as in ``evaluations/*.jsonl``, with its ``file``."""
        names = sorted(path.relative_to(self.path).as_posix() for path in self.path.glob("evaluations/*.jsonl"))
        # The first line is the evaluation's result.
        return _table({"file": name, **row} for name in names for row in self._run.read(name)[1:])

    def text(self, group: int, index: int = 0) -> str:
        """Return the text of a rollout's prompt and response, with special tokens.

        Raises ``RunError`` if there is no such rollout, or the run has no tokenizer.
        """
        with snapshot(self.path / FILE) as connection:
            try:
                record = group_record(connection, int(group))  # SQLite stores NumPy's integers as bytes
                rollout = record.rollouts[index]
            except LookupError:
                raise RunError(
                    f"there is no rollout {index} of group {group}", location=self.run_id, hint="`rollouts` lists them"
                ) from None
        if (decoder := open_decoder(self._run)) is None:
            raise RunError("the tokenizer.json of the run's model is missing", location=str(self._run.model_stub))
        main = (segment for segment in rollout.segments if sequence_of(segment.rollout_id)[-1] == 0)
        ids = [*record.prompt_ids, *(int(token) for segment in main for token in segment.ids)]
        return decoder.parts(ids, [len(ids)])[0]

    def _journal(self, name: str) -> Any:
        with snapshot(self.path / FILE) as connection:
            return _table(table_rows(connection, name))


def find(run: str | PathLike[str], runs_dir: str | PathLike[str]) -> RunData:
    """Return a run's records; see ``asyncrl_cli.load_run``."""
    folder = Path(run)
    return RunData(RunDirectory(folder) if (folder / "manifest.json").is_file() else find_run(Path(runs_dir), str(run)))


def _table(rows: Iterable[Mapping[str, Any]]) -> Any:
    try:
        import pandas
    except ModuleNotFoundError:
        return [dict(row) for row in rows]
    return pandas.DataFrame.from_records(list(rows))
