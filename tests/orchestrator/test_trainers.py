"""All trainer ranks get the same calls and fail together. Deaths and errors are told apart in any order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Actor, ReadyGroup, RemoteMethod

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.placement import PlacementGroup
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks, weight_bytes
from asyncrl_cli.records.training import RankLocation, StepReport, TrainingBatch
from asyncrl_cli.system.remote import START_TIMEOUT_S, NoAnswer

Behaviour = Callable[["Rank", str, tuple[Any, ...]], Awaitable[Any]]


class Rank(Actor):
    """A rank with methods from the test."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.rank = rank

    def __getattr__(self, method: str) -> Any:
        return RemoteMethod(self, partial(self.do, method))

    async def do(self, method: str, *arguments: Any) -> Any:
        self.ranks.calls.append((self.rank, method, arguments))
        return await self.ranks.behaviour(self, method, arguments)


class Ranks:
    """The ranks, and their calls."""

    def __init__(self, behaviour: Behaviour, count: int = 3, limit_s: float = 600.0) -> None:
        self.behaviour = behaviour
        self.calls: list[tuple[int, str, tuple[Any, ...]]] = []
        self.made: list[Rank] = []
        self.shared: list[TrainingBatch] = []
        group = ReadyGroup("the trainer", count)
        self.trainer = TrainerRanks(self._make, group, Path("/search"), limit_s, pytest.fail, self._share)

    def _share(self, batch: TrainingBatch) -> str:
        self.shared.append(batch)
        return f"reference {len(self.shared)}"

    def _make(self, group: PlacementGroup, index: int) -> Rank:
        self.made.append(Rank(self, index))
        return self.made[-1]


async def never() -> Any:
    """A rank without its peer waits forever."""
    return await asyncio.get_running_loop().create_future()


async def placed(behaviour: Behaviour, limit_s: float = 600.0) -> Ranks:
    """Three ranks with their locations, without other calls."""
    ranks = Ranks(starts, limit_s=limit_s)
    await ranks.trainer.preload()
    ranks.behaviour = behaviour
    ranks.calls.clear()
    return ranks


async def raised_by(behaviour: Behaviour) -> Exception:
    """The error of a call to all ranks."""
    with pytest.raises(Exception) as error:  # noqa: PT011
        await (await placed(behaviour)).trainer._call("train_step", "batch")
    return error.value


async def test_all_ranks_are_called_alike_and_answer_in_order() -> None:
    async def answers(rank: Rank, method: str, arguments: tuple[Any, ...]) -> int:
        for _ in range(3 - rank.rank):
            await asyncio.sleep(0)
        return 10 * rank.rank

    ranks = await placed(answers)
    assert await ranks.trainer._call("train_step", "batch", 7) == [0, 10, 20]
    assert ranks.calls == [(rank, "train_step", ("batch", 7)) for rank in range(3)]


async def test_a_batch_is_handed_over_once_for_all_ranks() -> None:
    async def answers(rank: Rank, method: str, arguments: tuple[Any, ...]) -> StepReport:
        return StepReport({}, seconds=0.0, trained_tokens=rank.rank)

    ranks, batch = await placed(answers), TrainingBatch(3, 2, ())
    await ranks.trainer.train_step(batch)
    assert ranks.shared == [batch]
    assert ranks.calls == [(rank, "train_step", ("reference 1",)) for rank in range(3)]


async def test_a_death_is_the_loss_of_all_though_the_others_never_end() -> None:
    async def dies(rank: Rank, method: str, arguments: tuple[Any, ...]) -> Any:
        if rank.rank == 1:
            rank.die()
        await never()

    lost = await raised_by(dies)
    assert isinstance(lost, TrainerLost)
    assert (lost.name, lost.cause, str(lost)) == ("trainer-1", "the process died", "trainer-1: the process died")


@pytest.mark.parametrize("errors_first", [True, False])
async def test_errors_of_other_ranks_do_not_hide_a_death(errors_first: bool) -> None:
    async def closed(rank: Rank, method: str, arguments: tuple[Any, ...]) -> Any:
        comes_later = (rank.rank == 2) == errors_first
        for _ in range(10 if comes_later else 0):
            await asyncio.sleep(0)
        if rank.rank == 2:
            rank.die()
        raise RuntimeError("Connection closed by peer")

    lost = await raised_by(closed)
    assert isinstance(lost, TrainerLost)
    assert lost.name == "trainer-2"


async def test_an_error_on_one_rank_does_not_wait_for_the_others_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.trainers.GRACE_S", 0.01)

    async def fails(rank: Rank, method: str, arguments: tuple[Any, ...]) -> Any:
        if rank.rank == 2:
            raise ValueError("loss is not finite")
        await never()

    error = await raised_by(fails)
    assert isinstance(error, RunError)
    assert str(error).startswith("trainer-2: ValueError: loss is not finite (see logs/trainer-2.log")


