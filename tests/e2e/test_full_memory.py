"""A rank that runs out of memory: that batch is trained in smaller micro-batches, and a replay divides it equally."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from .conftest import Runs, rows

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

TOKENS = 128
LOSS = """
    from pathlib import Path

    import torch

    from asyncrl_cli.train.algorithms.policy_loss import TokenLosses

    GONE = Path(__file__).with_suffix(".gone")
    calls = 0

    def full_once(logprobs, proximal_logprobs, advantages, mask, settings):
        global calls
        calls += 1
        ranks = torch.distributed
        if ranks.is_initialized() and ranks.get_rank() == 1 and calls > 2 and not GONE.exists():
            GONE.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        ratio = (logprobs - proximal_logprobs).exp()
        return TokenLosses(-ratio * advantages, clipped_low=mask & False, clipped_high=mask & False)
"""


def test_full_rank_halves_micro_batches_and_replay_repeats_them(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(textwrap.dedent(LOSS))
    spec = runs.write_spec(
        name="full",
        data={"eval": None},
        algorithm={"loss": "losses:full_once", "uniform_groups": "train"},
        trainer={"ranks": 2, "zero_stage": 2, "tokens_per_microbatch": TOKENS, "share_prefixes": False},
        pipeline={"mode": "sync", "max_staleness": 0},
        stop={"steps": 3},
    )
    training = runs.succeed("train", spec)
    assert f"trained with {TOKENS // 2} tokens a micro-batch" in training.out + training.err
    run = runs.newest()
    reduced = [row.get("train/reduced_microbatch_tokens") for row in rows(run, "metrics.jsonl")]
    assert sorted(reduced, key=str) == [TOKENS / 2, None, None], reduced
    replayed = runs.succeed("replay", run)
    assert "all 3 published versions" in replayed.out, replayed.out + replayed.err
