"""Routing by recorded experts, compared with a plain computation of every token by every expert."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.spec.rules.objective import REPLAYED
from asyncrl_cli.train.deepspeed_engine import recompute_activations
from asyncrl_cli.train.model.policy import Policy
from asyncrl_cli.train.model.router_replay import replayed_routers
from tests.train.test_policy import SIZES, rows, scored

pytestmark = pytest.mark.slow

EXPERTS, K, LAYERS = 6, 2, 3
SMALL = SIZES | {"num_experts_per_tok": K, "moe_intermediate_size": 24}
GROUPED = SMALL | {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
GROUPED |= {"n_shared_experts": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
LATENT = {
    "head_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mixtral": SMALL | {"num_local_experts": EXPERTS},
    "qwen3_moe": SMALL | {"num_experts": EXPERTS, "norm_topk_prob": False},
    "glm4_moe": GROUPED,
    "deepseek_v3": GROUPED | LATENT | {"num_key_value_heads": 4},
}
assert set(ARCHITECTURES) == set(REPLAYED), "the architectures that a spec may use with it"
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def make(architecture: str, packing: bool = False, router_replay: bool = True, spread: float = 0.0) -> Policy:
    """A policy; ``spread`` is the standard deviation of the noise that is added to its routers' weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for router in replayed_routers(model).values():
            router.weight.add_(spread * torch.randn_like(router.weight))
    return Policy(model, temperature=0.8, packing=packing, router_replay=router_replay)


def choice(policy: Policy, inputs: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The experts of a policy's own routers for ``rows()``, in an engine's layout: uint8 [rows, tokens, ...]."""
    ids, mask = inputs or rows()
    chosen = torch.zeros(*ids.shape, LAYERS, K, dtype=torch.uint8)
    hooks = []
    for layer, router in replayed_routers(policy.model).items():

        def note(_: Any, __: Any, output: tuple[Tensor, ...], layer: int = layer) -> None:
            chosen[:, 1:, layer] = output[2].view(len(ids), -1, K).to(torch.uint8)

        hooks.append(router.register_forward_hook(note))
    with torch.no_grad():
        policy(ids, mask)
    for hook in hooks:
        hook.remove()
    return chosen.flatten(2)


def replayed(policy: Policy, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``scored`` with these experts."""

    def call(*inputs: Any) -> Any:
        return policy(*inputs, experts)

    call.zero_grad, call.parameters = policy.zero_grad, policy.parameters  # type: ignore[attr-defined]
    return scored(call, *rows())  # type: ignore[arg-type]


def route_densely(policy: Policy, experts: Tensor, known: Tensor) -> None:
    """Let every expert compute every token, with weight 0 if it is not among ``experts`` or, for tokens whose experts
    are not ``known`` (bool [rows, tokens]), not in the router's own choice."""

    def forward(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = flat @ router.weight.T
        everyone = torch.arange(EXPERTS).expand_as(logits)
        chosen = torch.where(known[:, 1:].reshape(-1, 1), router.recorded, type(router).forward(router, hidden)[2])
        wanted = torch.zeros_like(logits).scatter(1, chosen, 1.0)
        if hasattr(router, "routed_scaling_factor"):
            scores = torch.sigmoid(logits) * wanted
            return logits, router.routed_scaling_factor * scores / scores.sum(-1, keepdim=True), everyone
        scores = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True) * wanted
        normed = getattr(router, "norm_topk_prob", True)
        return logits, scores / scores.sum(-1, keepdim=True) if normed else scores, everyone

    by_layer = experts[:, 1:].reshape(-1, LAYERS, K).long()
    for layer, router in replayed_routers(policy.model).items():
        router.recorded = by_layer[:, layer]
        router.forward = MethodType(forward, router)


def assert_close(ones: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


@each_architecture
def test_a_models_own_choice_changes_nothing(architecture: str) -> None:
    """With the choice recorded for half of the tokens, and unknown for the others."""
    policy = make(architecture)
    plain = scored(policy, *rows())
    own = choice(policy)
    own[:, ::2] = 0
    for one, other in zip(replayed(policy, own), plain, strict=True):
        assert one.equal(other)


@each_architecture
@pytest.mark.parametrize(("packing", "checkpointing"), [(False, True), (True, False)])
def test_log_probs_and_gradients_are_those_of_the_recorded_experts(
    architecture: str, packing: bool, checkpointing: bool
) -> None:
    """An engine with other routers recorded the experts; for every third token they are unknown."""
    recorded = choice(make(architecture, spread=0.3))
    plain = make(architecture, router_replay=False)
    assert (recorded != choice(plain)).any(-1).float().mean() > 0.2
    known = (torch.arange(recorded.shape[1]) % 3 > 0).expand(recorded.shape[:2])
    policy = make(architecture, packing)
    if checkpointing:
        recompute_activations(policy.model)
    found = replayed(policy, recorded * known[..., None])
    own = scored(plain, *rows())
    assert (found[0] - own[0]).abs().max() > 1e-3
    route_densely(plain, recorded, known)
    assert_close(found, scored(plain, *rows()))
    for router in replayed_routers(policy.model).values():
        assert router.weight.grad.abs().sum() > 0


def test_the_choice_of_one_pass_is_not_used_by_the_next() -> None:
    policy = make("mixtral")
    plain = scored(policy, *rows())
    replayed(policy, choice(make("mixtral", spread=0.3)))
    assert scored(policy, *rows())[0].equal(plain[0])


@pytest.mark.parametrize(
    ("architecture", "sizes", "message"),
    [
        ("qwen3", SIZES, "qwen3 has no router"),
        ("olmoe", SMALL | {"num_experts": EXPERTS}, "olmoe has no router"),
        ("mixtral", SMALL | {"num_local_experts": EXPERTS, "num_experts_per_tok": 1}, "uses 1 expert in a layer"),
    ],
)
def test_models_whose_routers_are_not_known_are_refused(architecture: str, sizes: dict[str, Any], message: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    with pytest.raises(UserError, match=message):
        Policy(model, 1.0, router_replay=True)


def test_experts_of_another_model_are_refused() -> None:
    policy = make("mixtral")
    with pytest.raises(UserError, match=r"8 recorded experts per token.*2 in each of 3 layers"):
        policy(*rows(), experts=torch.zeros(*rows()[0].shape, 8, dtype=torch.uint8))
