"""Which weights a real vLLM engine serves: transformers recomputes every token's log-prob with the version that the
engine reports for it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl_cli.records.generation import Rollout, RolloutRequest, Sampling
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.weights.layout import TensorSlot, plan_slots
from asyncrl_cli.weights.mapped import MappedReplica
from asyncrl_cli.weights.replica import Replica
from tests.small_models import UNTRAINED

from .conftest import Runs

pytestmark = pytest.mark.stack

TOLERANCE = 1e-4
"""Nats, in fp32 (the project's limit; the actual difference is near 1e-6)."""


class Bench:
    """A real engine, and the models of all versions that it has received."""

    def __init__(self, spec: Any, folder: Path) -> None:
        from asyncrl_cli.rollout.engine import Engine

        self._spec = spec
        self._folder = folder
        self.build()
        self.models: dict[int, Any] = {}
        self.slots = self.layout(self.make())
        self.replica = Replica(self.slots, ranks=1)
        self._mapped = MappedReplica(self.slots)
        self.engine = Engine(spec, str(folder))
        self._requests = 0

    def build(self) -> None:
        """Write the initial model's folder."""
        from asyncrl_cli.train.model.initial import build_initial_model

        build_initial_model(self._spec.model.init, self._spec.model.max_length, self._spec.seed, self._folder)

    def make(self) -> Any:
        """The initial model, to which each version adds noise."""
        return self._load()

    def _load(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()

    def layout(self, model: Any) -> tuple[TensorSlot, ...]:
        """The tensors of a publish."""
        return plan_slots((name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters())

    def published(self, model: Any) -> dict[str, torch.Tensor]:
        """The same tensors of a model, by their names in ``layout``."""
        return dict(model.named_parameters())

    async def publish(
        self, version: int, policy: str, endless: bool = False, prepared: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Give the engine new random weights as ``version``. With ``endless`` they never prefer the end token.

        ``prepared`` is awaited when the engine has prepared them, before its pause: rollouts that begin then are not
        finished at the pause, however long the preparation takes.
        """
        generator = torch.Generator().manual_seed(version)
        model = self.make()
        parameters = self.published(model)
        path = self.replica.begin(version)
        with torch.no_grad(), self._mapped.open(path, version) as tensors:
            for name, target in tensors.items():
                noise = torch.randn(target.shape, generator=generator)
                parameters[name].add_(noise, alpha=0.05)
                if endless and name.endswith("embed_tokens.weight"):  # also used by the output layer
                    parameters[name][model.config.get_text_config().eos_token_id] = 0.0
                target.copy_(parameters[name])
        self.models[version] = model
        prepare = self.engine._prepare

        async def prepare_first(*arguments: Any) -> None:
            await prepare(*arguments)
            if prepared is not None:
                await prepared()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine, "_prepare", prepare_first)
            await self.engine.update_weights(version, path, self.slots, policy)
        self.path = path

    def end(self) -> None:
        """Kill vLLM's core, as a run does on CPUs. A core that is asked to end takes five seconds."""
        self.engine._vllm.shutdown(timeout=0)

    async def generate(self, prompt: list[int], tokens: int) -> Rollout:
        self._requests += 1
        sampling = Sampling(temperature=1.0, max_tokens=tokens, seed=self._requests)
        return await self.engine.generate(RolloutRequest(str(self._requests), tuple(prompt), sampling))

    def recomputed(self, rollout: Rollout, version: int) -> np.ndarray:
        """Log-probs of the response with one version's weights for the whole sequence."""
        ids = torch.from_numpy(rollout.ids.astype(np.int64))
        return self._logprobs(rollout, version).gather(1, ids[:, None])[:, 0].numpy()

    def greedy(self, rollout: Rollout, version: int) -> np.ndarray:
        """Log-probs of the most probable token of these weights at each position of the response."""
        return self._logprobs(rollout, version).amax(-1).numpy()

    def _logprobs(self, rollout: Rollout, version: int) -> torch.Tensor:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.ids.tolist()]])
        with torch.no_grad():
            logprobs = self.models[version](ids).logits[0].log_softmax(-1)
        return logprobs[len(rollout.prompt_ids) - 1 : -1]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as loops:
        yield loops.get_loop()


@pytest.fixture(scope="module")
def bench(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = started(loop, tmp_path_factory.mktemp("bench"))
    yield bench
    bench.end()


def started(loop: asyncio.AbstractEventLoop, folder: Path, kind: type[Bench] = Bench, **model: Any) -> Bench:
    """A bench with the tests' model, or with changed settings of it."""
    from asyncrl_cli.rollout.engine_settings import engine_environment
    from asyncrl_cli.rollout.vllm_core import use_as_main

    path = Runs(folder).write_spec(model=UNTRAINED | model)
    spec = load_spec(path).spec
    os.environ.update(engine_environment(spec))

    async def start() -> Bench:
        return kind(spec, folder / "model")

    with pytest.MonkeyPatch.context() as patch:
        main = sys.modules["__main__"]
        patch.setattr(main, "__spec__", main.__spec__)
        use_as_main()  # the core imports only what it needs, as in an engine's actor
        return loop.run_until_complete(start())


ATTEMPTS = 10
"""On a busy machine all rollouts may end before the engine hears of the pause."""


def crossing(bench: Bench, version: int, policy: str) -> list[Rollout]:
    """Rollouts that run while version ``version`` replaces ``version - 1``; unless it drains, some of them cross."""

    running: list[asyncio.Task[Rollout]] = []

    async def begin() -> None:
        running.extend(asyncio.create_task(bench.generate([3 + i, 40, 50], 48)) for i in range(16))
        await bench.engine.attest((3, 4, 5), 0.0)  # once a probe is answered, the rollouts are running

    async def generate() -> list[Rollout]:
        for _ in range(ATTEMPTS):
            running.clear()
            await bench.publish(version - 1, policy)
            await bench.publish(version, policy, prepared=begin)
            rollouts = list(await asyncio.gather(*running))
            if policy == "drain" or any(map(has_crossed, rollouts)):
                break
        return rollouts

    return asyncio.get_event_loop_policy().get_event_loop().run_until_complete(generate())


def has_crossed(rollout: Rollout) -> bool:
    """Whether two versions sampled its tokens."""
    return len(set(rollout.versions.tolist())) > 1


def gaps(bench: Bench, rollout: Rollout, version: int) -> np.ndarray:
    """For the tokens that ``version`` sampled, the differences to the recomputed log-probs."""
    return np.abs(bench.recomputed(rollout, version) - rollout.logprobs)[rollout.versions == version]


@pytest.mark.parametrize(("policy", "version"), [("keep", 11), ("recompute", 21), ("drain", 31)])
def test_tokens_carry_the_version_that_sampled_them(
    bench: Bench, loop: asyncio.AbstractEventLoop, policy: str, version: int
) -> None:
    asyncio.set_event_loop(loop)
    rollouts = crossing(bench, version, policy)
    assert any(map(has_crossed, rollouts)) == (policy != "drain")
    for rollout in rollouts:
        assert (np.diff(rollout.versions) >= 0).all()
        assert set(rollout.versions.tolist()) <= {version - 1, version}
        assert gaps(bench, rollout, version - 1).max(initial=0.0) < TOLERANCE
    after = max(gaps(bench, rollout, version).max(initial=0.0) for rollout in rollouts)
    if policy == "keep":
        # Keys and values of the older version are kept, so the distribution of these tokens is that of neither version.
        assert after > TOLERANCE
    else:
        assert after < TOLERANCE


def check_request_after_update(bench: Bench, loop: asyncio.AbstractEventLoop, policy: str, version: int) -> None:
    """A request after an update uses nothing of the old weights, in spite of the prefix cache."""
    prompt = [7] * 15 + [8] * 17  # a whole block of the prefix cache

    async def generate() -> Rollout:
        await bench.publish(version - 1, policy)
        await bench.generate(prompt, 8)
        await bench.publish(version, policy)
        return await bench.generate(prompt, 24)

    rollout = loop.run_until_complete(generate())
    assert set(rollout.versions.tolist()) == {version}
    assert gaps(bench, rollout, version).max() < TOLERANCE


@pytest.mark.parametrize(("policy", "version"), [("keep", 41), ("recompute", 51)])
def test_a_request_after_an_update_sees_nothing_of_the_old_weights(
    bench: Bench, loop: asyncio.AbstractEventLoop, policy: str, version: int
) -> None:
    check_request_after_update(bench, loop, policy, version)


def test_a_request_without_a_token_at_the_pause_begins_under_the_new_version(
    bench: Bench, loop: asyncio.AbstractEventLoop
) -> None:
    """It was sent under the old version, and the prefix cache has that version's keys and values of its prompt."""
    prompt = [7] * 15 + [8] * 25
    pause = bench.engine._vllm.engine_core.pause_scheduler_async
    late: list[asyncio.Task[Rollout]] = []

    async def pause_before_they_arrive(**options: Any) -> None:
        await pause(**options)
        bench.engine._loading = False  # they were sent before the pause, but the core reads them after it
        late.extend(asyncio.create_task(bench.generate(prompt, 24)) for _ in range(4))
        while len(bench.engine._vllm.output_processor.request_states) < len(late):
            await asyncio.sleep(0)
        bench.engine._loading = True

    async def generate() -> tuple[Rollout, list[Rollout]]:
        await bench.publish(45, "keep")
        running = asyncio.create_task(bench.generate(prompt, 60))
        await bench.generate(prompt, 8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.engine._vllm.engine_core, "pause_scheduler_async", pause_before_they_arrive)
            await bench.publish(46, "keep")
        return await running, await asyncio.gather(*late)

    _, rollouts = loop.run_until_complete(generate())
    for rollout in rollouts:
        assert set(rollout.versions.tolist()) == {46}
        assert gaps(bench, rollout, 46).max() < TOLERANCE


def test_a_probe_does_not_wait_for_a_rollout_of_a_full_engine(bench: Bench, loop: asyncio.AbstractEventLoop) -> None:
    slots = bench.engine._slots._value

    async def probe() -> set[asyncio.Task[Any]]:
        await bench.publish(55, "keep", endless=True)
        sampling = Sampling(temperature=0.01, max_tokens=60, seed=0)  # it never prefers the end token
        requests = [RolloutRequest(f"full-{index}", (3, 40, 50), sampling) for index in range(slots)]
        running = {asyncio.create_task(bench.engine.generate(request)) for request in requests}
        while bench.engine._occupancy.requests < slots:
            await asyncio.sleep(0)
        attesting = asyncio.create_task(bench.engine.attest((3, 4, 5), 0.0))
        first_done, _ = await asyncio.wait({attesting, *running}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*running)
        return first_done - {attesting}

    assert not loop.run_until_complete(probe())


def test_an_update_is_prepared_while_the_engine_generates(bench: Bench, loop: asyncio.AbstractEventLoop) -> None:
    """Nothing of it is served before the update, and weights that are prepared but not used have no effect."""

    async def publish() -> Rollout:
        await bench.publish(65, "recompute")
        served = bench.path
        path = bench.replica.begin(66)
        with bench._mapped.open(path, 66) as tensors:
            for tensor in tensors.values():
                tensor.fill_(0.5)
        rpc = bench.engine._vllm.collective_rpc
        await rpc("prepare_weights", args=(66, path, b"\0nobody"))
        while not (await rpc("weights_prepared"))[0]:
            await asyncio.sleep(0)
        between = await bench.generate([3, 40, 50], 16)
        await bench.engine.update_weights(65, served, bench.slots, "recompute")
        after = await bench.generate([3, 40, 50], 16)
        assert gaps(bench, after, 65).max() < TOLERANCE
        return between

    between = loop.run_until_complete(publish())
    assert gaps(bench, between, 65).max() < TOLERANCE


def check_tokens_in_a_crowd(bench: Bench, loop: asyncio.AbstractEventLoop, version: int) -> None:
    """The same seed gives the same tokens and log-probs alone and next to other requests."""

    async def generate(crowd: int) -> Rollout:
        others = [asyncio.create_task(bench.generate([9, i + 3], 40)) for i in range(crowd)]
        sampling = Sampling(temperature=1.0, max_tokens=40, seed=1234)
        rollout = await bench.engine.generate(RolloutRequest(f"same-{crowd}", (3, 4, 5), sampling))
        await asyncio.gather(*others)
        return rollout

    loop.run_until_complete(bench.publish(version, "recompute"))
    alone, crowded = loop.run_until_complete(generate(0)), loop.run_until_complete(generate(40))
    assert alone.ids.tolist() == crowded.ids.tolist()
    assert np.array_equal(alone.logprobs, crowded.logprobs)


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd(
    bench: Bench, loop: asyncio.AbstractEventLoop
) -> None:
    check_tokens_in_a_crowd(bench, loop, 80)
