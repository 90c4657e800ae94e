"""The exactness of this device's float32 products and bfloat16 models, repeated passes, and the output head."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl_cli.rollout.engine_settings import EXACT_PRODUCTS
from asyncrl_cli.sizing.config import COPIES
from asyncrl_cli.spec.sections import needs_no_mask
from gpu_report.runs import Bench
from gpu_report.specs import VOCABULARY

LAYERS = {"cuda": 16, "cpu": 2}
LARGEST_LOGIT = 40.0
"""Trained models of this size have logits like this; the rounding of bfloat16 grows with them."""
HEAD = {"cuda": (4096, 2560), "cpu": (16, 64)}
"""Positions and width; the vocabulary is Qwen3's."""
ROWS = {"cuda": (8, 600, 100), "cpu": (2, 20, 10)}
"""Rows of a repeated pass, their common prefix, and their own tokens."""
PASSES = 5
EXACT = 1e-5
"""The largest error of a float32 product, relative to its largest number. With TF32 it is about 3e-4."""


def numerics(bench: Bench) -> dict[str, Any]:
    """Products in float32, `check_policy` on two large bfloat16 models with random weights, and the head's speed."""
    models = ("Qwen--Qwen3-4B", "Qwen--Qwen3-30B-A3B")
    figures = {f"policy check, {name.partition('--')[2]}": policy_gaps(bench.device, name) for name in models}
    return {
        "float32 products, relative error": products(bench.device),
        **figures,
        "head": head(bench.device),
    }


def products(device: str) -> dict[str, Any]:
    """The error of torch's product, and of Triton's with and without the environment of a float32 engine."""
    import torch

    left, right = torch.randn(2, 512, 512, device=device)
    figures: dict[str, Any] = {"torch": relative_error(left @ right, left, right)}
    if device == "cuda":
        program = [sys.executable, str(Path(__file__).with_name("triton_product.py"))]
        for name, environment in (("Triton", {}), ("Triton as in engines", EXACT_PRODUCTS)):
            process = subprocess.run(
                program, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
            )
            if process.returncode:
                raise RuntimeError(f"{name}: {process.stderr[-2000:]}")
            figures[name] = float(process.stdout)
    for name in ("torch", "Triton as in engines"):
        if figures.get(name, 0.0) > EXACT:
            raise RuntimeError(f"float32 products are rounded: {figures}; allowed are {EXACT:g}")
    return figures


def relative_error(product: Any, left: Any, right: Any) -> float:
    """The largest error of a matrix product, relative to its largest number."""
    exact = left.double() @ right.double()
    return float((product.double() - exact).abs().max() / exact.abs().max())


