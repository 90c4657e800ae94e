"""Routing by recorded experts: the trainer uses the engine's choice with its own weights (decision 0054).

In bfloat16, or with kernels that add in another order, two experts with nearly equal scores may change places between
engine and trainer, and a token's log-probs then differ by far more than rounding. With the choice fixed, the trainer
computes the engine's function again, and the router is trained through the weights of the chosen experts (R3, Ma et
al., arXiv 2510.11370).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import UserError

Weigh = Callable[[Any, Tensor, Tensor], Tensor]
"""Takes a router, its logits [tokens, experts] and experts [tokens, k]; returns the experts' weights [tokens, k]."""

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def _softmax(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights: Tensor = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _sigmoid(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights: Tensor = logits.sigmoid().gather(-1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    scaling: float = router.routed_scaling_factor
    return weights * scaling


ROUTERS: dict[str, Weigh] = {
    "MixtralTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": lambda router, logits, experts: _softmax(router, logits, experts).to(logits.dtype),
    "Glm4MoeTopkRouter": _sigmoid,
    "DeepseekV3TopkRouter": _sigmoid,
}
"""How transformers' routers weigh their chosen experts, by class. All return logits, weights and experts."""


DIVIDED = "TokenChoiceTopKRouter"
"""The router of DeepSpeed's AutoEP. It returns weights, experts, and each expert's number of tokens."""


class RouterReplay:
    """The routers of one model, and the experts that they must use."""

    def __init__(self, model: Any) -> None:
        """Hook the routers. Raises ``UserError`` like ``replayed_routers``."""
        config = model.config.get_text_config()
        self._layers: int = config.num_hidden_layers
        self._experts: Tensor | None = None
        self.hook(model)

    def hook(self, model: Any) -> None:
        """Hook the model's present routers. AutoEP replaces the routers when it divides the experts."""
        for layer, router in replayed_routers(model).items():
            self._k: int = router.top_k
            name = type(router).__name__
            hook = self._route_divided if name == DIVIDED else partial(self._route, ROUTERS[name])
            router.register_forward_hook(partial(hook, layer))

    def use(self, experts: Tensor | None) -> None:
        """Make the next pass use ``experts`` [tokens, layers · k] (uint8 or int32); None: the routers' own choice.

        They stay until the next call: with gradient checkpointing the backward pass routes again, and must do so like
        the forward pass.
        """
        if experts is None:
            self._experts = None
            return
        if experts.shape[-1] != self._layers * self._k:
            raise UserError(
                f"the rollouts have {experts.shape[-1]} recorded experts per token, and the model uses "
                f"{self._k} in each of {self._layers} layers",
                hint="train the model that generated them",
            )
        self._experts = experts.view(-1, self._layers, self._k)

    def _route(
        self, weigh: Weigh, layer: int, router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._experts is None:
            return None
        logits, _, router_choice = output
        experts = _recorded_or_chosen(self._experts[:, layer], router_choice)
        return logits, weigh(router, logits, experts), experts

    def _route_divided(
        self, layer: int, router: Any, inputs: tuple[Tensor, Any], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._experts is None:
            return None
        from deepspeed.moe.ep_count import count_tokens_per_expert

        experts = _recorded_or_chosen(self._experts[:, layer], output[1])
        # The output has only the weights of the router's own choice, so the logits are computed again.
        weights = router.gate(inputs[0]).softmax(-1, dtype=torch.float32).gather(-1, experts)
        if router.route_norm:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * router.route_scale, experts, count_tokens_per_expert(experts, router.num_experts)


def _recorded_or_chosen(recorded: Tensor, router_choice: Tensor) -> Tensor:
    """Recorded experts [tokens, k] where they are known, otherwise the router's own."""
    recorded = recorded.to(router_choice.dtype)
    differ = recorded[:, :1] != recorded[:, 1:2]  # equal ids: unknown (records/experts.py)
    return torch.where(differ.expand_as(router_choice), recorded, router_choice)


def replayed_routers(model: Any) -> dict[int, Any]:
    """Return a model's routers by the index of their layer. Raises ``UserError`` if none can be replayed."""
    model_type = model.config.get_text_config().model_type
    routers: dict[int, Any] = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(f"{name}.")
        if layer is not None and type(module).__name__ in (*ROUTERS, DIVIDED):
            routers[int(layer[1])] = module
    if not routers:
        raise UserError(
            f"router_replay: {model_type} has no router that can replay experts",
            location="algorithm.router_replay",
            hint="set it to false; it is for " + ", ".join(name.partition("Top")[0] for name in ROUTERS),
        )
    if (expert_count := min(router.top_k for router in routers.values())) < 2:
        raise UserError(
            f"router_replay: each token of this {model_type} uses {expert_count} expert in a layer",
            location="algorithm.router_replay",
            hint="set it to false; it needs two experts per token or more",
        )
    return routers
