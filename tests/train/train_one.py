"""The program of test_engine.py: trains `stop.steps` on made-up rollouts with one setting after the other.

The result has the weights and the last step's metrics for each setting.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pictures import IMAGE_TOKENS, picture
from ranks import Rank

from asyncrl_cli.records.experts import UNKNOWN, Experts
from asyncrl_cli.records.generation import CONTEXT, Rollout
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.training import TrainingBatch, TrainingGroup
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.deepspeed_engine import start_engine
from asyncrl_cli.train.model.lora import full_weights, gathered


def sequence(rng: np.random.Generator, name: str, step: int, prompt: tuple[int, ...], episode: bool) -> Rollout:
    """One sequence. In an episode it begins with the prompt, and has more given tokens at random positions."""
    length = int(rng.integers(2, 30))
    versions = np.full(length, step, np.int32)
    ids = rng.integers(3, 90, length).astype(np.int32)
    if episode:
        versions[rng.random(length) < 0.5] = versions[0] = CONTEXT
        ids, versions = np.append(np.int32(prompt), ids), np.append(np.full(len(prompt), CONTEXT, np.int32), versions)
    return Rollout(
        rollout_id=name,
        prompt_ids=() if episode else prompt,
        ids=ids,
        logprobs=rng.uniform(-6, -3, len(ids)).astype(np.float32),
        versions=versions,
        text="",
        finish_reason="stop",
    )


def batch(step: int, groups: int) -> TrainingBatch:
    """Rollouts of random tokens, lengths and rewards, some of them episodes; the same at every call.

    The rollouts of a group have the same prompt, and so does a branch.
    """
    rng = np.random.default_rng(step)
    made = []
    for group_id in range(groups):
        rollouts = []
        prompt = tuple(rng.integers(3, 90, 8).tolist())
        for index in range(8):
            one = sequence(rng, f"{group_id}-{index}", step, prompt, episode=index % 3 == 2)
            if index == 5:
                one = replace(one, branches=(sequence(rng, f"{group_id}-{index}.1", step, prompt, episode=True),))
            rollouts.append(one)
        rewards = tuple(rng.integers(0, 2, 8).astype(float).tolist())
        made.append(TrainingGroup(group_id, "uid", version=step, rollouts=tuple(rollouts), rewards=rewards))
    return TrainingBatch(step, step, tuple(made))


def routed(batch: TrainingBatch, layers: int, experts: int) -> TrainingBatch:
    """The same with recorded experts: two different ones for every token and layer, unknown for some tokens."""
    rng = np.random.default_rng(batch.step)

    def rows(tokens: int) -> Experts:
        chosen = rng.random((tokens, layers, experts)).argsort(-1)[..., :2].reshape(tokens, 2 * layers)
        return np.where(rng.random((tokens, 1)) < 0.2, UNKNOWN, chosen).astype(np.uint8)

    def of(rollout: Rollout) -> Rollout:
        given, branches = rows(len(rollout.prompt_ids)), tuple(map(of, rollout.branches))
        return replace(rollout, experts=rows(len(rollout.ids)), prompt_experts=given, branches=branches)

    groups = (replace(group, rollouts=tuple(map(of, group.rollouts))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def shown(batch: TrainingBatch, token: int) -> TrainingBatch:
    """The same with an image, of placeholders ``token``, in the prompts of half of the groups; and one in a branch."""
    groups = []
    for group in batch.groups:
        rollouts = list(group.rollouts)
        if group.group_id % 2:
            image, placeholders = picture(group.group_id), (token,) * IMAGE_TOKENS
            for index, one in enumerate(rollouts):
                if one.prompt_ids:
                    ids = (*one.prompt_ids[:3], *placeholders, *one.prompt_ids[3:])
                    rollouts[index] = replace(one, prompt_ids=ids, images=(PlacedImage(image, 3, IMAGE_TOKENS),))
        groups.append(replace(group, rollouts=tuple(rollouts)))
    return replace(batch, groups=tuple(groups))


def no_numactl() -> None:
    raise AssertionError("DeepSpeed runs numactl, for every micro-batch")


def main(rank: Rank) -> list[dict[str, Any]]:
    from deepspeed.utils import numa

    from asyncrl_cli.train.model.initial import build_initial_model

    numa.get_numa_cores = no_numactl
    models = [spec.model.path or spec.model.model_dump_json(include={"init", "max_length"}) for spec in rank.specs]
    folders = {model: Path(f"{rank.out}.model-{models.index(model)}") for model in models}
    for spec, model in zip(rank.specs, models, strict=True):
        if spec.model.init is None:
            folders[model] = Path(model)
        elif not folders[model].exists():
            build_initial_model(spec.model.init, spec.model.max_length, spec.seed, folders[model])
    rank.join()
    return [train(spec, str(folders[model]), rank.number) for spec, model in zip(rank.specs, models, strict=True)]


def train(spec: ExperimentSpec, folder: str, rank: int) -> dict[str, Any]:
    from asyncrl_cli.train.algorithms.objective import Objective
    from asyncrl_cli.train.deepspeed_engine import start_critic
    from asyncrl_cli.train.model.reference import load_reference
    from asyncrl_cli.train.nonfinite_guard import SkipLimit
    from asyncrl_cli.train.precompute import Learner
    from asyncrl_cli.train.step import train_batch

    engine = start_engine(spec, folder)
    learner = Learner(
        spec,
        rank,
        Objective.of(spec.algorithm, Path(__file__).parent),
        engine,
        SkipLimit(0),
        load_reference(spec, folder, engine),
        start_critic(spec, folder) if spec.algorithm.needs_critic else None,
        engine.module.vision,
    )
    for step in range(spec.stop.steps):
        rollouts = batch(step, spec.pipeline.groups_per_step)
        if spec.algorithm.router_replay:
            config = engine.module.model.config
            rollouts = routed(rollouts, config.num_hidden_layers, config.num_experts)
        if spec.model.max_images:
            rollouts = shown(rollouts, engine.module.model.config.image_token_id)
        report = train_batch(learner, rollouts)
    named = list(engine.module.model.named_parameters())
    if spec.trainer.expert_parallel > 1:  # the model's own names
        state = {weight.name: weight.merged().clone() for weight in full_weights(engine.module.model, 3)}
    else:
        with gathered([parameter for _, parameter in named], spec.trainer.zero_stage):
            state = {name: parameter.detach().clone() for name, parameter in named}
    engine.destroy()
    return {"weights": state, "metrics": report.metrics}
