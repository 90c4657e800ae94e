"""A complete run without Ray, vLLM and DeepSpeed in one thread: the driver's real code, the real buffer with its
journal, and real checkpoints; simulated engines and trainer ranks, which die when ``Fate`` decides.

A rank's weights are the digests of its trained batches. A token depends only on its rollout's seed, its index
and the weights that sample it. So every token of a batch can be computed afterwards from the journal.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
from stand_in_hosts import StandInAgent, StandInHosts, layout
from stand_ins import Actor, Here, ReadyGroup, StandInProcess, kill, prompts, remote, watchdog

from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.data.prompt_encoder import Encoded
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.monitors.base import Monitor
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator import nodes
from asyncrl_cli.orchestrator.engines import client_of
from asyncrl_cli.orchestrator.evaluation import Evaluator, HeldOut
from asyncrl_cli.orchestrator.launch import DriverStart, _save_before_leaving
from asyncrl_cli.orchestrator.loop import Orchestrator
from asyncrl_cli.orchestrator.metrics import batch_digest
from asyncrl_cli.orchestrator.prompt_source import PromptSource
from asyncrl_cli.orchestrator.resume import prepare
from asyncrl_cli.orchestrator.trainers import TrainerRanks
from asyncrl_cli.records.generation import (
    Attestation,
    Delivery,
    EngineActivity,
    Rollout,
    RolloutRequest,
    Segment,
    TokenSequence,
)
from asyncrl_cli.records.groups import BufferSettings, Counts
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import Scored
from asyncrl_cli.records.training import Probe, RankLocation, StepReport, TrainingBatch
from asyncrl_cli.rollout.worker import EVALUATION
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import engines_sleep
from asyncrl_cli.system.remote import ActorLost
from asyncrl_cli.system.supervised_actor import RestartBudget
from asyncrl_cli.weights.manifest import ReplicaGone
from asyncrl_cli.workers.scoring import Response

Weights = tuple[str, ...]
PROMPTS = 40
LIMIT_S = 120.0
"""Seconds after which a simulated run counts as hung."""


def number(*parts: object) -> int:
    """A number that depends on all arguments."""
    return zlib.crc32(repr(parts).encode())


def token(request_seed: int | None, place: int, weights: Weights) -> int:
    """The token that these weights sample at an index of a rollout."""
    return number(request_seed, place, weights) % 90 + 5


def length(request_seed: int | None) -> int:
    """Tokens of a rollout, from 1 to 8."""
    return number("length", request_seed) % 8 + 1


def probe(weights: Weights) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The trainer's log-probs of the probe."""
    return np.random.default_rng(number(weights)).normal(-5.0, 1.0, 8).astype(np.float32)


RANK_0 = "host-0"
TRAINING_TURNS = 5
"""Iterations of the event loop that a step takes, enough for engines to generate during it."""
LOADING_TURNS = 16
"""Iterations of the event loop that an engine takes to load a version, enough for the next batch to be ready."""


class Fate:
    """Decides which process dies and when, at most ``faults`` times, so every run ends."""

    def __init__(self, random: Random, faults: int, victims: Iterable[str] = ()) -> None:
        self.random = random
        self.victims = list(victims)
        self.faults = faults
        self.met: list[str] = []
        self.interrupts = 0.5
        """Probability that a driver is ended by Ctrl-C and not by SIGKILL."""
        self.gone: set[str] = set()
        self.driver = asyncio.Event()
        self.training = 0
        self.overlapped = False
        """True if an engine generated while a rank trained."""
        self.loading = 0
        self.loaded_meanwhile = False
        """True if a rank trained while a serving engine loaded the next version."""
        self.saved_meanwhile = False
        """True if a rank trained while its checkpoint was written."""
        self.awake: set[Engine] = set()
        """Engines that use their GPU now."""

    def strikes(self, victim: str, chance: float) -> bool:
        """True if the victim dies now."""
        struck = self.faults > 0 and victim in self.victims and self.random.random() < chance
        self.faults -= struck
        self.met += [victim] * struck
        return struck

    def pass_by(self) -> None:
        """The driver may die at any call to one of its actors."""
        if self.strikes("driver", 0.003):
            self.driver.set()


