"""Unfinished rollouts on real vLLM: their segments while they run, and how they continue after an engine's death."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from asyncrl_cli.records.generation import Rollout, RolloutRequest, Sampling, Segment, TokenSequence
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.continuation import Aborted
from asyncrl_cli.rollout.worker import RolloutWorker
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import ActorDied
from asyncrl_cli.weights.manifest import ReplicaGone
from tests.e2e.conftest import Runs
from tests.e2e.test_weights import TOLERANCE, Bench
from tests.orchestrator.stand_ins import Actor, RemoteMethod, StandInProcess
from tests.small_models import UNTRAINED

pytestmark = pytest.mark.stack

LIMIT_S = 120.0
"""Seconds after which a wait for a condition fails."""
POLL_S = 0.005
"""Seconds between two looks at an engine: without a pause, they would take the CPU time that it needs."""
TOKENS = 200
LONG = 800
"""Tokens of a rollout that must not be finished when the test acts on its engine: generating them takes seconds of CPU
time, however loaded the machine is. With ``endless`` weights greedy rollouts have this length."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ExperimentSpec:
    settings = {**UNTRAINED, "max_length": LONG + 64}
    return load_spec(Runs(tmp_path_factory.mktemp("segments")).write_spec(model=settings)).spec


@contextmanager
def started(loops: asyncio.Runner, spec: ExperimentSpec, folder: Path) -> Iterator[Bench]:
    """An engine; all of them have the same models for the same versions."""

    async def start() -> Bench:
        return Bench(spec, folder)

    bench = loops.run(start())
    yield bench
    bench.engine.shutdown()


