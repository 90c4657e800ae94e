"""The trained models: the policy, which turns token ids into log-probabilities of response tokens, and the critic.

Only positions that predict a response token reach the output head, and ``chunked_logprobs`` never holds all their
logits. With packing, rows go through the model in one sequence, without padding. With sequence parallelism, every rank
of a group has a slice of the positions (sequence_parallel.py). Rows with a common prefix form a tree (prefix_trees.py).
Input and output are the same in all cases, so no other module needs to know.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.train.flops import ModelFlops
from asyncrl_cli.train.model.chunked_logprobs import Entropy, chunked_logprobs
from asyncrl_cli.train.model.images import ImageInputs, Vision, states
from asyncrl_cli.train.model.pass_layout import PassLayout, moved
from asyncrl_cli.train.model.router_replay import RouterReplay
from asyncrl_cli.train.model.sequence_parallel import SequenceGroup, check_config
from asyncrl_cli.train.prefix_trees import PrefixTree, TreeLayout

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4 * 2**-8}
"""Differences of log-probs (nats) that ``check_policy`` allows, per nat of the largest logit: rounding errors of logits
and of the states before them are proportional to their size."""


class Policy(nn.Module):
    """A causal language model that answers with log-probabilities instead of logits."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        packing: bool = False,
        sequence: SequenceGroup | None = None,
        router_replay: bool = False,
        vision: Vision | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        """``packing``: rows are joined in one sequence; each begins at position 0 and sees only itself.
        ``router_replay``: ``forward`` takes each token's experts. ``vision``: for a model that sees images.
        ``shares_prefixes``: ``forward`` may get ``trees``.

        ``sequence``: the ranks that have the same rows; passes are collective over them. None: only this rank has them.
        Raises ``UserError`` when the model's output layer is not linear, the ranks cannot divide its sequences, or its
        routers cannot use recorded experts.
        """
        super().__init__()
        if not isinstance(model.get_output_embeddings(), nn.Linear):
            raise UserError(
                f"the output layer of this {model.config.model_type} is not linear", hint="use another model"
            )
        if sequence is not None:
            check_config(model.config, sequence.size)
        self.model = model
        self.flops = ModelFlops.of(model)
        self.temperature = temperature
        self.packing = packing
        self.sequence = sequence
        self.vision = vision
        self.shares_prefixes = shares_prefixes
        self.replay = RouterReplay(model) if router_replay else None

    def forward(
        self,
        input_ids: Tensor,
        response_mask: Tensor,
        entropy: Entropy = "none",
        experts: Tensor | None = None,
        images: ImageInputs | None = None,
        trees: TreeLayout | None = None,
        layout: PassLayout | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return log-probabilities (float32, nats, [rows, tokens]) of the tokens under ``response_mask``, else 0.

        ``input_ids``: int64 [rows, tokens], padded on the right. ``response_mask``: bool, same shape, never true at
        position 0. Right padding needs no attention mask: under causal attention no token sees later ones.
        ``experts``: [rows, tokens, layers · k], chosen in the pass that predicts each token (records/experts.py); None:
        the model's routers choose. ``images``: the rows' images, in every pass of a model that sees images; otherwise
        None. ``trees``: the rows' trees; then experts, [trees, S, layers · k], and images are by position of a tree.
        ``layout``: of the mask; None: it is made here, and a GPU's host waits for the mask.

        Unless ``entropy`` is "none", also return the entropies of the distributions that the tokens were drawn from,
        in the same shape, dtype and unit. Gradients flow through them only with "train".
        """
        layout = layout or layout_of(self, response_mask, trees)
        if self.replay is not None:
            if experts is not None and trees is None:
                experts = experts[:, 1:] if layout.packed is None else layout.packed.of_tokens(experts, shift=1)
                experts = experts if self.sequence is None else self.sequence.local_slice(experts)
            experts = None if experts is None else experts.flatten(0, 1)
            self.replay.use(experts)
        targets = input_ids.flatten().index_select(0, layout.scored)
        logprobs, entropies = chunked_logprobs(
            self.model.get_output_embeddings(),
            predicting_states(self, self.model.base_model, input_ids, layout, images, trees),
            targets if layout.local is None else targets.index_select(0, layout.local),
            temperature=self.temperature,
            entropy=entropy,
        )
        scored = at_tokens(logprobs, input_ids.shape, layout, self.sequence)
        return scored if entropy == "none" else (scored, at_tokens(entropies, input_ids.shape, layout, self.sequence))


class ValueModel(nn.Module):
    """The critic: the policy's architecture and initial weights with a linear head to one number, initialized to 0."""

    def __init__(self, backbone: Any, packing: bool = False, sequence: SequenceGroup | None = None) -> None:
        """``packing`` and ``sequence``: as in ``Policy``."""
        super().__init__()
        self.backbone = backbone
        self.flops = ModelFlops.of(backbone)
        self.packing = packing
        self.sequence = sequence
        width = backbone.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, bias=False, dtype=backbone.dtype)
        nn.init.zeros_(self.head.weight)

    def forward(
        self,
        input_ids: Tensor,
        response_mask: Tensor,
        images: ImageInputs | None = None,
        trees: TreeLayout | None = None,
        layout: PassLayout | None = None,
    ) -> Tensor:
        """Return values, float32 [rows, tokens]: the expectation before each token under ``response_mask``, else 0.

        Arguments are as in ``Policy``.
        """
        layout = layout or layout_of(self, response_mask, trees)
        hidden = predicting_states(self, self.backbone, input_ids, layout, images, trees)
        return at_tokens(self.head(hidden)[:, 0].float(), input_ids.shape, layout, self.sequence)


