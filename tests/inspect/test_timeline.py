"""The trace of a run: complete, well-formed, and consistent with the journal."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.inspect.timeline import ENGINES, LOADS, ROLLOUTS, RUN, TRAINER, Lanes, write_timeline
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.records.generation import EngineRequest
from asyncrl_cli.runs.directory import RunDirectory
from tests.journal.recorded_run import STARTED, TRAIN_S, RecordedRun, make_run, settings

pytestmark = pytest.mark.slow

INTERVALS = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=60
)


@given(INTERVALS)
def test_intervals_of_a_lane_do_not_overlap(intervals: list[tuple[int, int]]) -> None:
    lanes = Lanes()
    of_lane: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for interval in intervals:
        of_lane[lanes.put(*interval)].append(interval)
    for inside in of_lane.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(inside))
    assert sorted(of_lane) == list(range(1, len(lanes) + 1))


@given(INTERVALS)
def test_intervals_in_order_take_as_few_lanes_as_overlap(intervals: list[tuple[int, int]]) -> None:
    lanes = Lanes()
    for interval in sorted(interval for interval in intervals if interval[0] < interval[1]):
        lanes.put(*interval)
    at_once = max((sum(start <= at < end for start, end in intervals) for at in range(131)), default=0)
    assert len(lanes) == at_once


STAYS = [
    EngineRequest("0-0", "engine-0", STARTED + 1, STARTED + 5, "stop"),
    EngineRequest("0-1", "engine-0", STARTED + 2, STARTED + 3, "aborted"),
    EngineRequest("0-1", "engine-2", STARTED + 3, STARTED + 6, "length"),
    EngineRequest("1-0", "engine-0", STARTED + 4, STARTED + 5, "lost"),
    EngineRequest("eval:0:7", "engine-3", STARTED + 4, STARTED + 5, "stop"),  # the run had four engines at some time
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Five steps with a crash after the third, two ranks, three engines; a checkpoint, an evaluation and a fault."""
    run = make_run(tmp_path)
    (run.path / "spec.yaml").write_text("trainer: {ranks: 2}\nrollout: {engines: 3}\n")
    recorded = RecordedRun(run.path / FILE, monkeypatch, settings(max_staleness=2), lambda g: 3.0 + 4 * (g % 3), 4)
    for _ in range(3):
        recorded.step()
    recorded.crash(60.0)
    for _ in range(2):
        recorded.step()
    journal = recorded.book.journal
    journal.checkpointed(3, "step-3", 1.5)
    journal.failed("engine", "engine-1", "the process died")
    journal.failed("scorer", "scorer", "no answer")
    journal.failed("stall", "the trainer", "the trainer waits for the batch of step 4 since 12:00:00 (60 s)")
    journal.evaluated(
        {"step": 3, "kind": "greedy", "accuracy": 0.5, "mean_reward": math.inf, "mean_length": 4}
        | {"prompts": 8, "oldest": 0, "newest": 3}
    )
    for stay in STAYS:
        journal.requested(stay)
    recorded.commit()
    return run


def trace_of(run: RunDirectory, path: Path) -> list[dict[str, Any]]:
    count = write_timeline(run, path)
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    events: list[dict[str, Any]] = json.loads(raw, parse_constant=refuse)["traceEvents"]
    assert len(events) == count
    return events


@pytest.fixture
def events(run: RunDirectory, tmp_path: Path) -> list[dict[str, Any]]:
    return trace_of(run, tmp_path / "new" / "timeline.json")