class Engine(Actor):
    """Generates a few tokens of some rollouts at a time. It may die, also with its node."""

    def __init__(self, fate: Fate, hosts: StandInHosts, node: str) -> None:
        super().__init__()
        self._fate = fate
        self._hosts = hosts
        self._node = node
        self._version, self._weights = -1, ("none",)
        self._running: dict[str, tuple[RolloutRequest, Rollout]] = {}
        self._reported: dict[str, int] = {}
        self._aborted: dict[str, list[Segment]] = {}
        self._news = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        fate.awake.add(self)

    @remote
    async def sleep(self) -> None:
        self._may_die(0.05)
        self._awake.clear()
        self._fate.awake.discard(self)

    @remote
    async def wake_up(self) -> None:
        self._may_die(0.05)
        self._fate.awake.add(self)
        self._awake.set()

    def die(self) -> None:
        self._fate.awake.discard(self)
        super().die()

    @remote
    async def update_weights(
        self, version: int, path: str, slots: Any, policy: str, probe_ids: tuple[int, ...], *_: Any
    ) -> Attestation:
        await self._awake.wait()
        self._may_die(0.05)
        assert version >= self._version, "versions move forward"
        if path not in self._hosts.memory:
            raise ReplicaGone("the memory is gone")
        shards = self._hosts.memory[path]
        assert set(shards) == set(range(len(shards))), "every rank has written"
        later = self._version >= 0
        self._fate.loading += later
        try:
            for _ in range(LOADING_TURNS):
                await asyncio.sleep(0)
        finally:
            self._fate.loading -= later
        if path not in self._hosts.memory:
            raise ReplicaGone("the memory is gone")
        (self._weights,) = set(shards.values())
        self._version = version
        return Attestation(version, probe(self._weights), 0.0)

    @remote
    async def submit(self, requests: list[RolloutRequest]) -> None:
        assert self._version >= 0, "it has weights before it gets requests"
        self._may_die(0.02)
        for request in requests:
            self._running[request.rollout_id] = (request, _joined(request))
            self._reported[request.rollout_id] = request.generated
        self._news.set()

    @remote
    async def cancel(self, rollout_ids: list[str]) -> None:
        for rollout_id in rollout_ids:
            self._running.pop(rollout_id, None)

    @remote
    async def abort(self) -> None:
        self._may_die(0.02)
        for name, (_, rollout) in self._running.items():
            self._aborted[name] = self._tail(name, rollout)
        self._running.clear()
        self._news.set()

    @remote
    async def collect(self, timeout_s: float) -> Delivery:
        if not (self._running or self._aborted):
            self._news.clear()
            await self._news.wait()
        await self._awake.wait()
        await asyncio.sleep(0)
        self._fate.pass_by()
        self._may_die(0.02)
        before = sum(len(rollout.ids) for _, rollout in self._running.values())
        for rollout_id in [name for name in self._running if self._fate.random.random() < 0.5]:
            self._grow(rollout_id)
        after = sum(len(rollout.ids) for _, rollout in self._running.values())
        ended = [
            rollout for request, rollout in self._running.values() if len(rollout.ids) == length(request.sampling.seed)
        ]
        for rollout in ended:
            del self._running[rollout.rollout_id]
        segments = self._unreported() if self._fate.random.random() < 0.3 else []
        aborted, self._aborted = self._aborted, {}
        segments += [segment for tail in aborted.values() for segment in tail]
        silent = self._fate.strikes("engine", 0.01)
        self._fate.overlapped |= after > before and self._fate.training > 0
        activity = EngineActivity(after - before, 0.0, 0.0, 1.0, silent_s=1e9 if silent else 0.0)
        return Delivery(ended, [], segments, activity, list(aborted))

    def _grow(self, rollout_id: str) -> None:
        request, rollout = self._running[rollout_id]
        place, seed = len(rollout.ids), request.sampling.seed
        places = range(place, min(place + self._fate.random.randint(1, 4), length(seed)))
        ids = [token(seed, place, self._weights) for place in places]
        self._running[rollout_id] = (request, _extended(rollout, ids, self._version))

    def _unreported(self) -> list[Segment]:
        found = []
        for name, (_, rollout) in self._running.items():
            if not name.startswith(EVALUATION):
                found += self._tail(name, rollout)
        return found

    def _tail(self, name: str, rollout: Rollout) -> list[Segment]:
        """The tokens of a rollout that are not reported yet."""
        start, self._reported[name] = self._reported[name], len(rollout.ids)
        return rollout.slice(start, None).segments(name, start)

    def _may_die(self, chance: float) -> None:
        if self._fate.strikes("node", chance):
            self._fate.gone.add(self._node)
            if self._node != RANK_0:  # the node of a rank: the rank would be lost, too
                self._hosts.lose(self._node)
            self.die()
        if self._fate.strikes("engine", chance):
            self.die()


