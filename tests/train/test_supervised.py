"""Supervised updates on real DeepSpeed ranks: transformers' own loss, with any ranks, packing and micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import IMAGE_TOKENS, picture, saved_model
from ranks import run_ranks

from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.training import SupervisedBatch, SupervisedRow
from tests.small_models import CHAIN_SUM

pytestmark = pytest.mark.stack

RATE = 1e-3
ALONE = ("trainer.ranks=1", "rollout.sampling.temperature=1.0", "trainer.zero_stage=1")
ONE_RANK: dict[str, tuple[str, ...]] = {
    "plain": (),
    "packed": ("trainer.zero_stage=3", "trainer.packing=true", "trainer.tokens_per_microbatch=64"),
    "recomputed": ("trainer.gradient_checkpointing=true", "trainer.tokens_per_microbatch=64"),
    "adapters": ("model.lora={rank: 4}",),
    "bfloat16": ("trainer.dtype=bfloat16", "trainer.zero_stage=2"),
}


def batches(count: int, rows: int) -> list[SupervisedBatch]:
    """Rows of random tokens, with one or two learned stretches."""
    generator = np.random.default_rng(0)

    def row() -> SupervisedRow:
        length = int(generator.integers(6, 40))
        learned = generator.random(length) < 0.6
        learned[0], learned[-1] = False, True
        return SupervisedRow(tuple(generator.integers(3, 90, length).tolist()), tuple(learned.tolist()))

    return [SupervisedBatch(tuple(row() for _ in range(rows)), RATE) for _ in range(count)]


def losses_of_transformers(folder: Path, rows_of_updates: list[SupervisedBatch]) -> list[float]:
    """Losses of transformers' model with labels, trained by torch's AdamW with the spec's settings."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for batch in rows_of_updates:
        width = max(len(row.ids) for row in batch.rows)
        ids, labels = torch.zeros(len(batch.rows), width, dtype=torch.int64), torch.full((len(batch.rows), width), -100)
        for index, row in enumerate(batch.rows):
            tokens = torch.tensor(row.ids)
            ids[index, : len(tokens)] = tokens
            labels[index, : len(tokens)] = tokens.where(torch.tensor(row.learned), -100)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(folder: Path, model: Path, rows: list[SupervisedBatch], *settings: tuple[str, ...]) -> list[dict[str, Any]]:
    folder.mkdir()
    of_model = ("model.init=null", f"model.path={model}")
    words = [word for setting in settings for word in (",", *ALONE, *of_model, *setting)][1:]
    results: list[dict[str, Any]] = run_ranks("supervised_one", folder, tuple(words), rows)[0]
    return results


def test_loss_equals_that_of_transformers_with_any_ranks_and_packing(tmp_path: Path) -> None:
    rows = [*batches(3, 10), *batches(1, 1)]  # the last update has fewer rows than ranks
    expected = losses_of_transformers(CHAIN_SUM, rows)
    results = dict(zip(ONE_RANK, train(tmp_path / "1", CHAIN_SUM, rows, *ONE_RANK.values()), strict=True))
    (results["two ranks"],) = train(tmp_path / "2", CHAIN_SUM, rows, ("trainer.ranks=2", "trainer.zero_stage=3"))
    plain = results["plain"]
    for name in ("plain", "packed", "recomputed", "two ranks"):
        assert results[name]["losses"][0] == pytest.approx(expected[0], rel=1e-6), name
        assert results[name]["losses"] == pytest.approx(expected, abs=2e-5), name
        for weight, values in plain["weights"].items():
            torch.testing.assert_close(results[name]["weights"][weight], values, rtol=1e-4, atol=2e-5, msg=weight)
    assert results["bfloat16"]["losses"] == pytest.approx(expected, rel=0.05)
    adapters = results["adapters"]["losses"]
    assert adapters[0] == pytest.approx(expected[0], rel=1e-6) and adapters[1] != expected[1]


def test_a_model_with_images_learns_the_text_after_a_picture_and_keeps_its_tower(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    saved_model("qwen2_5_vl", tmp_path / "model")
    token = AutoConfig.from_pretrained(tmp_path / "model").image_token_id
    shown = [
        SupervisedRow(
            (5, *(token,) * IMAGE_TOKENS, 6, answer),
            (False,) * (IMAGE_TOKENS + 2) + (True,),
            (PlacedImage(picture(seed), 1, IMAGE_TOKENS),),
        )
        for seed, answer in ((1, 40), (2, 41))
    ]
    text = SupervisedRow((5, 6, 42), (False, False, True))
    rows = [SupervisedBatch((*shown, text), 3e-3)] * 40
    (result,) = train(tmp_path / "out", tmp_path / "model", rows, ("model.max_images=1",))
    assert result["losses"][-1] < 0.1 < 1.0 < result["losses"][0], "two pictures have two answers"
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    changed = {name for name, weight in result["weights"].items() if not weight.equal(before[name])}
    assert any("merger" in name for name in changed), "the projector is trained"
    assert not any("visual" in name and "merger" not in name for name in changed), "the vision tower is frozen"