def slices(events: list[dict[str, Any]], process: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


def test_every_track_is_named_and_its_slices_do_not_overlap(events: list[dict[str, Any]]) -> None:
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    of_track: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "Xsfi":
            assert (event["pid"], event["tid"]) in named
            assert event["ts"] >= 0
        if event["ph"] == "X":
            of_track[event["pid"], event["tid"]].append(event)
    for inside in of_track.values():
        inside.sort(key=lambda event: (event["ts"], event["ts"] + event["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(inside))


def test_every_recorded_rollout_is_there_once(events: list[dict[str, Any]], run: RunDirectory) -> None:
    with snapshot(run.path / FILE) as connection:
        rows = connection.execute(
            "SELECT r.group_id || '-' || rollout_index, tokens, round((recorded_at - admitted_at) * 1e6) "
            "FROM rollouts r JOIN groups g ON g.id = r.group_id"
        ).fetchall()
    assert len(rows) > 20
    assert Counter(rows) == Counter(
        (event["name"], event["args"]["tokens"], event["dur"]) for event in slices(events, ROLLOUTS)
    )


def test_ranks_train_and_publish_in_turn(events: list[dict[str, Any]]) -> None:
    for rank in (1, 2):
        track = [event for event in slices(events, TRAINER) if event["tid"] == rank]
        track.sort(key=lambda event: event["ts"])
        steps = [(f"step {step}", f"publish version {step}") for step in range(1, 6)]
        assert [event["name"] for event in track] == ["publish version 0", *(name for pair in steps for name in pair)]
        assert [event["dur"] for event in track[1::2]] == [TRAIN_S * 1e6] * 5


def test_a_publish_flows_from_the_trainer_to_every_engine(events: list[dict[str, Any]]) -> None:
    ends = {"s": {}, "f": {}}  # type: ignore[var-annotated]
    for event in events:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["s"]) == 6 * 3
    loads = {
        (engine, event["ts"]): event["name"]
        for engine in range(ENGINES, ENGINES + 3)
        for event in slices(events, engine)
        if event["tid"] == LOADS
    }
    begins = {event["ts"]: event["name"] for event in slices(events, TRAINER) if "publish" in event["name"]}
    for flow, start in ends["s"].items():
        end = ends["f"][flow]
        assert start["ts"] <= end["ts"]
        assert loads[end["pid"], end["ts"]] == f"load {start['name']}"
        assert begins[start["ts"]] == f"publish {start['name']}"


def test_a_request_is_on_the_tracks_of_the_engine_that_had_it(events: list[dict[str, Any]]) -> None:
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    drawn = Counter(
        (event["name"], names[event["pid"]], event["dur"], event["args"]["ended"])
        for event in events
        if event["ph"] == "X" and event["pid"] >= ENGINES and event["tid"] != LOADS
    )
    assert drawn == Counter(
        (stay.request_id, stay.engine, round((stay.ended_at - stay.begun_at) * 1e6), stay.ending) for stay in STAYS
    )


def test_milestones_and_counters(events: list[dict[str, Any]]) -> None:
    instants = [(event["name"], event["args"]) for event in events if event["ph"] == "i"]
    assert [name for name, _ in instants] == [
        *("train", "resume", "greedy 0.500", "engine: engine-1", "scorer: scorer", "stall: the trainer"),
    ]
    facts = dict(instants)
    assert facts["greedy 0.500"]["mean reward"] == "inf"
    assert facts["engine: engine-1"] == {"message": "the process died"}
    assert [event["dur"] for event in slices(events, RUN) if event["tid"] == 3] == [1_500_000]
    busy = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "engines"]
    assert busy == [{"busy": 0.75, "paused": 0.25}] * 5


def test_a_clock_that_was_set_back_overlaps_nothing(run: RunDirectory, tmp_path: Path) -> None:
    connection = open_for_writing(run.path / FILE)
    connection.execute("UPDATE batches SET taken_at = taken_at - 30, trained_at = trained_at - 30 WHERE step >= 2")
    connection.execute("UPDATE rollouts SET recorded_at = recorded_at - 40 WHERE group_id > 4")
    connection.execute("UPDATE groups SET admitted_at = admitted_at - 40 WHERE id > 6")
    connection.close()
    test_every_track_is_named_and_its_slices_do_not_overlap(trace_of(run, tmp_path / "t.json"))


def test_a_gzipped_trace_is_the_same(run: RunDirectory, events: list[dict[str, Any]], tmp_path: Path) -> None:
    assert trace_of(run, tmp_path / "t.json.gz") == events
    assert not list(tmp_path.glob(".*")), "no temporary file remains"