class Process(StandInProcess):
    """An engine's actors. An additional engine waits for room, and may fail to start."""

    def __init__(self, fate: Fate, **more: Any) -> None:
        super().__init__(**more)
        self._fate = fate

    async def join(self, waits: Callable[[str], None]) -> None:
        waits(f"{self.name} waits until Ray has room for it")
        for _ in range(self._fate.random.randint(0, 20)):
            await asyncio.sleep(0)
        if self._fate.strikes("join", 0.2):
            raise ActorLost("it does not start", location=self.name)
        await self.start_once()


class Cluster:
    """A cluster with room for more engines, each on its own node."""

    def __init__(self, fate: Fate, make: Callable[[str, str, bool], Process]) -> None:
        """``make(name, node, started)``: an engine on a node."""
        self._fate = fate
        self._make = make
        # The first engine is on the node of rank 0, the others are on nodes without ranks.
        self._nodes = (f"host-{9 * number}" for number in count())

    def engine(self, name: str, started: bool = False) -> Process:
        """A new engine."""
        return self._make(name, next(self._nodes), started)

    def why_gone(self, node: str) -> str:
        return "its node is gone" if node in self._fate.gone else ""


def _joined(request: RolloutRequest) -> Rollout:
    return Rollout(
        *TokenSequence.join(request.prefix).arrays,
        rollout_id=request.rollout_id,
        prompt_ids=request.prompt_ids,
        text="",
        finish_reason="stop",
    )


def _extended(rollout: Rollout, ids: list[int], version: int) -> Rollout:
    count = len(ids)
    more = np.array(ids, np.int32), np.full(count, -0.5, np.float32), np.full(count, version, np.int32)
    tokens = rollout.extended(TokenSequence(*more))
    text = Encoder().decode(tokens.ids)
    return replace(rollout, ids=tokens.ids, logprobs=tokens.logprobs, versions=tokens.versions, text=text)


class Rank(Actor):
    """A trainer rank. One call runs at a time, as in Ray."""

    def __init__(self, fate: Fate, hosts: StandInHosts, spec: ExperimentSpec, rank: int) -> None:
        super().__init__()
        self._fate = fate
        self._hosts = hosts
        self._ranks = spec.trainer.ranks
        self._shares = engines_sleep(spec)
        self._rank = rank
        self._turn = asyncio.Lock()
        self._weights: Weights = ()
        self._saved: Weights = ()

    @remote
    async def visit(self, search_path: str) -> RankLocation:
        return RankLocation(f"host-{self._rank}", "127.0.0.1")

    @remote
    async def preload(self, rank: int, one_host: bool) -> tuple[str, int]:
        assert rank == self._rank and one_host == (self._ranks == 1)
        return "127.0.0.1", 1

    @remote
    async def ping(self) -> None:
        if self._fate.strikes("trainer", 0.01):
            self.die()

    @remote
    async def start(self, model_dir: str, address: str, port: int, checkpoint: str | None, search_path: str) -> None:
        self._weights = () if checkpoint is None else tuple(json.loads(Path(checkpoint, "state/weights").read_text()))

    @remote
    async def train_step(self, batch: TrainingBatch) -> StepReport:
        async with self._turn:
            await self._work(0.05)
            assert batch.step == len(self._weights), "each batch once and in order"
            self._fate.training += 1
            try:
                for _ in range(TRAINING_TURNS):
                    assert not (self._shares and self._fate.awake), "engines must not use the GPUs during a step"
                    self._fate.loaded_meanwhile |= self._fate.loading > 0
                    await asyncio.sleep(0)
            finally:
                self._fate.training -= 1
            self._weights = (*self._weights, batch_digest(batch))
            await self._work(0.05)
            return StepReport({}, 0.001, 1)

    @remote
    async def layout(self) -> Any:
        return layout(self._ranks)

    @remote
    async def write(self, version: int, paths: list[str], prompt_ids: tuple[int, ...]) -> Probe:
        async with self._turn:
            await self._work(0.05)
            self._hosts.write(paths[self._rank], self._rank, self._weights)
            return Probe((1, 2), probe(self._weights))

    @remote
    async def save_checkpoint(self, folder: str, sharers: int) -> None:
        async with self._turn:
            await self._work(0.1)
            self._saved = self._weights

    @remote
    async def write_checkpoint(self, folder: str) -> dict[str, Any]:
        """Takes as long as some steps; the rank may die during it."""
        for _ in range(self._fate.random.randint(1, 4)):
            await self._work(0.05)
            self._fate.saved_meanwhile |= self._weights != self._saved
            if self._fate.strikes("writer", 0.0):
                self.die()
                await asyncio.sleep(0)
        Path(folder, "state").mkdir(exist_ok=True)
        Path(folder, "state/weights").write_text(json.dumps(self._saved))
        return {}

    @remote
    async def save_model(self, folder: str, adapter_folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "config.json").write_text(json.dumps(self._weights))

    async def _work(self, chance: float) -> None:
        for _ in range(self._fate.random.randint(1, 20)):
            await asyncio.sleep(0)
        self._fate.pass_by()
        if self._fate.strikes("trainer", chance):
            self.die()
            await asyncio.sleep(0)


