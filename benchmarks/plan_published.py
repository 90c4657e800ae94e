"""`asyncrl plan`'s model compared with NeMo-RL's published step times: fitted to colocated rows, it predicts others.

    python benchmarks/plan_published.py

Rows: docs/about/performance-summary.md of NVIDIA-NeMo/RL, v0.4, DGX-H100, bf16, GRPO. Half of the GPUs of a separated
row generate (its recipes). Prompts of 100 tokens and the spread of lengths are assumed. Fitted to colocated rows only:
how much slower decoding is than estimated from the data sheet, and the MFU of dense models, both from the
two dense rows; and an MFU for each mixture of experts, from its own row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import exp, log

from asyncrl_cli.plan.costs import Costs, EngineCost, Overheads, TrainerCost
from asyncrl_cli.plan.guess import Shape, engine_cost, publish_cost, training_flops, training_share
from asyncrl_cli.plan.lengths import LengthModel
from asyncrl_cli.plan.simulator import Scenario, simulate
from asyncrl_cli.records.groups import BufferSettings
from asyncrl_cli.train.flops import GPUS

GPU = GPUS["h100"]
MEMORY = 85e9
SPREAD = 0.4
PROMPT = 100
GROUP = 32
PASSES = 5.0
"""Passes: forward, backward, and one each for the log-probs of the policy and of the reference."""

DENSE_CACHE = 2 * 2 * 8 * 128  # bytes of a token in a layer: keys and values of 8 heads of 128, bf16
SHAPES = {
    "Llama 3.1 8B": Shape(8.03e9, 7.5e9, 32, 32 * 128, 32 * DENSE_CACHE),
    "Qwen3-32B": Shape(32.8e9, 32.0e9, 64, 64 * 128, 64 * DENSE_CACHE),
    "Qwen3-30B-A3B": Shape(30.5e9, 3.0e9, 48, 32 * 128, 24 * DENSE_CACHE, experts=29e9, chosen=8 / 128),
    "Qwen3-235B-A22B": Shape(235e9, 21.4e9, 94, 64 * 128, 47 * DENSE_CACHE, experts=227e9, chosen=8 / 128),
    "DeepSeek-V3": Shape(671e9, 37e9, 61, 128 * 128, 61 * 2 * 576, experts=653e9, chosen=8 / 256),
}


@dataclass(frozen=True)
class Published:
    """A row: longest and mean sequence, GPUs, rollouts, sequences of an update, GPUs of an engine, seconds."""

    model: str
    longest: int
    mean: int
    gpus: int
    rollouts: int
    update: int
    engine_gpus: int
    step_s: float


COLOCATED = (
    Published("Llama 3.1 8B", 4096, 1060, 16, 2048, 512, 1, 97.7),
    Published("Qwen3-32B", 4096, 3206, 32, 2048, 512, 4, 393),
    Published("Qwen3-30B-A3B", 4096, 3154, 32, 2048, 512, 4, 225),
    Published("Qwen3-235B-A22B", 8192, 5671, 128, 512, 512, 16, 506),
    Published("DeepSeek-V3", 1536, 745, 256, 512, 512, 32, 154),
)
SEPARATED = (
    Published("Llama 3.1 8B", 4096, 1129, 16, 2048, 512, 1, 74.6),
    Published("Qwen3-32B", 4096, 3207, 64, 2048, 512, 4, 215),
    Published("Qwen3-30B-A3B", 4096, 3158, 32, 2048, 512, 2, 244),
    Published("Qwen3-235B-A22B", 8192, 5691, 256, 512, 512, 8, 241),
    Published("DeepSeek-V3", 1536, 744, 512, 512, 512, 32, 77.9),
)


def step_s(row: Published, separated: bool, mfu: float, slower: float) -> float:
    """Simulated seconds of a step; decoding takes ``slower`` times the estimate from data sheets."""
    shape = SHAPES[row.model]
    groups = LengthModel(row.mean - PROMPT, SPREAD, row.longest - PROMPT, PROMPT).groups(256, GROUP)
    gpus = row.gpus // 2 if separated else row.gpus
    engines = gpus // row.engine_gpus
    room = 0.8 * row.engine_gpus * MEMORY - 2 * shape.parameters - 3e9 * row.engine_gpus
    engine = engine_cost(shape, GPU, row.engine_gpus, int(room / shape.cache_bytes))
    guessed = engine.iteration
    engine = EngineCost(
        lambda sequences: slower * guessed(sequences),
        slower * engine.per_context_token_s,
        slower * engine.prefill_s,
        engine.kv_tokens,
    )
    flops, _ = training_flops(shape, groups, PASSES, shares=False)
    trainer = TrainerCost(row.rollouts / row.update, flops / (gpus * GPU.flops * mfu))
    costs = Costs(engine, trainer, publish_cost(shape, gpus, row.engine_gpus), Overheads(0.02, 0.1, 0.1))
    settings = BufferSettings(row.rollouts // GROUP, 1, int(separated), "wait", 0, GROUP, False)
    scenario = Scenario(settings, groups, costs, engines, -(-row.rollouts // engines))
    return simulate(scenario, 6 if separated else 3, 3 if separated else 1).step_s


def fitted_mfu(row: Published, slower: float) -> float:
    """The MFU with which a colocated row has the published time."""
    low, high = 0.001, 2.0
    for _ in range(10):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_s(row, False, middle, slower) > row.step_s else (low, middle)
    return high


def dense_fit() -> tuple[float, float]:
    """The slowdown of decoding and the MFU that fit both dense rows best (grid search with halved steps)."""

    def error(mfu: float, slower: float) -> float:
        return sum(log(step_s(row, False, mfu, slower) / row.step_s) ** 2 for row in COLOCATED[:2])

    mfu, slower, width = 0.35, 1.2, 0.4
    for _ in range(6):
        around = [(mfu * exp(a * width), slower * exp(b * width)) for a, b in product((-1, 0, 1), repeat=2)]
        best = min(around, key=lambda point: error(*point))
        width, (mfu, slower) = (width / 2 if best == (mfu, slower) else width), best
        width /= 1.3
    return mfu, slower


def main() -> None:
    """Print both tables."""
    mfu, slower = dense_fit()
    mfus = {row.model: mfu if not SHAPES[row.model].experts else fitted_mfu(row, slower) for row in COLOCATED}
    print(f"decoding takes {slower:.2f} times what data sheets say, dense MFU {mfu:.3f}\n")
    print("| model | colocated: data sheet, fitted, published | separated: data sheet, predicted, published | error "
          "| fitted MFU |\n|-|-|-|-|-|")  # fmt: skip
    errors = {}
    for together, apart in zip(COLOCATED, SEPARATED, strict=True):
        guess = training_share(SHAPES[apart.model])
        own = mfus[apart.model]
        predicted = step_s(apart, True, own, slower)
        errors[apart.model] = predicted / apart.step_s - 1
        print(
            f"| {apart.model} | {step_s(together, False, guess, 1.0):.0f}, {step_s(together, False, own, slower):.0f}, "
            f"{together.step_s:g} | {step_s(apart, True, guess, 1.0):.0f}, {predicted:.0f}, {apart.step_s:g} "
            f"| {errors[apart.model]:+.0%} | {own:.3f} |"
        )
    others = [abs(error) for model, error in errors.items() if model != "DeepSeek-V3"]
    print(f"\nmean error of the separated rows without DeepSeek-V3: {sum(others) / len(others):.0%}")


if __name__ == "__main__":
    main()
