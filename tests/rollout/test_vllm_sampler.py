"""vLLM's sampler with random numbers by seed and position: its distribution, and what a result depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # imports vLLM

VOCABULARY = 24
DRAWS = 40_000


class Runner:
    """The attributes of a model runner that the sampler reads."""

    def __init__(self) -> None:
        from vllm.v1.sample.sampler import Sampler

        from asyncrl_cli.rollout.vllm_sampler import sample_by_position

        self.sampler = Sampler("processed_logprobs")
        config: Any = SimpleNamespace(use_v2_model_runner=False)
        assert sample_by_position(self, config)

    def draw(self, logits: Any, seeds: list[int | None], positions: list[int], **settings: Any) -> tuple[Any, Any]:
        """Tokens and processed log-probs of one step: a row for each seed and position; None means without a seed."""
        import torch

        rows = len(seeds)
        generators = {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds) if seed is not None}
        temperature = torch.tensor(settings.pop("temperature", [1.0] * rows))
        batch: Any = SimpleNamespace(
            all_greedy=False,
            all_random=bool((temperature > 0).all()),
            temperature=temperature,
            logitsprocs=SimpleNamespace(argmax_invariant=[]),
            generators=generators,
            top_k=settings.get("top_k"),
            top_p=settings.get("top_p"),
            max_num_logprobs=0,
        )
        self.input_batch = SimpleNamespace(sampling_metadata=batch)
        self.seq_lens = torch.tensor([*positions, 99], dtype=torch.int32)  # there is room for more requests
        return self.sampler.sample(logits.clone(), batch)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner()


@pytest.fixture(scope="module")
def logits() -> Any:
    """One distribution with likely and unlikely tokens."""
    import torch

    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 1.5


def p_value(found: Any, expected: Any) -> float:
    """The p-value of Pearson's chi-square test."""
    import torch

    statistic = ((found - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2), statistic / 2))


@pytest.mark.parametrize("kind", ["one seed, many positions", "many seeds, one position"])
@pytest.mark.parametrize("limit", ["none", "temperature", "top-k", "top-p"])
def test_tokens_are_drawn_from_the_distribution(runner: Runner, logits: Any, kind: str, limit: str) -> None:
    """A chi-square test; seeds are fixed, so its answer is always the same."""
    import torch

    many = kind.startswith("many")
    seeds: list[int | None] = list(range(DRAWS)) if many else [7] * DRAWS
    positions = [30] * DRAWS if many else list(range(DRAWS))
    settings: dict[str, Any] = {
        "none": {},
        "temperature": {"temperature": [0.6] * DRAWS},
        "top-k": {"top_k": torch.full((DRAWS,), 5, dtype=torch.int32)},
        "top-p": {"top_p": torch.full((DRAWS,), 0.8)},
    }[limit]
    tokens, logprobs = runner.draw(logits.expand(DRAWS, -1), seeds, positions, **settings)
    wanted = (logits / 0.6 if limit == "temperature" else logits).softmax(0)
    if limit.startswith("top"):
        likely = wanted.sort(descending=True)
        kept = 5 if limit == "top-k" else int((likely.values.cumsum(0) < 0.8).sum()) + 1
        wanted = torch.zeros_like(wanted).index_copy(0, likely.indices[:kept], likely.values[:kept])
        wanted /= wanted.sum()
    assert torch.allclose(logprobs[0].exp(), wanted, atol=1e-5), "log-probs are of the sampled distribution"
    expected, found = DRAWS * wanted, torch.bincount(tokens, minlength=VOCABULARY)
    assert not found[wanted == 0].any()
    assert p_value(found[wanted > 0], expected[wanted > 0]) > 1e-3


def test_successive_tokens_are_independent(runner: Runner, logits: Any) -> None:
    """Pairs of successive tokens with one seed, compared with the product of their probabilities."""
    import torch

    likely = logits.topk(6).values
    tokens, _ = runner.draw(likely.expand(DRAWS, -1), [11] * DRAWS, list(range(DRAWS)))
    pairs = torch.bincount(tokens[0::2] * 6 + tokens[1::2], minlength=36)
    wanted = torch.outer(likely.softmax(0), likely.softmax(0)).reshape(-1) * (DRAWS / 2)
    assert p_value(pairs, wanted) > 1e-3


def test_seed_and_position_decide_and_nothing_else(runner: Runner) -> None:
    """Not the row, other requests, earlier samples, or another seed in the same row before."""
    import torch

    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    seeds: list[int | None] = [*range(-2, 60), 2**63 - 1, -(2**63)]
    positions = [3 + row % 11 for row in range(64)]
    first, _ = runner.draw(logits, seeds, positions)
    backwards, _ = runner.draw(logits.flip(0), seeds[::-1], positions[::-1])
    assert torch.equal(backwards.flip(0), first)
    for row in (0, 17, 63):
        alone, _ = runner.draw(logits[row : row + 1], [seeds[row]], [positions[row]])
        assert alone.tolist() == [first[row]]
    assert not torch.equal(runner.draw(logits, seeds, [one + 1 for one in positions])[0], first)


def test_requests_without_a_seed_get_other_numbers_in_every_step(runner: Runner) -> None:
    import torch

    logits = torch.randn(32, 500, generator=torch.Generator().manual_seed(2))
    seeds: list[int | None] = [row if row % 2 else None for row in range(32)]
    first, second = (runner.draw(logits, seeds, [8] * 32)[0] for _ in range(2))
    assert torch.equal(first[1::2], second[1::2])
    assert not torch.equal(first[0::2], second[0::2])
    temperature = [0.0 if row % 3 else 1.0 for row in range(32)]
    mixed, _ = runner.draw(logits, seeds, [8] * 32, temperature=temperature)
    greedy = [row for row in range(32) if row % 3]
    assert mixed[greedy].tolist() == logits[greedy].argmax(-1).tolist()
    assert mixed[3] == first[3]


def test_sampler_is_unchanged_if_vllm_has_no_kernel() -> None:
    from vllm.v1.sample.sampler import Sampler

    from asyncrl_cli.rollout.vllm_sampler import PositionSampler, sample_by_position

    plain: Any = SimpleNamespace(use_v2_model_runner=False)
    sampler = Sampler(use_fp64_gumbel=True)
    assert not sample_by_position(SimpleNamespace(sampler=sampler), plain)
    assert not isinstance(sampler.topk_topp_sampler.forward, PositionSampler)
    second: Any = SimpleNamespace(use_v2_model_runner=True)
    assert sample_by_position(SimpleNamespace(), second), "vLLM samples by itself"