class SimulatedBuffer(Buffer):
    """The real buffer; its driver may die before and after any of its commits."""

    fate: Fate

    async def _commit(self, urgent: bool = True) -> None:
        self.fate.pass_by()
        await super()._commit(urgent)
        self.fate.pass_by()


class Encoder:
    """Prompt ``p7`` has the tokens (7, 7); the text of tokens is their numbers."""

    sees_images = False
    vocabulary = 2**31

    def encode_with_images(self, prompt: Prompt) -> Encoded:
        return Encoded((int(prompt.uid[1:]),) * 2)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


def judged(texts: Sequence[str]) -> list[float | None]:
    """The rewards of responses. A group's rewards depend on its first response; the longest of three has none."""
    rewards: list[float | None] = [float(number(text) % 3 + number(texts[0]) % 3) / 2 for text in texts]
    if len(texts) > 2:
        rewards[max(range(len(texts)), key=lambda index: len(texts[index]))] = None
    return rewards


class Scorer:
    """Scores responses after a short time, responses to odd prompts together with their group."""

    def sees_group(self, prompt: Prompt) -> bool:
        return int(prompt.uid[1:]) % 2 == 1

    async def score(self, responses: list[Response]) -> list[Scored]:
        for _ in range(len(responses)):
            await asyncio.sleep(0)
        groups = [[text] if isinstance(text, str) else text for _, text, _ in responses]
        return [Scored(reward) for texts in groups for reward in judged(texts)]


def loader_of(spec: ExperimentSpec) -> PromptLoader:
    """The training prompts of a simulated run; prompt ``p7`` has the difficulty 7."""
    data = prompts(PROMPTS)
    return PromptLoader(data, spec.seed, spec.data.shuffle)