@pytest.fixture(scope="module")
def bench(
    loops: asyncio.Runner, spec: ExperimentSpec, forked_cores: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    with started(loops, spec, tmp_path_factory.mktemp("model")) as bench:
        yield bench


@pytest.fixture(scope="module")
def other(
    loops: asyncio.Runner, spec: ExperimentSpec, forked_cores: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """A second engine. The last test kills it."""
    with started(loops, spec, tmp_path_factory.mktemp("other")) as bench:
        yield bench


@pytest.fixture
def worker(spec: ExperimentSpec, tmp_path: Path, restored_output: None) -> Callable[..., RolloutWorker]:
    """Creates workers with an engine."""

    def worker_of(bench: Bench, segment_seconds: float = 0.05) -> RolloutWorker:
        journal = spec.journal.model_copy(update={"segment_seconds": segment_seconds})
        worker = RolloutWorker("engine", spec.model_copy(update={"journal": journal}), str(tmp_path))
        worker._engine = bench.engine
        return worker

    return worker_of


def request(name: str, *prefix: Segment, stop: tuple[str, ...] = (), tokens: int = TOKENS) -> RolloutRequest:
    seed = sum(name.encode())
    return RolloutRequest(name, (3 + seed % 32, 40, 50), Sampling(1.0, tokens, seed, stop), prefix)


def greedy(name: str, *prefix: Segment, stop: tuple[str, ...] = (), tokens: int = LONG) -> RolloutRequest:
    """A rollout that has this many tokens if the weights are ``endless``."""
    sampled = request(name, *prefix)
    return replace(sampled, sampling=Sampling(0.0, tokens, stop=stop))


async def until(condition: Callable[[], Any]) -> Any:
    """The first true answer of ``condition``."""
    async with asyncio.timeout(LIMIT_S):
        while not (answer := condition()):
            await asyncio.sleep(POLL_S)
    return answer


def add(taken: dict[str, list[Segment]], segments: Iterable[Segment]) -> None:
    for segment in segments:
        taken.setdefault(segment.rollout_id, []).append(segment)


def begun(bench: Bench, names: Sequence[str]) -> bool:
    """Whether the engine has tokens of all these rollouts."""
    return len({segment.rollout_id for segment in bench.engine.segments(dict.fromkeys(names, 0))}) == len(names)


def begins_with(rollout: Rollout, segments: list[Segment]) -> bool:
    """Whether the segments are the rollout's first tokens, bit for bit."""
    tokens, end = TokenSequence.join(segments), segments[-1].end
    return (
        np.array_equal(tokens.ids, rollout.ids[:end])
        and np.array_equal(tokens.logprobs, rollout.logprobs[:end])
        and np.array_equal(tokens.versions, rollout.versions[:end])
    )


@pytest.mark.parametrize(
    ("policy", "version", "stop"),
    [
        ("keep", 2, ()),
        pytest.param("recompute", 4, (), marks=pytest.mark.rotating),
        pytest.param("keep", 6, ("@@@@",), marks=pytest.mark.rotating),
    ],
)
def test_segments_are_the_beginning_of_the_final_rollout(
    bench: Bench,
    loops: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    version: int,
    stop: tuple[str, ...],
) -> None:
    taken: dict[str, list[Segment]] = {}
    at_pause: dict[str, int] = {}

    def since() -> dict[str, int]:
        return {name: taken[name][-1].end if name in taken else 0 for name in names}

    def on_pause() -> None:
        add(taken, bench.engine.segments(since()))
        at_pause.update(since())

    names = [f"{version}-{number}" for number in range(8)]

    running: list[asyncio.Task[Rollout]] = []

    async def begin() -> None:
        requests = [greedy(name, stop=stop) for name in [*names, "unnamed"]]
        running.extend(asyncio.create_task(bench.engine.generate(entry)) for entry in requests)
        await until(lambda: begun(bench, names))

    async def generate() -> list[Rollout]:
        await bench.publish(version - 1, policy, endless=True)
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine, "update_weights", partial(bench.engine.update_weights, on_pause=on_pause))
            await bench.publish(version, policy, endless=True, prepared=begin)
        while not all(task.done() for task in running):
            add(taken, bench.engine.segments(since()))
            await asyncio.sleep(POLL_S)
        return list(await asyncio.gather(*running))

    rollouts = {rollout.rollout_id: rollout for rollout in loops.run(generate())}
    assert all(begins_with(rollouts[name], segments) for name, segments in taken.items())
    crossed = {name: rollout for name, rollout in rollouts.items() if len(set(rollout.versions.tolist())) == 2}
    assert set(taken) == set(names)
    assert set(crossed) >= set(names)
    assert any(len({segment.version for segment in taken[name]}) == 2 for name in names)
    for name in names:
        assert at_pause[name] == (crossed[name].versions == version - 1).sum(), "the pause delivered all old tokens"


def test_a_rollout_continues_where_another_engine_stopped(bench: Bench, loops: asyncio.Runner) -> None:
    """Interrupted anywhere, a rollout is the same, greedy or sampled; with other weights it keeps its beginning."""

    async def continued(one: Rollout, number: int) -> Rollout:
        end = len(one.ids) * number // 32
        prefix = Segment(one.rollout_id, 0, 10, one.ids[:end], one.logprobs[:end])
        return await bench.engine.generate(request(one.rollout_id, *([prefix] if end else [])))

    async def generate() -> None:
        await bench.publish(10, "keep")
        greedy = RolloutRequest("10-0", (3, 4, 5), Sampling(0.0, TOKENS))
        others = [request(f"10-{number}") for number in range(2, 34)]
        full, sampled, *beside = await asyncio.gather(
            *(bench.engine.generate(one) for one in (greedy, request("10-1"), *others))
        )
        await bench.publish(11, "recompute")
        for end in (1, 20, len(sampled.ids) - 1, len(sampled.ids)):
            prefix = Segment("10-1", 0, 10, sampled.ids[:end], sampled.logprobs[:end])
            again = await bench.engine.generate(request("10-1", prefix, tokens=len(sampled.ids)))
            assert begins_with(again, [prefix])
            assert set(again.versions[end:].tolist()) <= {11}
            assert len(again.ids) <= len(sampled.ids)
            assert again.text == bench.engine._decode(again.ids)
            gaps = np.abs(bench.recomputed(again, 11) - again.logprobs)[end:]
            assert gaps.max(initial=0.0) < TOLERANCE
            if len(again.ids) == end:
                assert again.finish_reason == "length"
        await bench.publish(10, "recompute")
        for end in (1, 17, len(full.ids) - 1):
            prefix = Segment("10-0", 0, 10, full.ids[:end], full.logprobs[:end])
            again = await bench.engine.generate(RolloutRequest("10-0", (3, 4, 5), greedy.sampling, (prefix,)))
            assert again.ids.tolist() == full.ids.tolist()
            assert (again.text, again.finish_reason) == (full.text, full.finish_reason)
            assert np.abs(again.logprobs - full.logprobs).max() < TOLERANCE
        # The random numbers are the same as without interruption; log-probs differ by rounding (decision 0064).
        for one, again in zip(beside, await asyncio.gather(*map(continued, beside, range(32))), strict=True):
            assert again.ids.tolist() == one.ids.tolist()
            assert np.abs(again.logprobs - one.logprobs).max() < TOLERANCE

    loops.run(generate())


def test_a_prefix_of_a_newer_version_waits_for_that_version_without_a_slot(bench: Bench, loops: asyncio.Runner) -> None:
    async def generate() -> Rollout:
        await bench.publish(13, "keep")
        bench.engine._slots = asyncio.Semaphore(1)
        prefix = Segment("13-0", 0, 14, np.array([7, 8], np.int32), np.zeros(2, np.float32))
        task = asyncio.create_task(bench.engine.generate(request("13-0", prefix)))
        async with asyncio.timeout(LIMIT_S):
            await bench.engine.generate(request("13-1"))
        assert not task.done() and not bench.engine.generating
        await bench.publish(14, "keep")
        bench.engine._slots = asyncio.Semaphore(64)
        return await task

    assert set(loops.run(generate()).versions.tolist()) == {14}


def test_nothing_is_generated_with_weights_that_did_not_load(
    bench: Bench, loops: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: str) -> None:
        raise RuntimeError("out of memory")

    async def check() -> None:
        await bench.publish(44, "keep", endless=True)
        names = ["44-0", "44-1"]
        running = [asyncio.create_task(bench.engine.generate(greedy(name))) for name in names]
        await until(lambda: begun(bench, names))
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine._vllm, "finish_weight_update", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                await bench.publish(45, "keep", endless=True)
        made = bench.engine.sampled_tokens()
        for _ in range(50):  # vLLM's core answers these between two steps
            await bench.engine._vllm.collective_rpc("weights_prepared")
        assert bench.engine.sampled_tokens() == made
        await bench.engine.abort()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, Aborted), ended
            assert {segment.version for segment in ended.segments} == {44}
        assert bench.engine.sampled_tokens() == made
        await bench.engine._vllm.finish_weight_update("45")
        await bench.publish(46, "keep", endless=True)
        assert len((await bench.engine.generate(greedy("46-0", tokens=TOKENS))).ids) == TOKENS

    loops.run(check())


