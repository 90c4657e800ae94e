"""The warm start: supervised training on trainer ranks, before the run's own ranks and engines start (decision 0105).

Its result is a saved model in the run's folder. From there the run continues like a run with this ``model.path``: the
model is version 0, and the optimizer starts fresh.

Invariant: the folder appears complete or not at all. A run that was killed during the warm start continues from its
newest checkpoint. Rows, their order and the updates depend only on the spec and the data, so it gets the same weights.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.core.files import atomic_folder
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.data.supervised_rows import RowEncoder, Rows, encode_rows
from asyncrl_cli.data.tokenizer import load_tokenizer
from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.checkpoints import Checkpoints
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.records.training import StepReport, SupervisedBatch, SupervisedRow
from asyncrl_cli.rollout.response_text import end_tokens
from asyncrl_cli.runs.checkpoints import complete_checkpoints, newest_undamaged
from asyncrl_cli.runs.directory import ADAPTER, WARM_START, RunDirectory
from asyncrl_cli.spec.algorithm import AlgorithmSpec
from asyncrl_cli.spec.inputs import WarmStart as WarmStartSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.supervised_actor import RestartBudget, not_recorded
from asyncrl_cli.train import schedule
from asyncrl_cli.train.model.initial import model_stub

PROGRESS_S = 5.0
"""Seconds between two progress texts."""
CHECKPOINTS = "warm_start_checkpoints"
"""The name of the folder with the checkpoints of an unfinished warm start."""


def with_its_result(spec: ExperimentSpec, run: RunDirectory) -> ExperimentSpec:
    """Return the spec of the run after its warm start."""
    saved = {"path": str((run.path / WARM_START).absolute()), "init": None, "warm_start": None}
    return spec.model_copy(update={"model": spec.model.model_copy(update=saved)})


def recorded_updates(run: RunDirectory) -> tuple[int, list[dict[str, Any]]]:
    """Return the updates of the newest checkpoint of an unfinished warm start, and the rows of metrics up to it."""
    checkpoints = complete_checkpoints(run.path / CHECKPOINTS)
    updates = checkpoints[-1].step if checkpoints else 0
    rows = [row for row in run.read("metrics.jsonl") if row["step"] <= 0]
    losses_before = [row for row in rows[:1] if updates and "warm_start/loss" not in row]
    return updates, [*losses_before, *[row for row in rows if "warm_start/loss" in row][:updates]]


@dataclass(slots=True)
class WarmStart:
    """The warm start of a run. ``status`` gets progress texts, ``note`` the metrics of each update, once."""

    spec: ExperimentSpec
    run: RunDirectory
    search_path: Path
    warn: Callable[[str], None]
    status: Callable[[str], None]
    note: Callable[[dict[str, float]], None]
    noted_updates: int = 0

    async def make(self) -> None:
        """Train, and save the model in the run's folder. Ranks that die are restarted from the newest checkpoint.

        Raises ``DataError`` for rows that cannot be encoded, and ``RunError``.
        """
        rows = await asyncio.to_thread(self._encoded_rows)
        budget = RestartBudget(self.spec.pipeline.max_restarts, not_recorded, self.warn)
        factory = ActorFactory(_spec_of_ranks(self.spec), self.run.path / "logs", self.search_path)
        group = factory.trainer_group()
        ranks = factory.ranks(2 * self.spec.pipeline.stall_minutes * 60, self.status, group)
        try:
            while True:
                try:
                    await self._train(ranks, rows)
                except TrainerLost as lost:
                    await budget.spend("trainer", lost.name, lost.cause)
                else:
                    break
        finally:
            group.remove()

    def _encoded_rows(self) -> list[SupervisedRow]:
        warm_start = self.spec.model.warm_start
        assert warm_start is not None
        stub = model_stub(self.spec, self.run.model_stub)
        tokenizer = load_tokenizer(stub, self.spec.model.chat_template)
        encoder = RowEncoder(PromptEncoder.of(self.spec, tokenizer), end_tokens(stub, tokenizer), warm_start)
        source = Rows.from_spec(warm_start, self.search_path)
        rows = encode_rows(source, encoder, self.spec.model.max_length)
        skipped = len(source.prompts) - len(rows)
        too_long = f"; {skipped:,} {'is' if skipped == 1 else 'are'} too long" if skipped else ""
        self.status(f"warm start on {counted(len(rows), 'row')}{too_long}")
        return rows

    async def _train(self, ranks: TrainerRanks, rows: Sequence[SupervisedRow]) -> None:
        warm_start = self.spec.model.warm_start
        assert warm_start is not None
        held_out, rows = _split(rows, warm_start.held_out_rows, self.spec.seed)
        updates, tokens = warm_start.updates(len(rows)), 0
        self.status("starting the trainer of the warm start")
        saving_every = self.spec.checkpoints.every
        saved = newest_undamaged(self.run, folder=CHECKPOINTS) if saving_every else None
        checkpoints = Checkpoints(self.run.path / CHECKPOINTS, ranks, _spec_of_ranks(self.spec))
        first_update = saved.step if saved is not None else 0
        await ranks.preload()
        await ranks.prepare_model()
        await ranks.start(None if saved is None else saved.folder)
        losses: dict[str, float] = {}
        if held_out and self.noted_updates == first_update == 0:
            losses = await _held_out_loss(ranks, held_out, warm_start.batch_size)
            self.note({"version": 0, "time": time.time(), **losses, "step": -updates})
        reported_s = start_s = time.monotonic()
        batches = batches_of(rows, warm_start, self.spec.seed)
        for update, batch in enumerate(islice(batches, first_update, updates), start=first_update):
            rate = warm_start.learning_rate * schedule.factor(update, updates, warm_start.schedule)
            report = await ranks.supervised_step(SupervisedBatch(batch, rate))
            tokens += report.trained_tokens
            is_due = update + 1 == updates or (
                warm_start.evaluate_every and (update + 1) % warm_start.evaluate_every == 0
            )
            if held_out and is_due:
                losses = await _held_out_loss(ranks, held_out, warm_start.batch_size)
            if update == self.noted_updates:  # otherwise repeated after the loss of a rank
                self.note({**_row(report), **(losses if is_due else {}), "step": update + 1 - updates})
                self.noted_updates += 1
            if (now_s := time.monotonic()) >= reported_s + PROGRESS_S or update + 1 == updates:
                reported_s = now_s
                loss, speed = report.metrics["warm_start/loss"], tokens / (now_s - start_s)
                loss_text = f"loss {loss:.3f}" + "".join(f", held-out {value:.3f}" for value in losses.values())
                self.status(f"warm start, update {update + 1} of {updates}, {loss_text}, {speed:,.0f} tokens/s")
            if saving_every and (update + 1) % saving_every == 0 and update + 1 < updates:
                if await checkpoints.copy(update + 1):
                    await checkpoints.write(update + 1, {"step": update + 1})
                await asyncio.to_thread(checkpoints.prune, {})
        folder = (self.run.path / WARM_START).absolute()  # the ranks may have another working directory
        with atomic_folder(folder) as unfinished:
            await ranks.save_model(unfinished, unfinished / ADAPTER)


def _split(
    rows: Sequence[SupervisedRow], held_out_count: int, seed: int
) -> tuple[list[SupervisedRow], Sequence[SupervisedRow]]:
    """Return the held-out rows and the others. Raises ``DataError`` if no row is left to train on."""
    if not held_out_count:
        return [], rows
    if held_out_count >= len(rows):
        hint = f"keep fewer of the {counted(len(rows), 'row')}"
        raise DataError("no row is left to train on", location="model.warm_start.held_out_rows", hint=hint)
    drawn = set(random.Random(f"warm_start/held_out/{seed}").sample(range(len(rows)), held_out_count))
    return [rows[index] for index in sorted(drawn)], [row for index, row in enumerate(rows) if index not in drawn]


async def _held_out_loss(ranks: TrainerRanks, rows: Sequence[SupervisedRow], batch_size: int) -> dict[str, float]:
    """Measure the mean of −log p over the learned tokens of all rows."""
    loss_sum, tokens = 0.0, 0
    for start in range(0, len(rows), batch_size):
        report = await ranks.supervised_step(SupervisedBatch(tuple(rows[start : start + batch_size]), None))
        loss_sum += report.metrics["warm_start/loss"] * report.trained_tokens
        tokens += report.trained_tokens
    return {"warm_start/held_out_loss": loss_sum / tokens}


def _row(report: StepReport) -> dict[str, float]:
    """A row of metrics.jsonl. Updates have steps up to 0, the step of version 0."""
    speed = report.trained_tokens / report.seconds
    return {"version": 0, "time": time.time(), **report.metrics, "warm_start/tokens_per_s": speed}


def batches_of(
    rows: Sequence[SupervisedRow], warm_start: WarmStartSpec, seed: int
) -> Iterator[tuple[SupervisedRow, ...]]:
    """Yield the rows of each update: all rows in each pass, in another order each time. After `epochs` passes the last
    update has the remaining rows."""
    generator = random.Random(f"warm_start/{seed}")
    passes = count() if warm_start.epochs is None else range(warm_start.epochs)
    order = chain.from_iterable(generator.sample(rows, len(rows)) for _ in passes)
    while batch := tuple(islice(order, warm_start.batch_size)):
        yield batch


def _spec_of_ranks(spec: ExperimentSpec) -> ExperimentSpec:
    """The spec for ranks that train only the policy, on the log-probs at temperature 1."""
    assert spec.model.warm_start is not None
    optimizer = spec.trainer.optimizer.model_copy(update={"learning_rate": spec.model.warm_start.learning_rate})
    sampling = spec.rollout.sampling.model_copy(update={"temperature": 1.0})
    changes = {
        "algorithm": AlgorithmSpec(),
        "trainer": spec.trainer.model_copy(update={"optimizer": optimizer}),
        "rollout": spec.rollout.model_copy(update={"sampling": sampling}),
    }
    return spec.model_copy(update=changes)
