"""What a run's journal records about its training."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from asyncrl_cli.journal.history import engine_requests
from asyncrl_cli.journal.queries import GroupRecord, RolloutRecord, group_record, snapshot
from asyncrl_cli.journal.schema import FILE, open_for_reading
from asyncrl_cli.records.generation import EVALUATION, Segment
from asyncrl_cli.spec.load import load_spec
from tests.e2e.conftest import rows


def groups_of(run: Path) -> list[GroupRecord]:
    """All groups of a run with their rollouts, in admission order."""
    with snapshot(run / FILE) as journal:
        ids = journal.execute("SELECT id FROM groups ORDER BY id").fetchall()
        return [group_record(journal, group_id) for (group_id,) in ids]


def batched_groups(run: Path) -> list[GroupRecord]:
    """The groups in a run's batches."""
    return [group for group in groups_of(run) if group.row.step is not None]


def sequences_of(rollout: RolloutRecord) -> dict[str, list[Segment]]:
    """A rollout's segments by the ids of its sequences."""
    by_sequence = groupby(rollout.segments, key=lambda segment: segment.rollout_id)
    return {sequence_id: list(segments) for sequence_id, segments in by_sequence}


def probe_gaps(run: Path) -> dict[int, float]:
    """The largest difference between an engine's and the trainer's log-probs for each published version, by the step
    after which it was published. The first version of the run is excluded."""
    with closing(open_for_reading(run / FILE)) as journal:
        return dict(journal.execute("SELECT step, gap FROM publishes WHERE version > 0 ORDER BY version").fetchall())


def assert_staleness_is_bounded(run: Path) -> None:
    """For a complete run: no group or token was older than its spec allows, the engines proved every version, nothing
    was trained twice, and all work is accounted for."""
    spec = load_spec(run / "spec.yaml").spec
    pipeline, steps = spec.pipeline, spec.stop.total
    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    assert max(row["staleness/groups_max"] for row in metrics) <= pipeline.max_staleness
    assert max(row["staleness/tokens_max"] for row in metrics) <= pipeline.max_staleness
    assert metrics[-1]["buffer/groups_late"] == 0
    if pipeline.partial_rollouts:
        assert any(row["staleness/rollouts_crossed"] > 0 for row in metrics)
    gaps = probe_gaps(run)
    assert list(gaps) == list(range(pipeline.publish_every, steps + 1, pipeline.publish_every))
    assert max(gaps.values()) < 1e-4
    assert all(row["engine/logprob_gap_max"] < 1e-4 for row in metrics if "engine/logprob_gap_max" in row)
    with closing(open_for_reading(run / FILE)) as journal:
        uids = journal.execute("SELECT uid FROM groups WHERE step IS NOT NULL").fetchall()
    assert len(set(uids)) == len(uids) == steps * pipeline.groups_per_step, "nothing is trained twice"
    if pipeline.on_stale != "requeue":  # which cancels requests
        assert_work_is_accounted_for(run)


def assert_work_is_accounted_for(run: Path) -> None:
    """For a run in which no engine was lost and no request was cancelled: every sampled token is counted once, for the
    engine that sampled it, and all times are in order."""
    with closing(open_for_reading(run / FILE)) as journal:
        sampled: Counter[str] = Counter()
        evaluated = 0
        for one in engine_requests(journal):
            assert one.ending in ("stop", "length", "aborted"), one
            assert one.tokens is not None and one.context_tokens is not None, one
            if one.ending == "aborted" and one.running_from is None:  # vLLM never received it
                assert one.tokens == 0, one
            else:
                assert one.running_from is not None and one.running_until is not None, one
                # The system's clock may be adjusted slightly during the run.
                times = one.begun_at, one.running_from, one.running_until, one.ended_at
                assert all(later >= earlier - 0.01 for earlier, later in pairwise(times)), one
            assert 0 <= (one.cached_tokens or 0) <= one.context_tokens, one
            if one.request_id.startswith(EVALUATION):
                evaluated += one.tokens
            else:
                sampled[one.request_id] += one.tokens
        recorded = journal.execute(
            "SELECT group_id || '-' || rollout_index, tokens FROM rollouts WHERE finish_reason IS NOT NULL"
        ).fetchall()
        assert recorded
        assert {name: sampled[name] for name, _ in recorded} == dict(recorded)
        lengths = journal.execute("SELECT mean_length, prompts FROM evaluations").fetchall()
        # The evaluations have one sample of each prompt.
        assert evaluated == pytest.approx(sum(mean * prompts for mean, prompts in lengths), abs=0.5 + len(lengths))
        engines = {engine for (engine,) in journal.execute("SELECT DISTINCT engine FROM engine_requests")}
        for at, stall_s, waited_s, text in journal.execute("SELECT at, stall_s, waited_s, pauses FROM publishes"):
            pauses = json.loads(text)
            assert pauses.keys() <= engines
            lasting = [end - begin for begin, end in pauses.values()]
            assert max(lasting, default=0.0) == pytest.approx(stall_s, abs=1e-3)
            assert all(end <= at + 0.01 for _, end in pauses.values())
            assert waited_s >= 0
        for (metrics,) in journal.execute("SELECT metrics FROM batches WHERE metrics IS NOT NULL"):
            of_step = json.loads(metrics)
            assert 0 <= of_step["time/forward_s"] <= of_step["time/train_s"]
            assert 0 < of_step["time/update_s"] + of_step["time/forward_s"] <= of_step["time/train_s"]
            assert of_step["train/tflop"] > 0 or not of_step["train/updates"]
            assert of_step["tokens/trained_per_s"] == pytest.approx(of_step["tokens/trained"] / of_step["time/step_s"])
            assert not [name for name in of_step if name.startswith("mfu/")], "CPUs have no data sheet"
            assert of_step["cpu/trainer_s"] > 0
            assert 0 <= of_step["time/publish_wait_s"] <= of_step["time/publish_s"]
