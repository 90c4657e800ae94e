"""The times of a real run of specs/quickstart.yaml, as a journal: 40 steps of 32 groups on two CPU cores."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.runs.directory import RunDirectory
from tests.buffer.recorded_run import STARTED, make_run, settings

TIMES = Path(__file__).with_name("quickstart_times.csv")
"""Milliseconds since the first admission. The first row is the first publish: when it ended, and its length. Rows
``step``: taken, reported, length of training, end and length of its publish. Rows ``group``: version, admitted, scored,
generated, and the step that took it."""


def quickstart_run(folder: Path) -> RunDirectory:
    """The run, without tokens and rewards."""
    run = make_run(folder)
    journal = open_for_writing(run.path / FILE)
    of = settings(groups_per_step=32, max_staleness=2, group_size=8, total_steps=140)
    described = {name: getattr(of, name) for name in of.__dataclass_fields__}
    journal.execute("BEGIN")
    journal.execute("INSERT INTO meta VALUES ('settings', ?)", (json.dumps(described),))
    journal.execute(
        "INSERT INTO starts (at, kind, host, pid, step, version, note) VALUES (?, 'train', '', 1, 0, 0, '')", (STARTED,)
    )
    rows = [[None if cell == "" else cell for cell in row] for row in csv.reader(TIMES.read_text().splitlines())]

    def publish(version: int, at: str | None, length: str | None) -> None:
        journal.execute(
            "INSERT INTO publishes (version, step, at, checksum, seconds, stall_s, gap, change) "
            "VALUES (?, ?, ?, '', ?, 0.03, 0, 0)",
            (version, version, second(at), int(length or 0) / 1000),
        )

    def second(at: str | None) -> float | None:
        return None if at is None else STARTED + int(at) / 1000

    publish(0, *rows[0][1:])
    steps = [row[1:] for row in rows if row[0] == "step"]
    for step, (taken, reported, length, published, publish_length) in enumerate(steps):
        metrics = {"time/train_s": int(length or 0) / 1000, "share/engines_busy": 0.91}
        journal.execute(
            "INSERT INTO batches (step, version, late, taken_at, trained_at, metrics) VALUES (?, ?, 0, ?, ?, ?)",
            (step, step, second(taken), second(reported), json.dumps(metrics)),
        )
        publish(step + 1, published, publish_length)
    for group_id, (version, admitted, scored, generated, taken_by) in enumerate(
        row[1:] for row in rows if row[0] == "group"
    ):
        state = "running" if scored is None else "finished" if taken_by is None else "taken"
        journal.execute(
            "INSERT INTO groups (id, uid, prompt, fields, prompt_ids, version, state, step, admitted_at, ended_at) "
            "VALUES (?, 'p', '\"\"', '{}', x'01', ?, ?, ?, ?, ?)",
            (group_id, version, state, taken_by, second(admitted), second(scored)),
        )
        if generated is not None:
            journal.execute(
                "INSERT INTO rollouts (group_id, rollout_index, tokens, recorded_at) VALUES (?, 0, 0, ?)",
                (group_id, second(generated)),
            )
    journal.execute("COMMIT")
    journal.close()
    return run
