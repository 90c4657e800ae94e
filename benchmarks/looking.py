"""The cost of the commands `watch` and `report` for a run with many rollouts.

    python benchmarks/looking.py [--rollouts N]

The journal is written row by row: 32 groups of 8 rollouts per step, about 35 tokens each, with two versions.
Commands are started as a user starts them; `watch` runs in a terminal of 100 columns for 20 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
from common import cpu_seconds

from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.records.groups import BufferSettings

GROUPS, SIZE, STEP_S = 32, 8, 10.0
STARTED = 1_790_000_000.0
WATCHED_S = 20.0
ASYNCRL = str(Path(sys.executable).with_name("asyncrl"))
PUBLISH = (
    "INSERT INTO publishes (version, step, at, checksum, seconds, stall_s, gap, change) "
    "VALUES (?, ?, ?, 'x', 0.1, 0.05, 0, 0)"
)

METRICS = {
    "response/tokens_mean": 35.0,
    "staleness/groups_mean": 2.0,
    "staleness/groups_max": 2.0,
    "tokens/trained": 9000.0,
    "tokens/generated": 9000.0,
    "tokens/generated_per_s": 900.0,
    "time/step_s": STEP_S,
    "time/train_s": 6.0,
    "share/trainer_busy": 0.6,
    "share/engines_busy": 0.9,
    "share/engines_paused": 0.02,
    "share/journal_busy": 0.02,
    "train/loss": 0.1,
    "correction/logprob_gap_mean": 0.003,
}


def make_run(folder: Path, rollouts: int) -> Path:
    """A finished run's folder."""
    folder.mkdir()
    steps = rollouts // (GROUPS * SIZE)
    settings = BufferSettings(GROUPS, 1, 2, "wait", steps, SIZE, False)
    (folder / "manifest.json").write_text(json.dumps({"started": "2026-01-01T00:00:00+00:00"}))
    (folder / "state.json").write_text(json.dumps({"phase": "finished", "step": steps, "steps": steps}))
    with closing(open_for_writing(folder / FILE)) as journal:
        journal.execute("PRAGMA synchronous = OFF")
        journal.execute("BEGIN")
        for key, value in (("settings", asdict(settings)), ("base", {})):
            journal.execute("INSERT INTO meta VALUES (?, ?)", (key, json.dumps(value)))
        journal.execute(
            "INSERT INTO starts (at, kind, host, pid, step, version, note, settings) "
            "VALUES (?, 'train', 'host', 1, 0, 0, '', ?)",
            (STARTED, json.dumps(asdict(settings))),
        )
        journal.execute(PUBLISH, (0, 0, STARTED))
        numbers = np.random.default_rng(0)
        for step in range(steps):
            _add_step(journal, step, steps, numbers)
        journal.execute("COMMIT")
    return folder


def _add_step(journal, step: int, steps: int, numbers: np.random.Generator) -> None:  # type: ignore[no-untyped-def]
    taken, admitted = STARTED + STEP_S * step, max(0, step - 2)
    groups, rollouts, segments = [], [], []
    for group in range(step * GROUPS, (step + 1) * GROUPS):
        at = taken - 15 + random.random() * STEP_S
        prompt = (json.dumps("What is 1 + 1?"), "{}", np.arange(20, dtype="<i4").tobytes())
        groups.append((group, f"train-{group}", *prompt, admitted, "taken", step, group + 1, 0, group, at, taken - 1))
        for index in range(SIZE):
            count = int(numbers.integers(10, 60))
            ids = numbers.integers(3, 90, count).astype("<i4")
            logprobs = -numbers.random(count).astype("<f4")
            reward = float(numbers.random() < step / steps)
            rollouts.append((group, index, count, "stop", reward, admitted, step, taken - 2, taken - 2))
            for start, end, version in ((0, count // 2, admitted), (count // 2, count, step)):
                blobs = ids[start:end].tobytes(), logprobs[start:end].tobytes()
                crc = zlib.crc32(blobs[1], zlib.crc32(blobs[0]))
                segments.append((group, index, 0, start, version, *blobs, crc, taken - 2))
    journal.executemany(
        "INSERT INTO groups (id, uid, prompt, fields, prompt_ids, version, state, step, serial, epoch, position, "
        f"admitted_at, ended_at) VALUES ({', '.join('?' * 13)})",
        groups,
    )
    journal.executemany(
        "INSERT INTO rollouts (group_id, rollout_index, tokens, finish_reason, reward, oldest, newest, scored_at, "
        "recorded_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        rollouts,
    )
    journal.executemany(
        "INSERT INTO segments (group_id, rollout_index, branch, start, version, tokens, logprobs, crc, at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        segments,
    )
    journal.executemany(
        "INSERT INTO engine_requests (request, begun_at, ended_at, engine, ending) VALUES (?, ?, ?, ?, ?)",
        ((f"{row[0]}-{row[1]}", taken - 12, taken - 2, f"engine-{row[1] % 2}", "stop") for row in rollouts),
    )
    metrics = json.dumps(METRICS | {"reward/mean": step / steps, "buffer/groups_taken": GROUPS * (step + 1)})
    journal.execute("INSERT INTO batches VALUES (?, ?, 0, ?, ?, '', ?)", (step, step, taken, taken + 8, metrics))
    journal.execute(PUBLISH, (step + 1, step + 1, taken + 7))


def timed(*arguments: str) -> str:
    """Wall time, and the largest memory of any command so far."""
    started = time.perf_counter()
    subprocess.run([ASYNCRL, *arguments], check=True, stdout=subprocess.DEVNULL)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return f"{time.perf_counter() - started:6.1f} s, {peak:,.0f} MiB"


def watched(run: Path) -> str:
    """The time until `watch` shows the panel, and its use of a core afterwards."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    started = time.perf_counter()
    with subprocess.Popen(
        [ASYNCRL, "watch", f"{run}/"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        while b"weight version" not in shown:
            shown += os.read(ours, 65536)
        first_s = time.perf_counter() - started
        watching = psutil.Process(process.pid)
        before = cpu_seconds(watching)
        threading.Thread(target=_drain, args=(ours,), daemon=True).start()
        time.sleep(WATCHED_S)
        share = (cpu_seconds(watching) - before) / WATCHED_S
        os.write(ours, b"q")
    return f"{first_s:6.1f} s to the panel, then {share:.1%} of a core"


def _drain(terminal: int) -> None:
    with suppress(OSError):  # a closed terminal
        while os.read(terminal, 65536):
            pass


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rollouts", type=int, default=100_000)
    rollouts = arguments.parse_args().rollouts
    with tempfile.TemporaryDirectory(prefix="looking-") as folder:
        run = make_run(Path(folder) / "run", rollouts)
        print(f"{rollouts:,} rollouts, journal of {(run / FILE).stat().st_size / 1e6:,.0f} MB")
        print(f"watch     {watched(run)}")
        path = Path(folder) / "report.html"
        took = timed("report", f"{run}/", "-o", str(path))
        print(f"report    {took}, {path.stat().st_size / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
