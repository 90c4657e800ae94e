"""Complete simulated runs: the design's first three promises hold whichever process dies, at any moment.

Nothing finished is lost or trained twice, no group is staler than the bound, and every token is the token that the
weights of its version sample.
"""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from simulation import Encoder, Fate, Rank, Scorer, Simulation, Weights, judged, length, loader_of, number, token
from stand_in_hosts import checksum
from stand_ins import remote, spec, turns

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import FILE, open_for_reading
from asyncrl_cli.orchestrator.metrics import batch_digest
from asyncrl_cli.orchestrator.rollout_scheduler import rollout_seed
from asyncrl_cli.orchestrator.trainers import TrainerRanks
from asyncrl_cli.orchestrator.uploads import Uploads
from asyncrl_cli.records.generation import group_and_index
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.training import TrainingBatch
from asyncrl_cli.runs.checkpoints import complete_checkpoints
from asyncrl_cli.runs.directory import MODEL
from asyncrl_cli.spec.sections import ExperimentSpec

STEPS = 6
EXHAUSTIVE = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # no shrinking: a smaller seed is not a simpler run
)


class Finished:
    """The files of a finished run."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.path = simulation.run.path
        self.spec = simulation.spec
        with closing(open_for_reading(self.path / FILE)) as connection:
            self.batches = list(self._batches(connection))
            self.digests = [digest for (digest,) in connection.execute("SELECT digest FROM batches ORDER BY step")]
            self.evaluations = connection.execute("SELECT step, kind, oldest, newest FROM evaluations").fetchall()
            self.published = dict(connection.execute("SELECT version, checksum FROM publishes"))
            self.prompts = [
                uid for (uid,) in connection.execute("SELECT uid FROM groups WHERE serial IS NOT NULL ORDER BY id")
            ]
            self.untrained = connection.execute("SELECT count(*) FROM batches WHERE trained_at IS NULL").fetchone()[0]

    def _batches(self, connection: sqlite3.Connection) -> Iterator[TrainingBatch]:
        """The batches with tokens in the journal: all, or as many as checkpoints need."""
        for step in range(STEPS):
            try:
                yield read_batch(connection, step)
            except LookupError:
                assert self.spec.journal.keep != "all"
                checkpoints = complete_checkpoints(self.path / "checkpoints")
                assert all(checkpoint.step > step for checkpoint in checkpoints)

    @property
    def weights(self) -> Weights:
        """The final weights, from the saved model."""
        return tuple(json.loads((self.path / MODEL / "config.json").read_text()))

    def weights_of(self, version: int) -> Weights:
        """The weights of a version, computed from the journal's batches."""
        return tuple(self.digests)[: version * self.spec.pipeline.publish_every]

    def check(self) -> None:
        """Check everything that must hold for any run."""
        assert self.weights == tuple(self.digests), "each batch is trained once, in order"
        assert len(self.digests) == STEPS
        assert self.untrained == 0
        assert all(self.digests[batch.step] == batch_digest(batch) for batch in self.batches)
        groups = [group.group_id for batch in self.batches for group in batch.groups]
        assert len(set(groups)) == len(groups) == len(self.batches) * self.spec.pipeline.groups_per_step
        loader = loader_of(self.spec)
        assert self.prompts == [loader.next().uid for _ in self.prompts], "no prompt is skipped or repeated"
        ranks = self.spec.trainer.ranks
        published = {version: checksum([self.weights_of(version)] * ranks) for version in self.published}
        assert self.published == published
        assert sorted(self.published) == list(range(STEPS // self.spec.pipeline.publish_every + 1))
        for batch in self.batches:
            assert max(batch.staleness) <= self.spec.pipeline.max_staleness
            for group in batch.groups:
                for rollout in group.rollouts:
                    self._check_tokens(batch, group.version, rollout)
                texts = [Encoder().decode(rollout.ids.tolist()) for rollout in group.rollouts]
                alone = [reward for text in texts for reward in judged([text])]
                together = Scorer().sees_group(Prompt(group.uid, ""))
                assert list(group.rewards) == (judged(texts) if together else alone)
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "every step is reported once"
        every = self.spec.pipeline.publish_every
        assert [row["version"] for row in rows] == [row["step"] // every for row in rows]
        state = self.simulation.run.state
        assert (state.phase, state.step) == ("finished", STEPS)
        sets = {f"{name}:greedy" for name in self.spec.evaluation.sets}
        assert set(state.accuracy) == {"greedy", "sampled", *sets}
        self._check_evaluations()

    def _check_evaluations(self) -> None:
        """Evaluations that ran when a driver died may be missing if the run had trained later steps."""
        evaluation, every = self.spec.evaluation, self.spec.pipeline.publish_every
        intervals = {"greedy": evaluation.every, "sampled": evaluation.every if evaluation.samples > 1 else 0}
        intervals |= {f"{name}:greedy": chosen.every or 0 for name, chosen in evaluation.sets.items()}
        due = {
            (step, kind)
            for kind, interval in intervals.items()
            for step in range(STEPS + 1)
            if step in (0, STEPS) or (interval and step % interval == 0)
        }
        done = {(step, kind) for step, kind, *_ in self.evaluations}
        assert {(step, kind) for step, kind in due if step == STEPS} <= done <= due
        assert done == due or self.simulation.drivers > 1
        for step, kind, oldest, newest in self.evaluations:
            assert step // every <= oldest <= newest
            if evaluation.fix_version or step in (0, STEPS):
                assert oldest == newest == step // every, f"the {kind} evaluation after step {step} is of one version"

    def _check_tokens(self, batch: TrainingBatch, admitted_at: int, rollout: Any) -> None:
        seed = rollout_seed(self.spec.seed, *group_and_index(rollout.rollout_id))
        versions = rollout.versions.tolist()
        assert versions == sorted(versions)
        assert admitted_at <= versions[0]
        assert versions[-1] <= batch.version
        assert rollout.ids.tolist() == [
            token(seed, place, self.weights_of(version)) for place, version in enumerate(versions)
        ]
        assert len(versions) == length(seed)


def simulated(folder: Path, of: ExperimentSpec, fate: Fate) -> Finished:
    """Run to the end, with all checks."""
    simulation = Simulation(folder, of, fate)
    simulation.play()
    finished = Finished(simulation)
    finished.check()
    return finished


def small_spec(**sections: Any) -> ExperimentSpec:
    """A small run; sections are merged one level deep."""
    usual: dict[str, Any] = {
        "data": {"shuffle": False},
        "rollout": {"group_size": 2, "max_running_rollouts": 8, "engines": 2},
        "pipeline": {"groups_per_step": 2, "max_staleness": 1},
        "stop": {"steps": STEPS},
    }
    return spec(**{name: {**usual.get(name, {}), **sections.get(name, {})} for name in usual | sections})


specs = st.builds(
    lambda size, partial, staleness, every, on_stale, engines, slots, ranks, saves, keep, tokens, evaluation, data: (
        small_spec(
            data=data,
            pipeline={"max_staleness": staleness, "publish_every": every, "on_stale": on_stale}
            | ({"mode": "sync", "partial_rollouts": True} if partial else {}),
            rollout={"engines": engines, "max_running_rollouts": max(slots, size), "group_size": size},
            trainer={"ranks": ranks},
            checkpoints={"every": saves, "keep_last": keep},
            journal={"keep": tokens},
            evaluation=evaluation,
        )
    ),
    size=st.integers(2, 3),
    partial=st.booleans(),
    staleness=st.sampled_from([0, 1, 1, 3]),
    every=st.integers(1, 3),
    on_stale=st.sampled_from(["wait", "requeue"]),
    engines=st.integers(1, 3) | st.sampled_from([{"min": 1, "max": 2}, {"min": 1, "max": 3}, {"min": 2, "max": 3}]),
    slots=st.integers(2, 12),
    ranks=st.integers(1, 2),
    saves=st.integers(0, 3),
    keep=st.integers(1, 2),
    tokens=st.sampled_from(["all", "all", 1, 2]),
    evaluation=st.sampled_from(
        [
            {},
            {"every": 2},
            {"every": 2, "samples": 3, "fix_version": True},
            {"sets": {"more": {"data": {"size": 2}, "every": 3}}, "fix_version": True},
        ]
    ),
    data=st.sampled_from([{}, {"shuffle": True}]),
)
VICTIMS = ("engine", "trainer", "driver", "agent", "node", "join")
fates = st.builds(
    lambda seed, faults, victims: (seed, faults, victims),
    seed=st.integers(0, 2**32),
    faults=st.integers(1, 12),
    victims=st.lists(st.sampled_from(VICTIMS), min_size=1, max_size=4, unique=True),
)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_undisturbed_run(tmp_path: Path, every: int) -> None:
    of = small_spec(
        pipeline={"publish_every": every},
        checkpoints={"every": 2},
        rollout={"group_size": every + 1},
        evaluation={"samples": min(every, 2)},
    )
    finished = simulated(tmp_path, of, Fate(Random(every), 0))
    assert finished.simulation.drivers == 1
    assert not [text for text in finished.simulation.view.shown if text.startswith("!")]


def test_partial_rollouts_continue_after_the_publish_and_nothing_is_generated_while_the_trainer_trains(
    tmp_path: Path,
) -> None:
    fates = {partial: Fate(Random(1), 0) for partial in (False, True)}
    few = {"engines": 1, "max_running_rollouts": 4}
    partial = small_spec(pipeline={"mode": "sync", "partial_rollouts": True}, rollout=few)
    finished = simulated(tmp_path / "partial", partial, fates[True])
    simulated(tmp_path / "async", small_spec(rollout=few), fates[False])
    assert not fates[True].overlapped
    assert fates[False].overlapped, "otherwise the test would show nothing"
    rollouts = [rollout for batch in finished.batches for group in batch.groups for rollout in group.rollouts]
    assert any(len(set(rollout.versions.tolist())) > 1 for rollout in rollouts)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_trainer_trains_while_engines_load_what_it_published(tmp_path: Path, every: int, staleness: int) -> None:
    fate = Fate(Random(0), 0)
    simulated(tmp_path, small_spec(pipeline={"max_staleness": staleness, "publish_every": every}), fate)
    assert fate.loaded_meanwhile == (staleness > 0), "with S = 0 there is no batch to train meanwhile"


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_learns_nothing_ends_with_a_checkpoint_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr("simulation.judged", lambda texts: [0.5] * len(texts))
    of = small_spec(stop={"on_unhealthy": 3}, pipeline={"publish_every": every})
    simulation = Simulation(tmp_path, of, Fate(Random(0), 0))
    with pytest.raises(RunError, match=r"nothing was learned in [34] steps in a row") as ended:
        simulation.play()
    saved = every * -(-3 // every)
    assert ended.value.location == "stop.on_unhealthy" and f"continues after step {saved}" in (ended.value.hint or "")
    assert [checkpoint.step for checkpoint in complete_checkpoints(simulation.run.path / "checkpoints")] == [saved]
    again = Simulation(tmp_path / "other", of, Fate(Random(0), 0))
    again.run = simulation.run
    again.spec = of.model_copy(update={"stop": of.stop.model_copy(update={"on_unhealthy": STEPS - saved + 1})})
    again.play()
    assert simulation.run.state.step == STEPS, "a resumed run counts from 0"


@pytest.mark.parametrize("keep", ["all", 1])
def test_the_trainer_trains_while_its_checkpoint_is_written(tmp_path: Path, keep: Any) -> None:
    fate = Fate(Random(0), 0)
    finished = simulated(tmp_path, small_spec(checkpoints={"every": 1}, journal={"keep": keep}), fate)
    assert fate.saved_meanwhile
    with closing(open_for_reading(finished.path / FILE)) as connection:
        saved = connection.execute("SELECT step, stall_s < seconds FROM checkpoints ORDER BY step").fetchall()
    assert [step for step, _ in saved] == list(range(1, STEPS + 1))
    assert all(shorter for step, shorter in saved if step < STEPS)
    rows = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "checkpoint/stall_s" in row] == list(range(2, STEPS + 1))
    assert any("checkpoint/seconds" in row for row in rows)


def test_a_checkpoint_that_is_saved_already_is_not_uploaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload's failure would cost the complete copy."""
    fate, finish, uploaded = Fate(Random(0), 0), Uploads.finish, list[str]()
    fate.interrupts = 0.0

    async def finish_and_die(uploads: Uploads) -> None:
        await finish(uploads)
        if simulation.drivers == 1:
            fate.driver.set()
            await asyncio.Event().wait()

    monkeypatch.setattr("asyncrl_cli.orchestrator.uploads.copy", lambda folder, url: uploaded.append(folder.name))
    monkeypatch.setattr(Uploads, "finish", finish_and_die)
    simulation = Simulation(tmp_path, small_spec(checkpoints={"every": 4, "upload": "memory://copies"}), fate)
    simulation.play()
    assert simulation.drivers == 2
    assert uploaded == ["step-000004", "step-000006"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = vars(Rank)["write_checkpoint"]

    async def write_until_full(rank: Rank, folder: str) -> Any:
        if folder.endswith("4"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return await write.__get__(rank, Rank).remote(folder)

    simulation = Simulation(tmp_path, small_spec(checkpoints={"every": 2}), Fate(Random(0), 0))
    with monkeypatch.context() as patched:
        patched.setattr(Rank, "write_checkpoint", remote(write_until_full))
        with pytest.raises(RunError, match="No space left on device") as raised:
            simulation.play()
    assert raised.value.location == "trainer-0"
    folder = simulation.run.path / "checkpoints"
    assert [checkpoint.step for checkpoint in complete_checkpoints(folder)] == [2]


class LostWrite(Fate):
    """The trainer dies while it writes a checkpoint, with ``trains`` after it has trained the next step, and with
    ``with_driver`` together with the driver."""

    def __init__(self, trains: bool, with_driver: bool = False) -> None:
        super().__init__(Random(3), 0)
        self.interrupts = 0.0
        self._trains, self._with_driver = trains, with_driver

    def strikes(self, victim: str, chance: float) -> bool:
        struck = victim == "writer" and not self.met and self.saved_meanwhile >= self._trains
        self.met += [victim] * struck
        if struck and self._with_driver:
            self.driver.set()
        return struck or super().strikes(victim, chance)


@pytest.mark.parametrize("every", [1, 0])
def test_a_trainer_that_dies_while_it_writes_restarts_and_the_last_checkpoint_is_written(
    tmp_path: Path, every: int
) -> None:
    fate = LostWrite(trains=every > 0)
    finished = simulated(tmp_path, small_spec(checkpoints={"every": every, "keep_last": 1}, journal={"keep": 1}), fate)
    assert fate.met == ["writer"]
    assert [checkpoint.step for checkpoint in complete_checkpoints(finished.path / "checkpoints")] == [STEPS]
    (warned,) = [text for text in finished.simulation.view.shown if "is lost" in text]
    assert "died while it was written" in warned


@pytest.mark.parametrize("with_driver", [False, True])
def test_a_lost_checkpoint_is_soon_followed_by_another(tmp_path: Path, with_driver: bool) -> None:
    fate = LostWrite(trains=True, with_driver=with_driver)
    finished = simulated(tmp_path, small_spec(checkpoints={"every": 3, "keep_last": 9}), fate)
    assert fate.met == ["writer"] and finished.simulation.drivers == 1 + with_driver
    assert [start.checkpoint for start in finished.simulation.starts] == [None] * (1 + with_driver)
    saved = [checkpoint.step for checkpoint in complete_checkpoints(finished.path / "checkpoints")]
    assert len(saved) == 2 and 3 < saved[0] < saved[1] == STEPS


def test_files_that_a_recovery_reads_are_not_deleted_for_a_newer_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies after it has written step 4, and loads step 2 before the driver has named step 4."""
    write, start, loading = TrainerRanks.write_checkpoint, TrainerRanks.start, asyncio.Event()

    async def die_after_it(ranks: TrainerRanks, folder: Path) -> Any:
        written = await write(ranks, folder)
        if folder.name.endswith("4") and not loading.is_set():
            ranks._actors[0].die()
            await loading.wait()
        return written

    async def load_slowly(ranks: TrainerRanks, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            loading.set()
            await turns(500)
        await start(ranks, checkpoint)

    monkeypatch.setattr(TrainerRanks, "write_checkpoint", die_after_it)
    monkeypatch.setattr(TrainerRanks, "start", load_slowly)
    kept = small_spec(checkpoints={"every": 2, "keep_last": 1}, journal={"keep": 1})
    finished = simulated(tmp_path, kept, Fate(Random(0), 0))
    assert loading.is_set()
    assert [checkpoint.step for checkpoint in complete_checkpoints(finished.path / "checkpoints")] == [STEPS]


class InterruptedPublish(Fate):
    """Ctrl-C arrives when a rank trains while an engine loads the previous version."""

    def __init__(self) -> None:
        super().__init__(Random(0), 0)
        self.interrupts = 1.0

    def __setattr__(self, name: str, value: object) -> None:
        if name == "loaded_meanwhile" and value and not self.loaded_meanwhile:
            self.driver.set()
        super().__setattr__(name, value)


@pytest.mark.parametrize("every", [1, 2])
def test_ctrl_c_while_engines_load_saves_a_checkpoint_that_the_run_resumes_from(tmp_path: Path, every: int) -> None:
    fate = InterruptedPublish()
    finished = simulated(tmp_path, small_spec(pipeline={"publish_every": every}), fate)
    first, second = finished.simulation.starts
    assert first.checkpoint is None
    assert every > 1 or second.checkpoint is not None
    assert not [text for text in finished.simulation.view.shown if text.startswith("!")], "no rank was restarted"


def sharing(partial: bool = False, every: int = 1, engines: int = 1) -> ExperimentSpec:
    """Mode sync with GPUs shared by engines and ranks. The simulated ranks check that no engine uses the GPUs."""
    return small_spec(
        pipeline={"mode": "sync", "partial_rollouts": partial, "max_staleness": int(partial), "publish_every": every},
        rollout={"engines": engines, "gpus_per_engine": 0.5, "max_running_rollouts": 4},
        trainer={"ranks": engines, "gpus_per_rank": 0.5, "tokens_per_microbatch": 2048},
        evaluation={"every": 2},
    )


@pytest.mark.slow
@given(
    partial=st.booleans(),
    every=st.integers(1, 2),
    engines=st.integers(1, 2),
    seed=st.integers(0, 2**32),
    faults=st.integers(1, 8),
    victims=st.lists(st.sampled_from(["engine", "trainer", "driver", "agent"]), min_size=1, unique=True),
)
@settings(EXHAUSTIVE, max_examples=15)
def test_no_engine_uses_a_gpu_in_the_trainers_turn_whichever_process_dies(
    tmp_path_factory: pytest.TempPathFactory,
    partial: bool,
    every: int,
    engines: int,
    seed: int,
    faults: int,
    victims: list[str],
) -> None:
    simulated(tmp_path_factory.mktemp("runs"), sharing(partial, every, engines), Fate(Random(seed), faults, victims))


@pytest.mark.slow
@given(of=specs, fate=fates)
@settings(EXHAUSTIVE, max_examples=100)
def test_promises_hold_whichever_process_dies(
    tmp_path_factory: pytest.TempPathFactory, of: ExperimentSpec, fate: tuple[int, int, list[str]]
) -> None:
    seed, faults, victims = fate
    simulated(tmp_path_factory.mktemp("runs"), of, Fate(Random(seed), faults, victims))


@pytest.mark.slow
@given(fate=fates, every=st.integers(1, 3), engines=st.integers(1, 3))
@settings(EXHAUSTIVE, max_examples=20)
def test_without_staleness_all_runs_are_the_same_run(
    tmp_path_factory: pytest.TempPathFactory, fate: tuple[int, int, list[str]], every: int, engines: int
) -> None:
    """For any number of engines, any order of responses and any deaths: the same batches and the same weights."""
    seed, faults, victims = fate
    pipeline = {"max_staleness": 0, "publish_every": every}
    runs = [
        simulated(
            tmp_path_factory.mktemp("runs"),
            small_spec(pipeline=pipeline, rollout={"engines": count}),
            Fate(Random(number(seed, count)), faults if count == engines else 0, victims),
        )
        for count in (1, engines)
    ]
    assert runs[0].digests == runs[1].digests
