"""The policy with images: log-probs and gradients are the model's own, however rows are put together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import varlen_kernel

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.train.model.images import Vision, tower_parameters
from asyncrl_cli.train.model.policy import Policy, ValueModel, check_policy
from asyncrl_cli.train.packing import TrainingRow, microbatch, pad_rows
from asyncrl_cli.train.prefix_trees import plan_trees, single_rows
from tests.small_models import IMAGE_MODELS
from tests.train.pictures import picture, row, saved_model

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=sorted(IMAGE_MODELS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    from transformers import AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp(request.param)
    saved_model(request.param, folder)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval(), folder


def policy_of(loaded: tuple[Any, Path], packing: bool, bidirectional: bool = False) -> Policy:
    model, folder = loaded
    return Policy(model, 1.0, packing=packing, vision=Vision(model, str(folder), bidirectional))


def scored(policy: Policy, rows: list[TrainingRow]) -> list[torch.Tensor]:
    """The log-probs of each row's sampled tokens, with all rows in one micro-batch."""
    padded = pad_rows(rows, policy.vision)
    logprobs = policy(padded.input_ids, padded.response_mask, **padded.model_arguments)
    return [logprobs[index, padded.response_mask[index]] for index in range(len(rows))]


def own(loaded: tuple[Any, Path], one: TrainingRow, bidirectional: bool = False) -> torch.Tensor:
    """The same of one row from the model with its head, by the arguments that its processor makes."""
    from transformers import AutoProcessor

    model, folder = loaded
    ids = torch.from_numpy(one.tokens.ids.astype(np.int64))[None]
    arguments: dict[str, Any] = {}
    if one.images:
        processor: Any = AutoProcessor.from_pretrained(folder)
        made = processor.image_processor([placed.image.decoded() for placed in one.images], return_tensors="pt")
        arguments = {name: made[name] for name in made if name in ("pixel_values", "image_grid_thw")}
        types = torch.zeros_like(ids)
        for placed in one.images:
            types[0, placed.offset : placed.offset + placed.length] = 1
        if bidirectional:
            arguments["token_type_ids"] = types
        elif model.config.model_type != "gemma3":
            arguments["mm_token_type_ids"] = types
    logits = model(input_ids=ids, use_cache=False, **arguments).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[one.tokens.sampled[1:], 0]


def rows_of(config: Any) -> list[TrainingRow]:
    return [
        row(config, 3, picture(1), 9, seed=1),
        row(config, 12, seed=2),
        row(config, 2, picture(1), 5, picture(2), 11, sampled=5, seed=3),
        row(config, 1, picture(3), 4, sampled=4, seed=4),
    ]


@pytest.mark.parametrize("packing", [False, True])
@torch.no_grad()
def test_logprobs_of_rows_with_images_equal_the_models(loaded: tuple[Any, Path], packing: bool) -> None:
    rows = rows_of(loaded[0].config)
    for one, logprobs in zip(rows, scored(policy_of(loaded, packing), rows), strict=True):
        torch.testing.assert_close(logprobs, own(loaded, one), atol=TOLERANCE, rtol=0)
    other = replace(rows[0], images=(replace(rows[0].images[0], image=picture(2)),))
    gap = (own(loaded, other) - own(loaded, rows[0])).abs().max()
    assert gap > 1e-3, "images matter, so the comparison says something"


@pytest.fixture
def varlen(loaded: tuple[Any, Path]) -> Iterator[None]:
    """The language model has `varlen`; its kernel is computed on the CPU."""
    text = loaded[0].config.get_text_config()
    before, text._attn_implementation = text._attn_implementation, "varlen"
    with varlen_kernel.installed():
        yield
    text._attn_implementation = before


@torch.no_grad()
def test_rows_with_images_are_packed_by_their_lengths(loaded: tuple[Any, Path], varlen: None) -> None:
    rows = rows_of(loaded[0].config)
    text = loaded[0].config.get_text_config()
    text._attn_implementation = "sdpa"
    expected = [own(loaded, one) for one in rows]
    text._attn_implementation = "varlen"
    for one, logprobs in zip(expected, scored(policy_of(loaded, packing=True), rows), strict=True):
        torch.testing.assert_close(logprobs, one, atol=TOLERANCE, rtol=0)


def test_varlen_is_refused_where_images_are_not_causal(loaded: tuple[Any, Path], varlen: None) -> None:
    if loaded[0].config.model_type != "gemma3":
        policy_of(loaded, packing=True, bidirectional=True)
        return
    with pytest.raises(UserError, match="see each other in a gemma3, and varlen is causal") as refused:
        policy_of(loaded, packing=True, bidirectional=True)
    assert refused.value.location == "trainer.attention"


