"""Whether the experts that a run's engine recorded are those of its model."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import FILE, reading
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.train.model.initial import build_initial_model
from asyncrl_cli.train.model.policy import Policy
from asyncrl_cli.train.model.router_replay import replayed_routers
from asyncrl_cli.train.packing import pad_rows, training_rows


def check_recorded_experts(run: Path, folder: Path) -> None:
    """The experts in the journal are those that the routers of the initial model choose, token by token: in float32
    engine and trainer agree for almost all tokens. If rows were shifted by one token, they would disagree for about
    every second token."""
    from transformers import AutoModelForCausalLM

    spec = load_spec(run / "spec.yaml").spec
    assert spec.model.init is not None
    with reading(run / FILE) as connection:
        batch = read_batch(connection, 0)
    uniform = torch.zeros(len(batch.groups), dtype=torch.bool)
    padded = pad_rows([row for group in training_rows(batch, uniform, spec) for row in group])
    build_initial_model(spec.model.init, spec.model.max_length, spec.seed, folder)
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder), 1.0, router_replay=True)
    own: dict[int, torch.Tensor] = {}
    for layer, router in replayed_routers(policy.model).items():
        router.register_forward_hook(lambda _, __, output, layer=layer: own.update({layer: output[2]}))
    assert padded.experts is not None
    with torch.no_grad():
        policy(padded.input_ids, padded.response_mask)
        chosen = torch.stack([own[0], own[1]], dim=1).view(len(padded.input_ids), -1, 4)
        replayed = policy(padded.input_ids, padded.response_mask, experts=padded.experts)
    # All tokens of each row, including the prompt's, from the second one to the last sampled one.
    last = padded.response_mask.long().cumsum(1).argmax(1)
    read = torch.arange(1, padded.input_ids.shape[1])[None] <= last[:, None]
    recorded = padded.experts[:, 1:].view(*read.shape, 2, 2).sort(-1).values
    same = (recorded == chosen.view(*read.shape, 2, 2).sort(-1).values).all(-1)[read]
    assert same.float().mean() > 0.999
    mask = padded.response_mask
    assert (replayed - padded.behaviour_logprobs)[mask].abs().max() < 1e-3
