"""Images on real vLLM: transformers recomputes every token's log-prob with the engine's tokens and places."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl_cli.data.images import ImageTokens
from asyncrl_cli.records.generation import Rollout, RolloutRequest, Sampling, Segment
from asyncrl_cli.records.images import Image, PlacedImage
from asyncrl_cli.rollout.continuation import Aborted
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.weights.layout import TensorSlot, plan_slots
from tests.data.pictures import picture
from tests.e2e.conftest import Runs
from tests.e2e.test_weights import TOLERANCE, Bench
from tests.small_models import write_image_model

pytestmark = [pytest.mark.stack, pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is missing")]

RED, BLUE, GREEN = (Image.from_bytes(picture(colour, width=112)) for colour in ("red", "blue", "green"))
TEXT = "look at @ and at @. which?"
TOKENS = 40
IMAGE_MARKS = ("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
"""Stand for an image in the chat templates of Qwen's models and of Gemma 3."""


class VisionBench(Bench):
    """A real engine of a vision-language model."""

    def build(self) -> None:
        from transformers import AutoConfig, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(self._folder)
        self.placeholder = AutoConfig.from_pretrained(self._folder).image_token_id
        self.mark = next(mark for mark in IMAGE_MARKS if mark in self.processor.tokenizer.chat_template)
        self.tokens = ImageTokens(str(self._folder), max_images=2, max_pixels=2**20)

    def _load(self) -> Any:
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_pretrained(self._folder, dtype=torch.float32).eval()

    def request(self, name: str, *images: Image, seed: int = 0, tokens: int = TOKENS) -> RolloutRequest:
        ids, places = self.tokens.encode(TEXT.replace("@", self.mark), images)
        return RolloutRequest(name, tuple(ids), Sampling(1.0, tokens, seed), images=places)

    def layout(self, model: Any) -> tuple[TensorSlot, ...]:
        return plan_slots((name, p.dtype, tuple(p.shape)) for name, p in self.published(model).items())

    def published(self, model: Any) -> dict[str, torch.Tensor]:
        # transformers drops a part of the names in published checkpoints of Gemma 3 when it loads one.
        long = "vision_tower.vision_model." if model.config.model_type == "gemma3" else "vision_tower."
        return {name.replace("vision_tower.", long): p for name, p in model.named_parameters()}

    def gap(self, rollout: Rollout, request: RolloutRequest, version: int) -> float:
        """The largest difference to the log-probs of one version's weights, in nats."""
        return float(np.abs(self.recomputed_with(rollout, request, version) - rollout.logprobs).max())

    def recomputed_with(self, rollout: Rollout, request: RolloutRequest, version: int) -> np.ndarray:
        """Log-probs of the response with the request's images and one version's weights for the whole sequence."""
        ids = torch.tensor([[*request.prompt_ids, *rollout.ids.tolist()]])
        logprobs = self._logits(ids, request.images, version).log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        return logprobs.gather(1, torch.from_numpy(rollout.ids.astype(np.int64))[:, None])[:, 0].numpy()

    def _logits(self, ids: torch.Tensor, images: tuple[PlacedImage, ...], version: int) -> torch.Tensor:
        model = self.models[version]
        pixels = self.processor.image_processor([one.image.decoded() for one in images], return_tensors="pt")
        inputs = {name: pixels[name] for name in ("pixel_values", "image_grid_thw") if name in pixels}
        at_images = torch.zeros_like(ids)
        for one in images:
            at_images[0, one.offset : one.offset + one.length] = 1
        if "image_grid_thw" in inputs:  # Gemma 3's placeholders see each other only where vLLM runs on GPUs
            inputs["mm_token_type_ids"] = at_images
        text = torch.where((ids == self.placeholder) & (at_images == 0), 0, ids)  # a sampled placeholder is text

        def embed_true_ids(layer: Any, arguments: Any) -> Any:
            return (ids if torch.equal(arguments[0], text) else arguments[0],)

        hook = model.get_input_embeddings().register_forward_pre_hook(embed_true_ids)
        try:
            with torch.no_grad():
                return model(input_ids=text, **inputs).logits[0]
        finally:
            hook.remove()


def started(loops: asyncio.Runner, folder: Path, architecture: str) -> VisionBench:
    write_image_model(architecture, folder / "model")
    model = {"path": str(folder / "model"), "max_length": 256, "max_images": 2}
    spec = load_spec(Runs(folder).write_spec(model=model, rollout={"max_running_rollouts": 8})).spec

    async def start() -> VisionBench:
        return VisionBench(spec, folder / "model")

    return loops.run(start())


@pytest.fixture(scope="module")
def bench(loops: asyncio.Runner, forked_cores: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionBench]:
    bench = started(loops, tmp_path_factory.mktemp("images"), "qwen2_5_vl")
    yield bench
    bench.engine.shutdown()


def test_image_rollouts_have_the_logprobs_of_transformers(bench: VisionBench, loops: asyncio.Runner) -> None:
    compare(bench, loops)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["qwen3_vl", "gemma3"])
def test_image_rollouts_of_other_architectures_have_the_logprobs_of_transformers(
    loops: asyncio.Runner, forked_cores: None, tmp_path: Path, architecture: str
) -> None:
    bench = started(loops, tmp_path, architecture)
    try:
        compare(bench, loops)
    finally:
        bench.engine.shutdown()


