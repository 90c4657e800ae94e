"""The times of a real run of specs/quickstart.yaml, as a journal: 10 steps of 32 groups on two CPU cores."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal.recorded_run import STARTED, make_run, settings

TIMES = Path(__file__).with_name("quickstart_times.csv")
"""Steps 121 to 130, counted from 0 here. Times are in milliseconds; a request's times count from its group's
admission. Rows ``publish``: version, end, length, begin and end of the engine's pause. ``step``: version, taken,
reported, ``STEP_METRICS``. ``group``: version, admitted, ended, the step that took it, tokens of its prompt; its
rollouts follow, one ``request`` each: sent, running from, running until, ended, tokens."""
STEP_METRICS = ("time/train_s", "time/publish_s", "time/publish_wait_s", "publish/write_s", "time/step_s")
"""In milliseconds; then ``share/engines_busy``, ``share/engines_paused`` and ``tokens/trained``."""
SPEC = Path(__file__).parents[2] / "specs/quickstart.yaml"


def quickstart_run(folder: Path) -> RunDirectory:
    """The run, without tokens and rewards."""
    run = make_run(folder)
    (run.path / "spec.yaml").write_text(SPEC.read_text().replace("./models", str(SPEC.parent / "models")))
    journal = open_for_writing(run.path / FILE)
    of = settings(groups_per_step=32, max_staleness=2, group_size=8, total_steps=140)
    described = {name: getattr(of, name) for name in of.__dataclass_fields__}
    journal.execute("BEGIN")
    journal.execute("INSERT INTO meta VALUES ('settings', ?)", (json.dumps(described),))
    journal.execute(
        "INSERT INTO starts (at, kind, host, pid, step, version, note, settings) "
        "VALUES (?, 'train', '', 1, 0, 0, '', ?)",
        (STARTED, json.dumps(described)),
    )

    def at(milliseconds: str) -> float:
        return STARTED + int(milliseconds) / 1000

    def publish(version: str, ended: str, length: str, *pause: str) -> None:
        begin, end = map(at, pause)
        journal.execute(
            "INSERT INTO publishes (version, step, at, checksum, seconds, stall_s, gap, change, pauses) "
            "VALUES (?, ?, ?, '', ?, ?, 0, 0, ?)",
            (version, version, at(ended), int(length) / 1000, end - begin, json.dumps({"engine-0": [begin, end]})),
        )

    def step(version: str, taken: str, reported: str, *values: str) -> None:
        metrics = {name: int(value) / 1000 for name, value in zip(STEP_METRICS, values[:5], strict=True)}
        shares = zip(("share/engines_busy", "share/engines_paused", "tokens/trained"), values[5:], strict=True)
        metrics |= {name: float(value) for name, value in shares}
        journal.execute(
            "INSERT INTO batches (step, version, late, taken_at, trained_at, metrics) VALUES (?, ?, 0, ?, ?, ?)",
            (version, version, at(taken), at(reported), json.dumps(metrics)),
        )

    def group(version: str, admitted: str, ended: str, taken_by: str, prompt: str) -> None:
        state = "running" if not ended else "finished" if not taken_by else "taken"
        journal.execute(
            "INSERT INTO groups (uid, prompt, fields, prompt_ids, version, state, step, admitted_at, ended_at) "
            "VALUES ('p', '\"\"', '{}', zeroblob(4 * ?), ?, ?, ?, ?, ?)",
            (int(prompt), version, state, taken_by or None, at(admitted), at(ended) if ended else None),
        )

    def requests(group_id: int, rows: Sequence[Sequence[str]], admitted: float, prompt: str) -> None:
        for index, row in enumerate(rows):
            begun, running_from, running_until, ended = (admitted + int(value) / 1000 for value in row[:4])
            journal.execute(
                "INSERT INTO engine_requests (request, engine, begun_at, running_from, running_until, ended_at, "
                "ending, tokens, context_tokens) VALUES (?, 'engine-0', ?, ?, ?, ?, 'stop', ?, ?)",
                (f"{group_id}-{index}", begun, running_from, running_until, ended, row[4], prompt),
            )
            journal.execute(
                "INSERT INTO rollouts (group_id, rollout_index, tokens, recorded_at) VALUES (?, ?, ?, ?)",
                (group_id, index, row[4], ended),
            )

    rows = list(csv.reader(TIMES.read_text().splitlines()))
    groups: list[tuple[list[str], list[list[str]]]] = []
    for kind, *values in rows:
        match kind:
            case "publish":
                publish(*values)
            case "step":
                step(*values)
            case "group":
                group(*values)
                groups.append((values, []))
            case "request":
                groups[-1][1].append(values)
    for group_id, (values, its_requests) in enumerate(groups, start=1):
        requests(group_id, its_requests, at(values[1]), values[4])
    journal.execute("COMMIT")
    journal.close()
    return run