def test_an_engine_continues_when_the_memory_of_a_version_is_gone_before_the_pause(
    bench: Bench, loops: asyncio.Runner, worker: Callable[..., RolloutWorker]
) -> None:
    async def check() -> None:
        await bench.publish(47, "keep", endless=True)
        one = worker(bench)
        gone = f"/proc/{2**30}/fd/3"  # as of an agent that has died
        with pytest.raises(ReplicaGone, match="the memory of weight version 48 is gone"):
            await one.update_weights(48, gone, bench.engine._layout, "keep", (1, 2, 3))
        assert (await one.collect(0.0)).activity.paused_s == 0.0
        rollout = await bench.engine.generate(greedy("47-0", tokens=TOKENS))
        assert set(rollout.versions.tolist()) == {47}
        await bench.publish(49, "keep", endless=True)

    loops.run(check())


@pytest.mark.parametrize(
    ("one", "joined"),
    [
        (greedy("50-0", tokens=TOKENS), True),
        (replace(greedy("51-0", tokens=TOKENS), streamed=True), False),
    ],
)
def test_tokens_that_are_not_read_yet_come_together(
    bench: Bench, loops: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, one: RolloutRequest, joined: bool
) -> None:
    """vLLM's front end gets one record for several tokens of a rollout, or one for each token."""
    records: list[int] = []
    process = bench.engine._vllm.output_processor.process_outputs

    def counted(outputs: list[Any], *arguments: Any, **named: Any) -> Any:
        records.extend(len(output.new_token_ids) for output in outputs)
        return process(outputs, *arguments, **named)

    async def generate() -> Rollout:
        await bench.publish(int(one.rollout_id[:2]), "keep", endless=True)
        monkeypatch.setattr(bench.engine._vllm.output_processor, "process_outputs", counted)
        return await bench.engine.generate(one)

    rollout = loops.run(generate())
    assert sum(records) == len(rollout.ids) == TOKENS
    assert (len(records) < TOKENS) == joined


class LocalEngine(Actor):
    """A worker in this process, which is called like an actor."""

    def __init__(self, worker: RolloutWorker) -> None:
        super().__init__()
        self._worker = worker

    def __getattr__(self, method: str) -> RemoteMethod:
        return RemoteMethod(self, getattr(self._worker, method))