class View(Monitor):
    """Keeps the user's output."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def status(self, text: str, counts: Counts | None = None) -> None:
        self.shown.append(text)

    def warn(self, text: str) -> None:
        self.shown.append(f"! {text}")


class Simulation:
    """A run in a folder, with one driver after another until it has finished."""

    def __init__(self, folder: Path, spec: ExperimentSpec, fate: Fate) -> None:
        self.run = RunDirectory.create(folder, "simulated")
        self.spec = spec
        self.fate = fate
        self.view = View()
        self.drivers = 0
        self.starts: list[DriverStart] = []
        self._actors: list[Actor] = []

    def play(self) -> None:
        """Run to the last step, with a new driver after each death."""
        with _in_one_thread():
            asyncio.run(asyncio.wait_for(self._play(), LIMIT_S))

    async def _play(self) -> None:
        start = DriverStart()
        while not await self._drive(start):
            start = prepare(self.run, self.spec, None, "", without_journal=False).carry_out(self.run)

    async def _drive(self, start: DriverStart) -> bool:
        """Run one driver. True if it reached the end."""
        self.drivers += 1
        self.starts.append(start)
        self.fate.driver.clear()
        before = asyncio.all_tasks()
        orchestrator = await self._start(start)
        nodes.why_gone = self._cluster.why_gone
        running = asyncio.create_task(orchestrator.run())
        dying = asyncio.create_task(self.fate.driver.wait())
        await asyncio.wait([running, dying], return_when=asyncio.FIRST_COMPLETED)
        finished = running.done()
        if finished:
            running.result()
        else:
            running.cancel()
            await asyncio.wait([running])
            if self.fate.random.random() < self.fate.interrupts:
                await _save_before_leaving(orchestrator, Reporter(self.recorder, self.view))
        dying.cancel()
        for actor in self._actors:
            actor.die()
        kill(self.buffer)
        left = asyncio.all_tasks() - before
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self.recorder.update(phase="finished" if finished else "interrupted")
        assert self.recorder.close() == ""
        return finished

    async def _start(self, start: DriverStart) -> Orchestrator:
        spec, run = self.spec, self.run
        self.recorder = Recorder(run, self.view.warn)
        reporter = Reporter(self.recorder, self.view)

        async def record(kind: str, part: str, message: str) -> None:
            await buffer.failed(kind, part, message)

        budget = RestartBudget(1000, record, lambda text: None)
        buffer, opening = await SimulatedBuffer.open(
            run.path / FILE, BufferSettings.from_spec(spec), start.kind, start.note, start.base, limit_s=600.0
        )
        buffer.fate, self.buffer = self.fate, buffer
        hosts = StandInHosts(budget)
        hosts.works = self._agent_works
        ranks = TrainerRanks(
            lambda group, rank: self._noted(Rank(self.fate, hosts, spec, rank)),
            ReadyGroup("the trainer", spec.trainer.ranks),
            Path(),
            600.0,
            lambda text: None,
            share=lambda batch: batch,
        )
        await ranks.preload()
        await ranks.start(start.checkpoint and start.checkpoint.folder)
        dog = watchdog(600.0, reporter.warn)

        def make(name: str, node: str, started: bool) -> Process:
            def actor() -> Any:
                return self._noted(Engine(self.fate, hosts, node))

            return Process(self.fate, name=name, make_actor=actor, budget=budget, node=node, started=started)

        cluster = self._cluster = Cluster(self.fate, make)
        processes: list[Any] = [
            cluster.engine(f"engine-{index}", started=True) for index in range(spec.rollout.min_engines)
        ]
        client = client_of(spec, processes, Encoder().decode, dog.progress, buffer.note_request)
        scorer: Any = Scorer()
        encoder, data = Encoder(), prompts(PROMPTS)
        held_out = [(prompt, encoder.encode_with_images(prompt)) for prompt in data[:2]]
        evaluator = Evaluator(
            spec,
            write=run.write_text,
            client=client,
            buffer=buffer,
            reporter=reporter,
            opening=opening,
            held_out=HeldOut(held_out, scorer),
            sets={name: HeldOut(held_out, scorer) for name in spec.evaluation.sets},
        )
        return Orchestrator(
            spec=spec,
            opening=opening,
            checkpoint_step=start.checkpoint.step if start.checkpoint else 0,
            run_directory=run,
            buffer=buffer,
            ranks=ranks,
            replicas=hosts.replicas,
            client=client,
            make_engine=cluster.engine,  # type: ignore[arg-type]
            scoring=scorer,
            prompts=PromptSource(
                loader_of(spec),
                encoder,  # type: ignore[arg-type]
                opening.waiting,
            ),
            episodes=None,
            evaluator=evaluator,
            reporter=reporter,
            budget=budget,
            watchdog=dog,
        )

    async def _agent_works(self, agent: StandInAgent) -> None:
        for _ in range(self.fate.random.randint(0, 5)):
            await asyncio.sleep(0)
        self.fate.pass_by()
        if self.fate.strikes("agent", 0.05):
            agent.die()
            await asyncio.sleep(0)

    def _noted(self, actor: Any) -> Any:
        self._actors.append(actor)
        return actor


@contextmanager
def _in_one_thread() -> Iterator[None]:
    async def here(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    with (
        patch("asyncio.to_thread", here),
        patch("ray.kill", Actor.die),
        patch("asyncrl_cli.journal.buffer.LAZY_S", 0.0),
        patch("asyncrl_cli.journal.buffer.Disk", Here),
        patch("asyncrl_cli.orchestrator.rollout_scheduler.ADMIT_S", 0.0),
        patch("asyncrl_cli.rollout.client.PAUSE_SHARE", 0.0),
        patch("asyncrl_cli.rollout.client.MOST_LOSSES", 10**9),  # they die more often than any request's tokens come
        patch("asyncrl_cli.orchestrator.trainer_recovery.GUARD_S", 0.0),
        patch("asyncrl_cli.orchestrator.publisher.RETRY_S", 0.0),
        patch("asyncrl_cli.orchestrator.publisher.GUARD_S", 0.0),
        patch("asyncrl_cli.orchestrator.engine_pool.LOOK_S", 0.0),
        patch("asyncrl_cli.orchestrator.nodes.LOOK_S", 0.0),
        patch("asyncrl_cli.orchestrator.engine_pool.RETRY_S", 0.0),
        patch("asyncrl_cli.orchestrator.nodes.why_gone"),  # each driver sets it
        patch("asyncrl_cli.runs.checkpoints.sync", lambda path: None),
        patch("asyncrl_cli.core.files.sync", lambda path: None),
    ):
        yield
