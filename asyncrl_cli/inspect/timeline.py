"""Writes a run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, in the Trace Event Format.

    process     tracks
    run         steps, evaluations, checkpoints, faults and starts; counters of the groups, the reward and the staleness
    trainer     one per rank: training and publishing, which all ranks do together; the share of the time it is busy
    rollouts    lanes: a rollout is in the first free lane, from its group's admission to its last record
    engine-0 …  the load of each version, with an arrow from the trainer that published it; below, in lanes, the
                engine's requests, from the time they were sent until they left the engine

The journal has only the longest pause of all engines, so every engine's load is drawn with this length. It records an
engine's request when the request ends.

Invariants: slices of a track never overlap, even if clocks were set back. Events are made and written one at a time;
memory keeps only the end of each lane.
"""

from __future__ import annotations

import gzip
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappush, heapreplace
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl_cli.core.files import output_file
from asyncrl_cli.inspect.resolved import engine_counts, resolved_spec, setting
from asyncrl_cli.journal.events import Checkpoint, Evaluation, Fault, Stall, Start, events
from asyncrl_cli.journal.history import first_start
from asyncrl_cli.journal.progress import progress
from asyncrl_cli.journal.queries import spooled
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.journal.step_timeline import (
    PublishSpan,
    StepSpan,
    engine_requests,
    first_publish,
    rollout_times,
    step_spans,
)
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.runs.directory import RunDirectory

TraceEvent = Mapping[str, Any]

RUN, TRAINER, ROLLOUTS, ENGINES = 1, 2, 3, 4
"""Ids of the processes; ``ENGINES`` is the first engine's id."""
LOADS = 1
"""The first track of an engine; its lanes follow."""
STEPS, EVALUATIONS, CHECKPOINTS, FAULTS, STARTS = 1, 2, 3, 4, 5
"""Tracks of the process ``RUN``."""
COUNTERS = {
    RUN: {
        "reward": {"mean": "reward/mean"},
        "groups": {"running": "buffer/groups_running", "finished": "buffer/groups_finished"},
        "staleness (versions)": {"mean": "staleness/groups_mean", "max": "staleness/groups_max"},
        "generated tokens/s": {"tokens/s": "tokens/generated_per_s"},
        "engines": {"busy": "share/engines_busy", "paused": "share/engines_paused"},
    },
    TRAINER: {"trainer": {"busy": "share/trainer_busy"}},
}
"""Counters by process: the names of their values, each with its metric."""


class Lanes:
    """Assigns intervals to lanes without overlaps, and reuses free lanes.

    If intervals come in the order of their starts, the number of lanes is minimal.
    """

    def __init__(self) -> None:
        self._free_at: list[tuple[int, int]] = []  # a heap of lanes, by the end of their last interval

    def put(self, start: int, end: int) -> int:
        """Return a lane, counted from 1, for the interval from ``start`` to ``end``."""
        if self._free_at and self._free_at[0][0] <= start:
            lane = self._free_at[0][1]
            heapreplace(self._free_at, (end, lane))
        else:
            lane = len(self._free_at) + 1
            heappush(self._free_at, (end, lane))
        return lane

    def __len__(self) -> int:
        return len(self._free_at)

    def names(self) -> tuple[str, ...]:
        return tuple(f"lane {lane}" for lane in range(1, len(self) + 1))


def write_timeline(run: RunDirectory, path: Path) -> int:
    """Write a run's trace, gzipped if the path ends with ``.gz``. Perfetto opens both.

    Returns the number of events. Raises ``OSError`` and ``JournalError``.
    """
    events = spooled(run.path / FILE, lambda connection: timeline_events(run, connection))
    with output_file(path) as raw:
        if path.suffix == ".gz":
            with gzip.open(raw, "wb", compresslevel=5) as packed:
                return _write(events, packed)
        return _write(events, raw)


def _write(events: Iterable[TraceEvent], raw: Any) -> int:
    text = TextIOWrapper(raw, encoding="utf-8")
    text.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    count = 0
    for event in events:
        text.write((",\n" if count else "") + json.dumps(event))
        count += 1
    text.write("\n]}\n")
    text.detach()  # flush without closing the file: the caller closes it
    return count