def policy_gaps(device: str, name: str) -> dict[str, Any]:
    """The gap that `check_policy` judges, and its limit, padded and packed. Raises ``UserError`` as it does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from asyncrl_cli.sizing.activations import shortened
    from asyncrl_cli.train.model.policy import Policy, check_policy

    config = copy.deepcopy(AutoConfig.from_pretrained(COPIES / name))
    if device == "cpu":
        small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "num_experts": 8}
        config.update({key: value for key, value in small.items() if hasattr(config, key)})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            shortened(config, LAYERS[device]), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    with torch.no_grad():
        largest = model(input_ids=torch.arange(3, 19, device=device)[None]).logits.abs().max()
        model.get_output_embeddings().weight.mul_(LARGEST_LOGIT / largest)
    figures: dict[str, Any] = {}
    for how, packing in (("padded", False), ("packed", True)):
        policy = Policy(model, 1.0, packing)
        figures[f"gap, {how}"], figures["allowed"] = check_policy(policy, policy)
    return figures


def repeats(bench: Bench) -> dict[str, Any]:
    """Repeat a forward and backward pass by each kind of attention, alone and with shared prefixes.

    Each has its seconds, and the largest difference of a log-prob with and without shared prefixes. An attention that
    cannot be computed here has its error instead. Raises ``RuntimeError`` if equal passes have unequal gradients.
    """
    import torch

    figures: dict[str, Any] = {}
    names = ("sdpa", "varlen", "flash_attention_4") if bench.device == "cuda" else ("sdpa",)
    for attention in names:
        for dtype in (torch.bfloat16,) if needs_no_mask(attention) else (torch.float32, torch.bfloat16):
            name = f"{attention}, {str(dtype).removeprefix('torch.')}"
            try:
                figures |= {
                    f"{name}{way}": way_figures
                    for way, way_figures in _repeated(bench.device, attention, dtype).items()
                }
            except Exception as error:
                figures[name] = f"{type(error).__name__}: {str(error)[:300]}"
    if any(isinstance(passes, dict) and passes["unequal passes"] for passes in figures.values()):
        raise RuntimeError(f"equal passes have unequal gradients: {figures}")
    return figures


def _repeated(device: str, attention: str, dtype: Any) -> dict[str, dict[str, Any]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from asyncrl_cli.sizing.activations import shortened
    from asyncrl_cli.train.model.attention import ENVIRONMENT, install_attention
    from asyncrl_cli.train.model.pass_layout import moved
    from asyncrl_cli.train.model.policy import Policy
    from asyncrl_cli.train.prefix_trees import PrefixTree, TreeLayout

    install_attention()
    os.environ |= ENVIRONMENT
    rows, prefix, suffix = ROWS[device]
    config = shortened(AutoConfig.from_pretrained(COPIES / "Qwen--Qwen3-0.6B"), 2)
    if device == "cpu":
        config.update({"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    policy = Policy(model, 1.0, packing=needs_no_mask(attention))
    ids = torch.randint(config.vocab_size, (rows, prefix + suffix), device=device)
    ids[:, :prefix] = ids[0, :prefix].clone()
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row in range(rows):  # rows of different lengths
        mask[row, prefix : prefix + suffix - row * suffix // (2 * rows)] = True
    ways: dict[str, dict[str, Any]] = {"": {}}
    if not needs_no_mask(attention):
        tree = PrefixTree(tuple(range(rows)), (ids.shape[1] - 1,) * rows, (0,) + (prefix,) * (rows - 1))
        ways[", shared prefix"] = {"trees": moved(TreeLayout.of([tree], ids.shape[1], joined=False), device)}
    figures: dict[str, dict[str, Any]] = {}
    separate_logprobs: Any = None
    for way, arguments in ways.items():
        gradients, seconds = [], []
        for _ in range(PASSES):
            model.zero_grad()
            started = time.perf_counter()
            logprobs = policy(ids, mask, **arguments)
            logprobs.sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            gradients.append([weight.grad.clone() for weight in model.parameters()])
        separate_logprobs = logprobs.detach() if separate_logprobs is None else separate_logprobs
        figures[way] = {
            "unequal passes": sum(not all(map(torch.equal, gradients[0], repetition)) for repetition in gradients[1:]),
            "s": median(seconds[1:]),
            "difference (nats)": float((logprobs.detach() - separate_logprobs).abs().max()),
        }
    return figures


def head(device: str) -> dict[str, Any]:
    """Seconds of the output head's forward and backward pass, and how much longer that is than its four products."""
    import torch

    from asyncrl_cli.train.model.chunked_logprobs import chunked_logprobs

    positions, width = HEAD[device]
    layer = torch.nn.Linear(width, VOCABULARY, bias=False, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(positions, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(VOCABULARY, (positions,), device=device)

    def passes() -> None:
        logprobs, _ = chunked_logprobs(layer, hidden, targets, 1.0)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    def multiply() -> None:
        for _ in range(4):  # forward, again in the backward pass, and the gradients of states and weights
            hidden.detach() @ layer.weight.detach().T

    seconds, needed = timed(passes, device), timed(multiply, device)
    figures = {
        "tokens": positions,
        "s": seconds,
        "tokens/s": round(positions / seconds),
        "of its products": seconds / needed,
    }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        passes()
        figures["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    return figures


def timed(work: Any, device: str, rounds: int = 5) -> float:
    """The median seconds of a few calls, after one that warms up."""
    import torch

    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