def compare(bench: VisionBench, loops: asyncio.Runner) -> None:
    async def generate() -> list[tuple[RolloutRequest, Rollout]]:
        await bench.publish(1, "keep")
        # The same tokens with other images: the prefix cache and the encoder cache tell them apart.
        pairs = [(RED, RED), (RED, BLUE), (BLUE, RED), (RED, BLUE)]
        requests = [bench.request(f"{index}-0", *pair, seed=index) for index, pair in enumerate(pairs)]
        requests.append(RolloutRequest("4-0", (5, 6, 7), Sampling(1.0, TOKENS, 4)))
        return list(zip(requests, await asyncio.gather(*map(bench.engine.generate, requests)), strict=True))

    for request, rollout in loops.run(generate()):
        if request.images:
            assert bench.gap(rollout, request, 1) < TOLERANCE
            other = replace(request, images=tuple(replace(one, image=GREEN) for one in request.images))
            assert bench.gap(rollout, other, 1) > 10 * TOLERANCE


@pytest.mark.parametrize(("policy", "version"), [("keep", 11), ("recompute", 21)])
def test_image_features_come_from_the_serving_weights(
    bench: VisionBench, loops: asyncio.Runner, policy: str, version: int
) -> None:
    """A new version changes the tower: features of the old one are in the encoder cache, and must not be used."""
    long = bench.request(f"{version}-0", RED, BLUE, tokens=200)

    async def generate() -> tuple[Rollout, Rollout]:
        running: list[asyncio.Task[Rollout]] = []

        async def begin() -> None:
            running.append(asyncio.create_task(bench.engine.generate(long)))
            while not bench.engine.segments({long.rollout_id: 0}):
                await asyncio.sleep(0.005)

        await bench.publish(version - 1, policy, endless=True)
        await bench.publish(version, policy, endless=True, prepared=begin)
        return await running[0], await bench.engine.generate(bench.request(f"{version}-1", RED, BLUE))

    crossed, after = loops.run(generate())
    assert bench.gap(after, long, version) < TOLERANCE
    assert set(crossed.versions.tolist()) == {version - 1, version}
    late = crossed.versions == version
    whole = bench.recomputed_with(crossed, long, version)
    gap = np.abs(whole - crossed.logprobs)[late].max()
    assert gap < TOLERANCE if policy == "recompute" else gap > TOLERANCE


def test_image_rollout_continues_after_abort_and_weight_update(bench: VisionBench, loops: asyncio.Runner) -> None:
    request = bench.request("31-0", BLUE, RED, tokens=200)

    async def generate() -> tuple[Rollout, Rollout, Rollout]:
        await bench.publish(30, "keep", endless=True)
        undisturbed = await bench.engine.generate(request)
        task = asyncio.create_task(bench.engine.generate(request))
        while not bench.engine.segments({request.rollout_id: 0}):
            await asyncio.sleep(0.005)
        await bench.engine.abort()
        with pytest.raises(Aborted) as aborted:
            await task
        prefix = replace(request, prefix=tuple(aborted.value.segments))
        continued = await bench.engine.generate(prefix)
        await bench.publish(31, "keep", endless=True)
        return undisturbed, continued, await bench.engine.generate(prefix)

    undisturbed, continued, newer = loops.run(generate())
    assert np.array_equal(undisturbed.ids, continued.ids)
    assert np.abs(undisturbed.logprobs - continued.logprobs).max() < TOLERANCE
    assert bench.gap(continued, request, 30) < TOLERANCE
    late = newer.versions == 31
    assert late.any() and not late.all()
    assert np.abs(bench.recomputed_with(newer, request, 31) - newer.logprobs)[late].max() < TOLERANCE


def test_probe_with_an_image_has_the_logprobs_of_transformers(bench: VisionBench, loops: asyncio.Runner) -> None:
    request = bench.request("35-0", RED, BLUE)
    probe = replace(request, prompt_ids=request.prompt_ids[: request.images[0].end + 10], images=request.images[:1])

    async def attest() -> np.ndarray:
        await bench.publish(35, "keep")
        return (await bench.engine.attest(probe.prompt_ids, 0.0, probe.images)).probe_logprobs

    answer = loops.run(attest())
    after = torch.tensor(probe.prompt_ids[probe.images[0].end :])
    logprobs = bench._logits(torch.tensor([probe.prompt_ids]), probe.images, 35).log_softmax(-1)[-11:-1]
    assert len(answer) == 10
    assert np.abs(logprobs.gather(1, after[:, None])[:, 0].numpy() - answer).max() < TOLERANCE


def test_placeholder_that_the_policy_sampled_is_text(bench: VisionBench, loops: asyncio.Runner) -> None:
    request = bench.request("41-0", RED, BLUE)
    pads = np.full(5, bench.placeholder, np.int32)
    prefix = Segment("41-0", 0, 40, np.concatenate([[20], pads, [21]]).astype(np.int32), np.zeros(7, np.float32))

    async def generate() -> Rollout:
        await bench.publish(40, "keep")
        return await bench.engine.generate(replace(request, prefix=(prefix,)))

    rollout = loops.run(generate())
    gaps = np.abs(bench.recomputed_with(rollout, request, 40) - rollout.logprobs)
    assert gaps[7:].max() < TOLERANCE
