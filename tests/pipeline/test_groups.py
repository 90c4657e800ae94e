"""Groups from admission to finish, with a real ledger and stand-in engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import StandInEngine, dispatcher_over, prompts, rollout, spec

from asyncrl_cli.buffer.ledger import Batch, Blocked, Ledger
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.pipeline.groups import Ended, GroupSource, rollout_seed
from asyncrl_cli.rollout.records import Rollout, RolloutFailure, RolloutRequest


class Harness:
    """A group source over stand-in engines; prompt ``i`` has the token ids (i, i)."""

    def __init__(self, ledger: Ledger, engines: int = 1, **sections: Any) -> None:
        sections.setdefault("rollout", {"group_size": 2})
        self.ledger = ledger
        self.actors = [StandInEngine() for _ in range(engines)]
        self.dispatcher = dispatcher_over(self.actors)
        self._stream = iter([(prompt, (i, i)) for i, prompt in enumerate(prompts(1000))])
        self.groups = GroupSource(spec(**sections), ledger, self.dispatcher, lambda: next(self._stream))

    def fill(self) -> None:
        self.groups.fill(self.on_end)
        asyncio.run(self.dispatcher.flush())

    def on_end(self, ended: Ended) -> None:
        raise AssertionError("nothing is collected here")

    def end(self, *results: Rollout | RolloutFailure) -> list[tuple[int, int, Prompt, Rollout]]:
        """These have ended, as the dispatcher says it."""
        asked = {request.rollout_id: request for request in self.requests}
        pairs = []
        for result in results:
            for engine in self.dispatcher.engines:
                engine.pending.pop(result.rollout_id, None)
            pairs.append((asked[result.rollout_id], result))
        return self.groups.unscored(pairs)

    def finish(self, group_id: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
        for index, reward in enumerate(rewards):
            assert self.end(rollout(f"{group_id}-{index}"))
            self.groups.scored(group_id, index, reward)

    @property
    def requests(self) -> list[RolloutRequest]:
        return [request for actor in self.actors for request in actor.submitted]

    @property
    def uids(self) -> list[str]:
        return [prompt.uid for prompt in self.groups.outstanding_prompts()]


# -- seeds


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 10**6), st.integers(0, 999)), unique=True))
@settings(deadline=None)
def test_seeds_are_distinct_and_fit_into_63_bits(triples: list[tuple[int, int, int]]) -> None:
    seeds = [rollout_seed(*triple) for triple in triples]
    assert len(set(seeds)) == len(triples)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [rollout_seed(*triple) for triple in triples]


def test_seeds_do_not_run_numbers_together() -> None:
    triples = [(seed, group, index) for seed in range(12) for group in range(120) for index in range(12)]
    assert len({rollout_seed(*triple) for triple in triples}) == len(triples)
    assert rollout_seed(0, 0, 0) == 759540517790923586, "a run must be repeatable by later releases"


@pytest.mark.parametrize("engines", [1, 3])
def test_a_request_depends_on_what_it_is_not_on_where_it_runs(engines: int) -> None:
    harness = Harness(Ledger(3, 1, 1), engines, seed=7, rollout={"group_size": 2, "sampling": {"stop": [";"]}})
    harness.fill()
    requests = sorted(harness.requests, key=lambda request: request.rollout_id)
    assert [request.rollout_id for request in requests] == [f"{g}-{i}" for g in range(6) for i in range(2)]
    for request in requests:
        group_id, index = map(int, request.rollout_id.split("-"))
        assert request.prompt_ids == (group_id, group_id)
        assert request.sampling.seed == rollout_seed(7, group_id, index)
        assert (request.sampling.temperature, request.sampling.max_tokens) == (1.0, 512)
        assert request.sampling.stop == (";",)


# -- filling


def test_groups_stay_together_and_fill_the_ledgers_room() -> None:
    harness = Harness(Ledger(2, 1, 1), engines=2)
    harness.fill()
    assert harness.ledger.running == (0, 1, 2, 3)
    assert [actor.ids for actor in harness.actors] == [["0-0", "0-1", "2-0", "2-1"], ["1-0", "1-1", "3-0", "3-1"]]
    harness.fill()
    assert len(harness.requests) == 8


def test_full_engines_admit_nothing() -> None:
    harness = Harness(Ledger(8, 1, 1), engines=2, rollout={"group_size": 2, "max_running_rollouts": 4})
    harness.fill()
    assert harness.ledger.running == (0, 1, 2, 3)
    assert harness.dispatcher.running == 8
    harness.finish(1)
    harness.fill()
    assert harness.ledger.running == (0, 2, 3, 4)


# -- finishing


@given(st.permutations(range(4)), st.permutations(range(4)))
@settings(deadline=None, max_examples=30)
def test_a_group_is_in_order_however_its_rollouts_end(ended: list[int], scored: list[int]) -> None:
    harness = Harness(Ledger(1, 1, 0), rollout={"group_size": 4})
    harness.fill()
    for index in ended:
        ((group_id, number, prompt, result),) = harness.end(rollout(f"0-{index}"))
        assert (group_id, number, prompt.uid, result.rollout_id) == (0, index, "p0", f"0-{index}")
    for index in scored:
        assert harness.ledger.finished == ()
        harness.groups.scored(0, index, index / 4)
    assert harness.ledger.finished == (0,)
    (group,) = harness.groups.take((0,))
    assert (group.group_id, group.uid, group.rewards) == (0, "p0", (0.0, 0.25, 0.5, 0.75))
    assert [one.rollout_id for one in group.rollouts] == ["0-0", "0-1", "0-2", "0-3"]


def test_outstanding_prompts_are_those_admitted_and_not_taken() -> None:
    harness = Harness(Ledger(1, 1, 3))
    harness.fill()
    harness.finish(2)
    harness.finish(1)
    assert harness.uids == ["p0", "p1", "p2", "p3"]
    assert [group.uid for group in harness.groups.take((1,))] == ["p1"]
    assert harness.uids == ["p0", "p2", "p3"]
    with pytest.raises(KeyError):
        harness.groups.take((1,))


def test_a_failed_rollout_takes_its_group_with_it() -> None:
    harness = Harness(Ledger(2, 1, 0), rollout={"group_size": 3})
    harness.fill()
    assert len(harness.end(rollout("0-0"))) == 1
    to_score = harness.end(RolloutFailure("0-1", "out of memory"), rollout("1-0"))
    assert [(group_id, index) for group_id, index, _, _ in to_score] == [(1, 0)]
    assert harness.ledger.rejections == {"failed": 1}
    assert harness.uids == ["p1"]
    assert (harness.groups.failures, harness.groups.first_failure) == (1, "out of memory")
    assert harness.end(rollout("0-2")) == [], "the rest of the group needs no reward"
    harness.groups.scored(0, 0, 1.0)
    assert harness.ledger.finished == ()
    harness.fill()
    assert harness.ledger.running == (1, 2), "its room is given back"
    harness.end(RolloutFailure("1-1", "another"))
    assert (harness.groups.failures, harness.groups.first_failure) == (2, "out of memory")


@pytest.mark.parametrize(("policy", "rejected"), [("reject", True), ("skip", False), ("train", False)])
def test_equal_rewards_are_replaced_only_by_reject(policy: str, rejected: bool) -> None:
    harness = Harness(Ledger(2, 1, 0), algorithm={"uniform_groups": policy})
    harness.fill()
    harness.finish(0, (1.0, 1.0))
    harness.finish(1, (1.0, 0.0))
    assert harness.ledger.finished == ((1,) if rejected else (0, 1))
    assert harness.ledger.rejections == ({"uniform": 1} if rejected else {})
    harness.fill()
    assert harness.ledger.running == ((2,) if rejected else ())
    assert harness.uids == (["p1", "p2"] if rejected else ["p0", "p1"])


# -- requeue


def test_an_overdue_group_starts_again_under_a_new_number() -> None:
    harness = Harness(Ledger(1, 1, 1, "requeue"), engines=2, seed=7)
    ledger = harness.ledger
    harness.fill()
    harness.finish(1)
    batch = ledger.next_batch()
    assert isinstance(batch, Batch)
    harness.groups.take(batch.group_ids)
    ledger.take(batch)
    ledger.publish()
    harness.fill()
    harness.finish(2)
    assert isinstance(ledger.next_batch(), Blocked)
    assert ledger.overdue() == (0,)
    asyncio.run(harness.groups.requeue_overdue(harness.on_end))
    asyncio.run(harness.dispatcher.flush())
    assert ledger.running == (3,)
    assert ledger.counts().requeued == 1
    assert [actor.cancelled for actor in harness.actors] == [["0-0", "0-1"], []]
    again = [request for request in harness.requests if request.rollout_id.startswith("3-")]
    assert [request.prompt_ids for request in again] == [(0, 0), (0, 0)]
    assert [request.sampling.seed for request in again] == [rollout_seed(7, 3, index) for index in range(2)]
    assert harness.uids == ["p2", "p0"]
    assert harness.end(rollout("0-0")) == [], "it was on its way when it was cancelled"
    harness.groups.scored(0, 0, 1.0)
    upcoming = ledger.next_batch()
    assert isinstance(upcoming, Batch)
    assert upcoming.group_ids == (2,)


def test_several_overdue_groups_are_all_requeued() -> None:
    harness = Harness(Ledger(3, 1, 1, "requeue"))
    ledger = harness.ledger
    harness.fill()
    for group_id in (3, 4, 5):
        harness.finish(group_id)
    batch = ledger.next_batch()
    assert isinstance(batch, Batch)
    harness.groups.take(batch.group_ids)
    ledger.take(batch)
    ledger.publish()
    harness.fill()
    for group_id in (6, 7, 8):
        harness.finish(group_id)
    assert ledger.overdue() == (0, 1, 2)
    asyncio.run(harness.groups.requeue_overdue(harness.on_end))
    assert ledger.overdue() == ()
    assert ledger.running == (9, 10, 11)
    assert harness.uids == ["p6", "p7", "p8", "p0", "p1", "p2"]
    assert sorted(harness.actors[0].cancelled) == [f"{g}-{i}" for g in range(3) for i in range(2)]
