"""The proof of weights in bfloat16 and float32: correct engines differ a little, wrong ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import spec

from asyncrl_cli.orchestrator.probe_check import MIN_TOLERANCE, TOLERANCE, ProbeCheck

TOKENS = 24


def check(dtype: str = "bfloat16") -> ProbeCheck:
    return ProbeCheck(spec(rollout={"dtype": dtype}))


def logprobs(seed: int, rounding: float = 0.0) -> np.ndarray:
    """The same log-probs at every call, except for a rounding error that depends on the seed."""
    exact = np.random.default_rng(0).uniform(-12, -0.1, TOKENS)
    return (exact + np.random.default_rng(seed).normal(0.0, rounding, TOKENS)).astype(np.float32)


@given(
    rounding=st.floats(1e-4, 0.05),
    rerouted=st.lists(st.tuples(st.integers(0, TOKENS - 1), st.floats(-3, 3)), max_size=TOKENS // 4),
    seed=st.integers(1, 10**6),
)
def test_a_sound_engine_is_accepted_though_some_tokens_differ_by_nats(
    rounding: float, rerouted: list[tuple[int, float]], seed: int
) -> None:
    judge = check()
    assert not judge.judge(logprobs(seed + 1, rounding), logprobs(0))[1]
    answer = logprobs(seed, rounding)
    for token, nats in rerouted:
        answer[token] += np.float32(nats)
    assert not judge.judge(answer, logprobs(0))[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_wrong_model_is_refused_at_the_first_publish(dtype: str, wrong: float) -> None:
    _, refused = check(dtype).judge(logprobs(0) + np.float32(wrong), logprobs(0), None)
    assert "its log-probs of the probe differ from the trainer's by" in refused


def test_in_float32_every_token_counts() -> None:
    answer = logprobs(0)
    answer[3] += np.float32(0.01)
    assert check("float32").judge(answer, logprobs(0))[0] == pytest.approx(0.01, abs=1e-5)
    assert check("float32").judge(answer, logprobs(0))[1]
    assert not check().judge(answer, logprobs(0))[1]


def test_in_bfloat16_the_first_gap_limits_later_gaps() -> None:
    judge, small = check(), np.float32(0.01)
    off = np.float32(0.3)
    assert judge.tolerance == TOLERANCE["bfloat16"]
    assert not judge.judge(logprobs(0) + small, logprobs(0))[1]
    assert judge.tolerance == MIN_TOLERANCE
    assert "in the median; at most 0.1 are allowed" in judge.judge(logprobs(0) + off, logprobs(0))[1]
    noisy = check()
    noisy.judge(logprobs(0) + np.float32(0.08), logprobs(0), None)
    assert noisy.tolerance == pytest.approx(0.4, abs=1e-3)
    assert not noisy.judge(logprobs(0) + off, logprobs(0))[1]


def test_in_bfloat16_an_engine_that_skipped_an_update_is_refused() -> None:
    judge = check()
    versions = [logprobs(0) + np.float32(0.05 * version) for version in range(3)]
    assert not judge.judge(versions[0] + np.float32(0.01), versions[0])[1]
    assert not judge.judge(versions[1] + np.float32(0.01), versions[1], versions[0])[1]
    assert "than from the previous version's" in judge.judge(versions[1], versions[2], versions[1])[1]


@pytest.mark.parametrize(("dtype", "change"), [("float32", 2e-4), ("bfloat16", 0.04)])
def test_an_engine_without_the_adapter_is_refused_though_it_is_within_the_tolerance(dtype: str, change: float) -> None:
    base = logprobs(0)
    adapted, last = base + np.float32(change), base + np.float32(0.9 * change)
    judge = check(dtype)
    assert not judge.judge(base, base, base=base)[1], "new adapters have no effect"
    assert not judge.judge(base, adapted, last)[1]
    assert "than from the log-probs without adapters" in judge.judge(base, adapted, last, base)[1]
    assert "than from the log-probs without adapters" in judge.judge(base, adapted, base=base)[1], "after a resume"
    assert not judge.judge(adapted, adapted, last, base)[1]