async def test_a_step_may_exceed_its_limit_while_ranks_finish_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.trainers.LONGEST_LOOK_S", 0.0)
    loop, limit_s, end_count = asyncio.get_running_loop(), 0.5, 10**9
    ended, counts, progress = asyncio.Event(), dict.fromkeys(range(3), 0), []

    async def works(rank: Rank, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "ping":
            counts[rank.rank] = min(counts[rank.rank] + 1, end_count)
            if loop.time() > start + 2 * limit_s:
                ended.set()
            return counts[rank.rank]
        await ended.wait()
        return StepReport({}, seconds=0.0, trained_tokens=1)

    ranks, start = await placed(works, limit_s), loop.time()
    await ranks.trainer.train_step(TrainingBatch(3, 2, ()), lambda: progress.append(None))
    assert progress
    ended.clear()
    start, end_count = math.inf, max(counts.values()) + 5  # then the ranks answer, but finish no micro-batch
    with pytest.raises(NoAnswer, match="no rank has finished a micro-batch within"):
        await ranks.trainer.train_step(TrainingBatch(4, 3, ()))


# -- start and restart


async def starts(rank: Rank, method: str, arguments: tuple[Any, ...]) -> Any:
    """A rank that can be started, with its own address."""
    if method == "visit":
        return RankLocation(f"node-{rank.rank}", f"10.0.0.{rank.rank}")
    if method == "preload":
        number = len(rank.ranks.made)
        return f"10.0.0.{rank.rank}", 1000 * number + rank.rank
    if method == "prepare_model":
        return "/models/one"
    return None


async def test_ranks_meet_at_rank_0_and_again_at_the_new_one_after_a_restart(killed: list[Any]) -> None:
    ranks = Ranks(starts, count=2)
    await ranks.trainer.preload()
    assert [location.node_id for location in ranks.trainer.locations] == ["node-0", "node-1"]
    assert ranks.calls[-2:] == [(0, "preload", (0, False)), (1, "preload", (1, False))]
    assert await ranks.trainer.prepare_model() == "/models/one"
    assert [call for call in ranks.calls if call[1] == "prepare_model"] == [(0, "prepare_model", ())]
    await ranks.trainer.start(None)
    assert ranks.calls[-2:] == [
        (rank, "start", ("/models/one", "10.0.0.0", 2000, None, "/search")) for rank in range(2)
    ]

    old = list(ranks.made)
    old[1].die()
    await ranks.trainer.restart(Path("/runs/1/checkpoints/step-000004"))
    assert killed == old
    started = ("/models/one", "10.0.0.0", 4000, "/runs/1/checkpoints/step-000004", "/search")
    assert ranks.calls[-2:] == [(rank, "start", started) for rank in range(2)]
    assert len([call for call in ranks.calls if call[1] == "prepare_model"]) == 1, "the model is made once"
    await ranks.trainer.save_model(Path("/model"), Path("/adapter"))
    assert ranks.calls[-2:] == [(rank, "save_model", ("/model", "/adapter")) for rank in range(2)]
    assert [rank.rank for rank in ranks.made] == [0, 1, 0, 1]


async def test_a_larger_model_has_longer_to_load_and_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GB of weights in a sparse file, which takes no disk space."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(4_000_000_000)
    limits = {}

    async def note(
        self: TrainerRanks, method: str, *arguments: Any, limit_s: float | None = None, group: str | None = None
    ) -> list[Any]:
        limits[method] = limit_s
        return [{f"state/{rank}": rank} for rank in range(2)]

    monkeypatch.setattr(TrainerRanks, "_call", note)
    ranks = TrainerRanks(pytest.fail, ReadyGroup("the trainer", 2), Path("/search"), 60.0, pytest.fail)
    ranks._model_dir, ranks._address, ranks._port = str(tmp_path), "", 0
    ranks.locations = (RankLocation("node", "10.0.0.1"),) * 2
    await ranks.start(None)
    assert limits["start"] == START_TIMEOUT_S + 40
    await ranks.save_checkpoint(Path("/x"))
    assert await ranks.write_checkpoint(Path("/x")) == {"state/0": 0, "state/1": 1}
    assert limits["save_checkpoint"] == limits["write_checkpoint"] == 60 + ranks.saving_s == 60 + 160
    await ranks.save_model(Path("/x"), Path("/y"))
    assert limits["save_model"] == 60 + 40
    await ranks.start(Path("/checkpoint"))
    assert limits["start"] == START_TIMEOUT_S + 40 + 160
    (tmp_path / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    assert weight_bytes(str(tmp_path)) == 4 * 10**9, "only one of the formats is loaded"
    assert weight_bytes("/no/such/folder") == weight_bytes("no-user/model") == 0