def timeline_events(run: RunDirectory, connection: sqlite3.Connection) -> Iterator[TraceEvent]:
    """Yield a run's events in no particular order. Times are microseconds since the run's first start."""
    spec = resolved_spec(run)
    trace = _Trace(
        connection,
        begun=first_start(connection),
        ranks=setting(spec, "trainer.ranks", 1),
        engines=engine_counts(spec)[0],
    )
    return chain(trace.steps(), trace.milestones(), trace.rollouts(), trace.requests(), trace.names(run.run_id))


class _Trace:
    def __init__(self, connection: sqlite3.Connection, begun: float, ranks: int, engines: int) -> None:
        self._connection = connection
        self._begun = begun
        self._ranks = ranks
        self._lanes = Lanes()
        self._lanes_of = {f"engine-{engine}": Lanes() for engine in range(engines)}

    def steps(self) -> Iterator[TraceEvent]:
        free = 0  # end of the trainer's previous work: slices start after it even if the clock was set back
        if (publish := first_publish(self._connection)) is not None:
            free = self._us(publish.ended_at)
            yield from self._publish(publish, self._us(publish.begun_at), free)
        for span in step_spans(self._connection, progress(self._connection).settings.publish_every):
            begin = max(free, self._us(span.taken_at))
            until = max(begin, self._us(span.trained_until))
            free = max(until, self._us(span.ended_at))
            name = f"step {span.step + 1}"
            yield _slice(
                RUN, track=STEPS, name=name, begin=begin, end=free, facts={"version": span.version, **span.metrics}
            )
            for rank in range(self._ranks):
                yield _slice(
                    TRAINER, track=rank + 1, name=name, begin=begin, end=until, facts={"version": span.version}
                )
            if span.publish is not None:
                yield from self._publish(span.publish, max(until, min(free, self._us(span.publish.begun_at))), free)
            yield from self._counters(span)

    def _publish(self, publish: PublishSpan, begin: int, free: int) -> Iterator[TraceEvent]:
        """``begin`` and ``free``: times at which the trainer began to publish, and was free again."""
        begin = min(begin, free)
        end = max(begin, self._us(publish.ended_at))
        load = max(begin, end - round(publish.stall_s * 1e6))
        name = f"version {publish.version}"
        for rank in range(self._ranks):
            yield _slice(
                TRAINER,
                track=rank + 1,
                name=f"publish {name}",
                begin=begin,
                end=free,
                facts={"version": publish.version},
            )
        engines = len(self._lanes_of)
        for number in range(engines):
            engine = ENGINES + number
            yield _slice(
                engine,
                track=LOADS,
                name=f"load {name}",
                begin=load,
                end=end,
                facts={"longest pause (s)": publish.stall_s},
            )
            arrow = {"cat": "publish", "name": name, "id": publish.version * engines + number}
            yield arrow | {"ph": "s", "pid": TRAINER, "tid": 1, "ts": begin}
            yield arrow | {"ph": "f", "bp": "e", "pid": engine, "tid": LOADS, "ts": load}

    def _counters(self, span: StepSpan) -> Iterator[TraceEvent]:
        # A counter keeps its value until its next event, and a step's metrics cover the time before its report.
        since = self._us(span.reported_at - span.metrics.get("time/step_s", 0.0))
        for process, counters in COUNTERS.items():
            for name, values in counters.items():
                known = {label: span.metrics.get(metric, math.nan) for label, metric in values.items()}
                known = {label: value for label, value in known.items() if math.isfinite(value)}
                if known:
                    yield {"ph": "C", "pid": process, "name": name, "ts": since, "args": known}

    def milestones(self) -> Iterator[TraceEvent]:
        free = 0
        facts: dict[str, Any]
        for event in events(self._connection, [kind.name for kind in (Evaluation, Checkpoint, Fault, Stall, Start)]):
            match event:
                case Evaluation(at=at, kind=kind, accuracy=accuracy):
                    facts = {"after step": event.after_step, "accuracy": accuracy, "mean reward": event.mean_reward}
                    yield self._instant(EVALUATIONS, name=f"{kind} {accuracy:.3f}", at=at, facts=facts)
                case Checkpoint(at=at, after_step=step, seconds=seconds):
                    begin = max(free, self._us(at - seconds))
                    free = max(begin, self._us(at))
                    facts = {"folder": event.folder, "training stood still (s)": event.stall_s}
                    yield _slice(
                        RUN, track=CHECKPOINTS, name=f"checkpoint after step {step}", begin=begin, end=free, facts=facts
                    )
                case Fault(at=at, kind=kind, part=part, message=message):
                    yield self._instant(FAULTS, name=f"{kind}: {part}", at=at, facts={"message": message})
                case Stall(at=at, part=part, message=message):
                    yield self._instant(FAULTS, name=f"stall: {part}", at=at, facts={"message": message})
                case Start(at=at, process=process):
                    facts = {"host": event.host, "batches taken": event.steps_taken}
                    yield self._instant(STARTS, name=process, at=at, facts=facts)

    def rollouts(self) -> Iterator[TraceEvent]:
        for one in rollout_times(self._connection):
            start = self._us(one.admitted_at)
            end = max(start, self._us(one.recorded_at))
            facts = {"prompt": one.uid, "group is": one.state, "tokens": one.tokens}
            facts |= {"finish reason": one.finish_reason or "unfinished", "reward": one.reward}
            facts |= {"oldest version": one.oldest, "newest version": one.newest}
            if one.step is not None:
                facts["trained in step"] = one.step + 1
            yield _slice(
                ROLLOUTS,
                track=self._lanes.put(start, end),
                name=training_rollout_id(one.group_id, one.rollout_index),
                begin=start,
                end=end,
                facts=facts,
            )

    def requests(self) -> Iterator[TraceEvent]:
        for request in engine_requests(self._connection):
            # An unknown engine: the run had more engines in the past.
            lanes = self._lanes_of.setdefault(request.engine, Lanes())
            process = ENGINES + list(self._lanes_of).index(request.engine)
            start = self._us(request.begun_at)
            end = max(start, self._us(request.ended_at))
            lane = LOADS + lanes.put(start, end)
            yield _slice(
                process, track=lane, name=request.request_id, begin=start, end=end, facts={"ended": request.ending}
            )

    def names(self, run_id: str) -> Iterator[TraceEvent]:
        """Names of processes and tracks. They come last, when all lanes are known."""
        processes = {RUN: f"run {run_id}", TRAINER: "trainer", ROLLOUTS: "rollouts"}
        processes |= dict(enumerate(self._lanes_of, ENGINES))
        tracks = {
            RUN: ("steps", "evaluations", "checkpoints", "faults", "starts"),
            TRAINER: tuple(f"rank {rank}" for rank in range(self._ranks)),
            ROLLOUTS: self._lanes.names(),
        }
        for number, lanes in enumerate(self._lanes_of.values()):
            tracks[ENGINES + number] = ("weights", *lanes.names())
        for process, name in processes.items():
            yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
            for track, title in enumerate(tracks[process], 1):
                where = {"ph": "M", "pid": process, "tid": track}
                yield where | {"name": "thread_name", "args": {"name": title}}
                yield where | {"name": "thread_sort_index", "args": {"sort_index": track}}

    def _us(self, at: float) -> int:
        return max(0, round((at - self._begun) * 1e6))

    def _instant(self, track: int, name: str, at: float, facts: Mapping[str, Any]) -> TraceEvent:
        return {"ph": "i", "s": "p", "pid": RUN, "tid": track, "name": name, "ts": self._us(at), "args": _sound(facts)}


def _slice(process: int, track: int, name: str, begin: int, end: int, facts: Mapping[str, Any]) -> TraceEvent:
    where = {"ph": "X", "pid": process, "tid": track}
    return where | {"name": name, "ts": begin, "dur": end - begin, "args": _sound(facts)}


def _sound(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Drop unknown facts, and write NaN and infinity, which JSON does not have, as text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in facts.items()
        if value is not None
    }