def layout_of(model: Policy | ValueModel, response_mask: Tensor, trees: TreeLayout | None) -> PassLayout:
    """Make the layout of a pass of ``model`` on the device of its mask. A GPU's host waits for the mask."""
    layout = PassLayout.of(response_mask.cpu(), model.packing, moved(trees, "cpu"), model.sequence)
    return moved(layout, response_mask.device)


def at_tokens(values: Tensor, shape: torch.Size, layout: PassLayout, sequence: SequenceGroup | None) -> Tensor:
    """Put the values of scored tokens into zeros of ``shape`` [rows, tokens]; collective if ranks share rows."""
    if sequence is not None and layout.local is not None:
        values = sequence.joined(values, layout.local, len(layout.scored))
    zeros = torch.zeros(shape.numel(), dtype=values.dtype, device=values.device)
    return zeros.scatter(0, layout.scored, values).view(shape)


def predicting_states(
    model: Policy | ValueModel,
    backbone: Any,
    input_ids: Tensor,
    layout: PassLayout,
    images: ImageInputs | None,
    trees: TreeLayout | None,
) -> Tensor:
    """Return hidden states of the positions before response tokens, row by row: [response tokens, width].

    If ranks share rows, the states are only the ones in this rank's slice. ``backbone``: the transformers model in
    ``model``, without its head.
    """
    packed = layout.packed
    hidden: Tensor
    if trees is not None:
        ids = trees.of_tokens(input_ids)
        arguments: dict[str, Any] = {"attention_mask": trees.masks(backbone.config, backbone.dtype)}
        if images is not None:
            hidden = states(backbone, ids=ids, positions=trees.positions, images=images, **arguments)
        else:
            hidden = backbone(
                input_ids=ids, position_ids=trees.positions, use_cache=False, **arguments
            ).last_hidden_state
        # Not by indexing: on a CPU its backward pass adds up a shared position's gradients in no fixed order.
        return nn.functional.embedding(layout.predicting, hidden.flatten(0, 1))
    ids, positions, arguments = input_ids[:, :-1], None, {}
    if packed is not None:
        ids, positions = packed.of_tokens(input_ids), packed.positions
        arguments = packed.attention_arguments(backbone)
    if model.sequence is not None:
        hidden = model.sequence.local_states(backbone, ids, positions, **arguments)
    elif images is not None:
        read_images = images.arranged((lambda matrix: matrix[:, :-1]) if packed is None else packed.of_tokens)
        hidden = states(backbone, ids, positions, read_images, **arguments)
    else:
        # Positions only for packed rows: from given positions a model makes a mask.
        arguments |= {} if positions is None else {"position_ids": positions}
        hidden = backbone(input_ids=ids, **arguments, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, layout.predicting)


def check_policy(policy: Policy, score: Callable[..., Tensor]) -> tuple[float, float]:
    """Raise ``UserError`` if a policy's log-probs differ from its model's logits. Returns gap and limit in nats.

    They differ if a model changes its logits after the output layer, or cannot be packed. Such a fault affects every
    token of a row, so we compare a row's median: in bfloat16 single tokens of a sound model may differ by any amount,
    because a router may choose other experts. ``score`` calls the policy; collective if the policy is. A model that
    sees images gets one. With shared prefixes the rows form a tree.
    """
    config = policy.model.config.get_text_config()
    ids = torch.arange(3, 19, device=policy.model.device).remainder(config.vocab_size).view(2, 8)
    mask = torch.tensor([[False] * 2 + [True] * 6, [False] + [True] * 5 + [False] * 2], device=ids.device)
    ids[1, 0] = ids[0, 0]
    # Without and with shared prefixes: the rows have the first token in common, and the image after it.
    ways: list[dict[str, Any]] = [{}]
    image_arguments: dict[str, Any] = {}
    shared = 1
    if policy.vision is not None:
        text = ids
        ids, mask, images = policy.vision.with_image(policy.model, ids, mask)
        ways[0]["images"], image_arguments = images, images.arguments_with_head()
        shared += ids.shape[1] - text.shape[1]
    if policy.shares_prefixes:
        tree = PrefixTree((0, 1), lengths=(ids.shape[1] - 1,) * 2, shared=(0, shared))
        trees = moved(TreeLayout.of([tree], ids.shape[1], policy.packing), ids.device)
        ways.append({"trees": trees})
        if policy.vision is not None:
            images = policy.vision.with_image(policy.model, text, mask[:, : text.shape[1]], tree.shared)[2]
            ways[1]["images"] = images.arranged(trees.of_tokens)
    full = nullcontext() if policy.sequence is None else policy.sequence.unused()
    with torch.no_grad():
        with full:
            logits = policy.model(input_ids=ids, use_cache=False, **image_arguments).logits
        logits = logits[:, :-1].float() / policy.temperature
        expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        tolerance = TOLERANCES.get(policy.model.dtype, TOLERANCES[torch.float32]) * max(1.0, logits.abs().max().item())
        for arguments in ways:
            gaps = (score(ids, mask, **arguments)[:, 1:] - expected).abs()
            medians = [row[row_mask].median().item() for row, row_mask in zip(gaps, mask[:, 1:], strict=True)]
            gap = max(medians)
            if not gap <= tolerance:
                how, hint = "", "use a model that neither caps nor scales the logits of its output layer"
                if "trees" in arguments:
                    how, hint = " with shared prefixes", "set trainer.share_prefixes to false"
                elif policy.packing:
                    how, hint = " with packing", "set trainer.packing to false"
                raise UserError(
                    f"log-probs of this {config.model_type}{how} are {gap:.2g} nats away from its own logits'; at most "
                    f"{tolerance:.2g} are rounding",
                    hint=hint,
                )
    return gap, tolerance