@pytest.mark.parametrize("packing", [False, True])
def test_rows_that_begin_with_the_same_images_share_them(loaded: tuple[Any, Path], packing: bool) -> None:
    config, policy = loaded[0].config, policy_of(loaded, packing)
    policy.shares_prefixes = True
    check_policy(policy, policy)
    first = row(config, 3, picture(1), 5, picture(2), 6, seed=1)
    rows = [first]
    for begins, seed in ((18, 5), (9, 6), (16, 7)):  # behind both images, behind the first one, behind both
        ids = first.tokens.ids.copy()
        ids[begins:] = row(config, len(ids), seed=seed).tokens.ids[begins:]
        images = tuple(one for one in first.images if one.offset < begins)
        rows.append(replace(first, tokens=replace(first.tokens, ids=ids), images=images))
    rows.append(row(config, 3, picture(3), 5, picture(2), 6, seed=1))  # another first image
    trees = plan_trees([one.keys() for one in rows], 1000, 0.0)
    in_order = [rows[index] for tree in trees for index in tree.rows]
    assert [tree.positions for tree in trees] == [59], "of 105"
    results = []
    for plan, own in ((trees, rows), (single_rows([len(one) for one in in_order]), in_order)):
        padded = microbatch(own, plan, policy.vision, packing)
        policy.zero_grad()
        logprobs = policy(padded.input_ids, padded.response_mask, **padded.model_arguments)
        (logprobs * torch.linspace(0, 1, logprobs.numel()).view(logprobs.shape)).sum().backward()
        gradients = [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]
        results.append((logprobs.detach(), gradients))
    (shared, one), (separate, other) = results
    torch.testing.assert_close(shared, separate, atol=TOLERANCE, rtol=0)
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("packing", [False, True])
@torch.no_grad()
def test_a_sampled_placeholder_is_text(loaded: tuple[Any, Path], packing: bool) -> None:
    """It is embedded by its own id, as the engine does, and takes no feature away from the image."""
    config = loaded[0].config
    one, plain = row(config, 3, picture(1), 9, seed=1), row(config, 12, seed=2)
    for sampled in (one, plain):
        sampled.tokens.ids[-3] = config.image_token_id
    policy = policy_of(loaded, packing)
    # The model's own head cannot be asked: it would put features there. Another token with the same embedding can.
    weights = loaded[0].get_input_embeddings().weight
    twin, kept = 98, weights.detach().clone()
    weights.data[twin] = weights.data[config.image_token_id]
    found, expected = scored(policy, [one, plain]), []
    for sampled in (one, plain):
        ids = sampled.tokens.ids.copy()
        ids[-3] = twin
        expected += scored(policy, [replace(sampled, tokens=replace(sampled.tokens, ids=ids))])
    weights.data.copy_(kept)
    for logprobs, other in zip(found, expected, strict=True):
        torch.testing.assert_close(logprobs[-2:], other[-2:], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_placeholders_see_each_other_where_engines_let_them(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    saved_model("gemma3", tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval(), tmp_path
    rows = rows_of(loaded[0].config)
    for packing in (False, True):
        policy = policy_of(loaded, packing, bidirectional=True)
        check_policy(policy, policy)
        for one, logprobs in zip(rows, scored(policy, rows), strict=True):
            torch.testing.assert_close(logprobs, own(loaded, one, bidirectional=True), atol=TOLERANCE, rtol=0)
    assert (own(loaded, rows[0], bidirectional=True) - own(loaded, rows[0])).abs().max() > 1e-4


@pytest.mark.parametrize("packing", [False, True])
def test_gradients_of_a_micro_batch_are_the_sums_over_its_rows(loaded: tuple[Any, Path], packing: bool) -> None:
    model, _ = loaded
    policy, rows = policy_of(loaded, packing), rows_of(model.config)
    weights = dict(model.named_parameters())

    def gradients(logprobs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = torch.autograd.grad(sum(part.sum() for part in logprobs), list(weights.values()), allow_unused=True)
        return {n: torch.zeros_like(weights[n]) if g is None else g for n, g in zip(weights, found, strict=True)}

    together, apart = gradients(scored(policy, rows)), gradients([own(loaded, one) for one in rows])
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], atol=2e-4, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


def test_every_weight_of_the_tower_has_a_gradient_without_images(loaded: tuple[Any, Path]) -> None:
    """Other ranks may have images: under ZeRO all ranks reduce the same gradients."""
    model, _ = loaded
    policy = policy_of(loaded, packing=True)
    reached = {"visual", "vision_tower", "multi_modal_projector"}
    for rows in ([], [row(model.config, 12)]):
        padded = pad_rows(rows, policy.vision)
        assert padded.images is not None and not padded.images.placeholders.any()
        model.zero_grad()
        policy(padded.input_ids, padded.response_mask, **padded.model_arguments).sum().backward()
        for name, weight in model.named_parameters():
            if reached & set(name.split(".")):
                # Gemma's pooling head is not used for images, and a window's last layers may not be.
                assert (weight.grad is not None and not weight.grad.any()) or ".head." in name, name


def test_check_policy_compares_with_an_image(loaded: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl_cli.core.errors import UserError
    from asyncrl_cli.train.model import images

    for packing in (False, True):
        policy = policy_of(loaded, packing)
        gap, allowed = check_policy(policy, policy)
        assert gap < allowed
    arranged = images.ImageInputs.arranged

    def elsewhere(self: Any, pick: Any) -> Any:
        inputs = arranged(self, pick)
        return replace(inputs, placeholders=inputs.placeholders.roll(1, dims=-1))

    monkeypatch.setattr(images.ImageInputs, "arranged", elsewhere)
    with pytest.raises(UserError, match=r"nats away from its own logits"):
        check_policy(policy, policy)


def test_the_frozen_part_is_the_tower_without_its_projector(loaded: tuple[Any, Path]) -> None:
    model, _ = loaded
    frozen = {id(parameter) for parameter in tower_parameters(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in frozen}
    assert any("patch_embed" in name for name in names)
    assert not any("merger" in name or "projector" in name or "language_model" in name for name in names)


@torch.no_grad()
def test_a_critic_sees_images(loaded: tuple[Any, Path]) -> None:
    model, _ = loaded
    policy = policy_of(loaded, packing=True)
    critic = ValueModel(model.base_model, packing=True)
    torch.nn.init.normal_(critic.head.weight)
    first, second = row(model.config, 3, picture(1), 9, seed=1), row(model.config, 3, picture(2), 9, seed=1)
    values = []
    for one in (first, second):
        padded = pad_rows([one], policy.vision)
        values.append(critic(padded.input_ids, padded.response_mask, **padded.model_arguments))
    assert not torch.allclose(*values)