def test_requests_survive_aborts_and_new_weights(
    bench: Bench, other: Bench, loops: asyncio.Runner, worker: Callable[..., RolloutWorker]
) -> None:
    """Six requests, two engines that run two each, two pauses in the middle, and other weights after each."""

    async def check() -> None:
        benches = [bench, other]
        for one in benches:
            one.engine._slots = asyncio.Semaphore(2)
        await asyncio.gather(*(one.publish(50, "drain", endless=True) for one in benches))
        engines = [StandInProcess(f"engine-{n}", partial(LocalEngine, worker(one))) for n, one in enumerate(benches)]
        client = GenerationClient(engines, slots=2, retries=0, hang_s=LIMIT_S, decode=bench.engine._decode)
        for engine in client.engines:
            engine.serving = True
        received: dict[str, list[Segment]] = {}
        names = [f"50-{number}/0" for number in range(6)]
        asked = [greedy(name, tokens=2 * TOKENS) for name in names]
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(LIMIT_S):
            collectors = [tasks.create_task(client.collect(engine)) for engine in client.engines]
            answers = [tasks.create_task(client.generate(one, partial(add, received))) for one in asked]
            for version in (51, 52):
                for one in benches:  # both have running requests
                    await until(lambda one=one: one.engine.segments(dict.fromkeys(names, 0)))
                await client.pause()
                made = [one.engine.sampled_tokens() for one in benches]
                await asyncio.gather(*(one.publish(version, "drain", endless=True) for one in benches))
                assert [one.engine.sampled_tokens() for one in benches] == made
                await client.resume()
            await asyncio.wait(answers)
            for collector in collectors:
                collector.cancel()
        rollouts = [answer.result() for answer in answers]
        for rollout in rollouts:
            assert (len(rollout.ids), rollout.finish_reason) == (2 * TOKENS, "length")
            assert rollout.text == bench.engine._decode(rollout.ids)
            assert np.array_equal(rollout.versions, np.sort(rollout.versions))
            parts = received.get(rollout.rollout_id, [])
            assert not parts or begins_with(rollout, parts)
            for version in set(rollout.versions.tolist()):
                where = rollout.versions == version
                assert np.abs(bench.recomputed(rollout, version) - rollout.logprobs)[where].max() < TOLERANCE
                assert np.abs(bench.greedy(rollout, version) - rollout.logprobs)[where].max() < TOLERANCE
        assert sum(len(set(rollout.versions.tolist())) > 1 for rollout in rollouts) >= 4
        assert {version for rollout in rollouts for version in rollout.versions.tolist()} == {50, 51, 52}
        for one in benches:
            one.engine._slots = asyncio.Semaphore(64)

    loops.run(check())


@asynccontextmanager
async def stopped_core(bench: Bench) -> AsyncIterator[psutil.Process]:
    """The engine's core process, suspended by SIGSTOP; it continues afterwards, if it still lives."""
    (process,) = bench.engine._vllm.engine_core.resources.engine_manager.processes
    core = psutil.Process(process.pid)
    core.send_signal(signal.SIGSTOP)
    try:
        yield core
    finally:
        if core.is_running():
            core.send_signal(signal.SIGCONT)


def test_rollouts_survive_the_death_of_their_engine(
    bench: Bench, other: Bench, loops: asyncio.Runner, worker: Callable[..., RolloutWorker]
) -> None:
    async def check() -> None:
        await asyncio.gather(*(one.publish(30, "recompute", endless=True) for one in (other, bench)))
        names = [f"30-{number}" for number in range(16)]
        first = worker(other, segment_seconds=3600.0)

        async def begin() -> None:
            await first.submit([greedy(name) for name in names])
            await until(lambda: begun(other, names))

        await other.publish(31, "keep", endless=True, prepared=begin)
        await until(lambda: any(one.version == 31 for one in other.engine.segments(dict.fromkeys(names, 0))))
        async with stopped_core(other) as core:
            held = other.engine.segments(dict.fromkeys(names, 0))
            core.kill()
        saved: dict[str, list[Segment]] = {}

        async def collect_all() -> None:
            async with asyncio.timeout(LIMIT_S):
                while delivery := await first.collect(1.0):
                    assert not delivery.failures and not delivery.rollouts
                    add(saved, delivery.segments)

        with pytest.raises(ActorDied, match="core process has died: it was killed"):
            await collect_all()
        assert {segment.rollout_id for segment in held} == set(saved) == set(names)
        assert {segment.version for segment in held} == {30, 31}
        for segment in held:
            assert saved[segment.rollout_id][-1].end >= segment.end

        await bench.publish(31, "recompute", endless=True)
        second = worker(bench)
        await second.submit([greedy(name, *saved[name], tokens=saved[name][-1].end + 20) for name in names])
        rollouts: list[Rollout] = []
        generated = 0
        async with asyncio.timeout(LIMIT_S):
            while len(rollouts) < len(names):
                delivery = await second.collect(1.0)
                rollouts += delivery.rollouts
                generated += delivery.activity.generated_tokens
        for delivered in rollouts:
            rollout = replace(delivered, prompt_ids=greedy(delivered.rollout_id).prompt_ids)
            prefix = saved[rollout.rollout_id]
            end = prefix[-1].end
            assert len(rollout.ids) == end + 20 and begins_with(rollout, prefix)
            assert set(rollout.versions[end:].tolist()) == {31}
            gaps = np.abs(bench.recomputed(rollout, 31) - rollout.logprobs)[end:]
            assert gaps.max(initial=0.0) < TOLERANCE
        assert generated == 20 * len(names)

    loops.run(check())
