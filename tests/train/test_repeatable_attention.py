"""Deterministic mode is on for attention alone, in both passes. Whether GPU kernels then repeat their bits is measured
on a GPU: `make gpu`, part `repeats`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl_cli.spec.sections import TrainerSpec
from asyncrl_cli.train.deepspeed_engine import load_model, recompute_activations
from asyncrl_cli.train.model import attention
from asyncrl_cli.train.model.policy import Policy
from asyncrl_cli.train.prefix_trees import PrefixTree, TreeLayout
from tests.train.test_policy import make, rows


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before, fills = ALL_ATTENTION_FUNCTIONS["sdpa"], torch.utils.deterministic.fill_uninitialized_memory
    attention.install_attention()
    yield
    ALL_ATTENTION_FUNCTIONS["sdpa"] = before
    torch.utils.deterministic.fill_uninitialized_memory = fills
    attention.install_attention.cache_clear()


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation's name, and whether deterministic mode was on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func.__name__, torch.are_deterministic_algorithms_enabled()))
        return func(*args, **(kwargs or {}))

    def modes(self, part: str) -> list[bool]:
        return [on for name, on in self.seen if part in name]


def everything(policy: Policy) -> None:
    pass


def values_only(policy: Policy) -> None:
    """The gradient of attention's input ends at the values, as with adapters for them alone."""
    for name, weight in policy.named_parameters():
        weight.requires_grad_("layers.0.self_attn.v_proj" in name)


@pytest.mark.parametrize("trained", [everything, values_only])
@pytest.mark.parametrize("recomputes", [False, True])
def test_mode_is_on_for_attention_alone(recomputes: bool, trained: Callable[[Policy], None]) -> None:
    policy = make("qwen3")
    trained(policy)
    if recomputes:
        recompute_activations(policy.model)
    ids, mask = rows()
    with Operations() as operations:
        policy(ids, mask).sum().backward()
    layers = policy.model.config.num_hidden_layers
    assert operations.modes("scaled_dot_product") == [True] * layers * (2 + recomputes)
    for name in (".mm", "embedding", "mul", "native_layer_norm", "log"):
        assert not any(operations.modes(name)), name
    assert not torch.are_deterministic_algorithms_enabled()


def test_ranks_on_gpus_install_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention.install_attention.cache_clear()
    before = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", before)
    make("qwen3").model.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    functions = []
    for gpus in (0, 1, 1):  # the last one: a critic
        load_model(TrainerSpec(gpus_per_rank=gpus, gradient_checkpointing=False), str(tmp_path))
        functions.append(ALL_ATTENTION_FUNCTIONS["sdpa"])
    assert functions[0] is before
    assert functions[1] is functions[2] is not before


def test_mode_is_off_after_a_failed_pass() -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        attention.attend(full, torch.nn.Identity(), query=torch.ones(1), key=torch.ones(1), value=torch.ones(1))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_mask_of_shared_prefixes_is_covered() -> None:
    ids, mask = rows()
    ids[1, 0] = ids[0, 0]
    tree = PrefixTree((0, 1), lengths=(ids.shape[1] - 1,) * 2, shared=(0, 1))
    trees = TreeLayout.of([tree], ids.shape[1], joined=False)
    with Operations() as operations:
        make("qwen3")(ids[:2], mask[:2], trees=trees).sum().backward()
    modes = operations.modes("scaled_dot_product")
    assert modes and all(modes)
