"""Rules for the model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.spec.base import LARGEST
from asyncrl_cli.spec.inputs import CHARACTERS, SLOT_RANKS
from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import divisors, rule, warning
from asyncrl_cli.spec.sections import ExperimentSpec

SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "max_position_embeddings",
)
"""Config keys that the rules read. Most architectures have them."""
CONFIG = "model.init.config"
HUB_ID = r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?"


def _sizes(spec: ExperimentSpec) -> dict[str, int]:
    """The valid values of ``SIZES`` in `model.init.config`."""
    config = _init_config(spec)
    sizes = {name: config.get(name) for name in SIZES}
    return {name: size for name, size in sizes.items() if type(size) is int and 1 <= size <= LARGEST}


def _init_config(spec: ExperimentSpec) -> Mapping[str, Any]:
    return spec.model.init.config if spec.model.init else {}


@rule
def one_model(spec: ExperimentSpec) -> Iterator[Problem]:
    """Exactly one of `model.path` and `model.init` is given."""
    if spec.model.path is None and spec.model.init is None:
        yield Problem("model", "missing", "give model.path (a saved model) or model.init (a new one)")
    if spec.model.path is not None and spec.model.init is not None:
        yield Problem("model.path", "cannot be combined with model.init", "set one of the two to null")


@rule
def saved_model_exists(spec: ExperimentSpec) -> Iterator[Problem]:
    """A `model.path`, `algorithm.reference_path` or `model.init.tokenizer` that is a path exists and is a folder."""
    hint = "name a saved model's folder, or a hub id such as `Qwen/Qwen3-0.6B`"
    for key, path in (("model.path", spec.model.path), ("algorithm.reference_path", spec.algorithm.reference_path)):
        if path is not None and os.path.isabs(path) and not os.path.isdir(path):
            yield Problem(key, f"{path} is not a folder", hint)
        elif path is not None and not os.path.isabs(path) and not re.fullmatch(HUB_ID, path):
            yield Problem(key, f"`{path}` is neither a folder nor a hub id", hint)
    tokenizer = spec.model.init.tokenizer if spec.model.init else CHARACTERS
    if tokenizer != CHARACTERS and not os.path.isdir(tokenizer):
        hint = f"name a saved tokenizer's folder, or `{CHARACTERS}`"
        yield Problem("model.init.tokenizer", f"{tokenizer} is not a folder", hint)


@rule
def warm_start_ends(spec: ExperimentSpec) -> Iterator[Problem]:
    """`model.warm_start` has `steps`, `epochs`, or both, its `data` has a path, and `evaluate_every` needs
    `held_out_rows`."""
    start, key = spec.model.warm_start, "model.warm_start"
    if start is None:
        return
    if not start.data.paths:
        yield Problem(f"{key}.data", "the task makes no rows with replies", "give path, such as sft.jsonl")
    if start.evaluate_every and not start.held_out_rows:
        yield Problem(f"{key}.evaluate_every", "there are no held-out rows to evaluate on", "set held_out_rows")
    if start.steps is None and start.epochs is None:
        yield Problem(key, "has neither steps nor epochs", "set steps, or epochs (passes over the rows)")


@rule
def adapter_to_start_from(spec: ExperimentSpec) -> Iterator[Problem]:
    """`model.lora.path` is a folder, and adapts a saved model: not one made by `model.init` or `model.warm_start`."""
    lora = spec.model.lora
    if lora is None or lora.path is None:
        return
    if not os.path.isdir(lora.path):
        hint = "name a folder with adapter_config.json, as peft writes it"
        yield Problem("model.lora.path", f"{lora.path} is not a folder", hint)
    if spec.model.path is None or spec.model.warm_start is not None:
        message = "an adapter belongs to a saved model, and this spec makes another one"
        yield Problem("model.lora.path", message, "name that model in model.path, without model.warm_start")


@rule
def chat_template_exists(spec: ExperimentSpec) -> Iterator[Problem]:
    """A `model.chat_template` is a file."""
    if spec.model.chat_template is not None and not os.path.isfile(spec.model.chat_template):
        hint = "name a Jinja file, or remove the key to use the tokenizer's own template"
        yield Problem("model.chat_template", f"{spec.model.chat_template} is not a file", hint)


@rule
def architecture_exists(spec: ExperimentSpec) -> Iterator[Problem]:
    """transformers has a causal language model of the type `model.init.architecture`."""
    name, architectures = spec.model.init.architecture if spec.model.init else "", _architectures()
    if spec.model.init and architectures and name not in architectures:
        hint = did_you_mean(name, architectures, "for a small model, use `qwen3` or `llama`")
        yield Problem("model.init.architecture", f"transformers has no causal language model of type `{name}`", hint)


@rule
def images_need_a_saved_model(spec: ExperimentSpec) -> Iterator[Problem]:
    """With `model.max_images`, `model.path` names a saved model: `model.init` makes models for text."""
    if spec.model.max_images and spec.model.init is not None:
        hint = "name a saved model in model.path (`asyncrl init vision` has a small one), or set it to 0"
        yield Problem("model.max_images", "model.init makes models for text", hint)


@rule
def images_are_trained(spec: ExperimentSpec) -> Iterator[Problem]:
    """With `model.max_images`, `trainer.sequence_parallel` is 1 and `model.lora.serve` is `merged`."""
    if spec.model.max_images and spec.trainer.sequence_parallel > 1:
        message = "sequences with images cannot be divided over ranks"
        yield Problem("trainer.sequence_parallel", message, "set it to 1, or model.max_images to 0")
    if spec.model.max_images and spec.model.published_adapter is not None:
        message = "engines apply no adapters next to a vision tower: it is not tested"
        yield Problem("model.lora.serve", message, "set it to merged, or model.max_images to 0")


MIXTURES = ("deepseek_v3", "glm4_moe", "mixtral", "qwen3_moe")
"""Mixtures of experts that were tested. For others, the checks before a run inspect the model."""
UNSERVED = {
    "gpt_oss": "vLLM's loader writes its experts and attention sinks in a way that does not support reloading weights",
}
"""Architectures that transformers can train but engines cannot update, and why."""


@rule
def architecture_is_served(spec: ExperimentSpec) -> Iterator[Problem]:
    """Engines can load new weights of `model.init.architecture`; for `gpt_oss` they cannot."""
    name = spec.model.init.architecture if spec.model.init else ""
    if name in UNSERVED:
        yield Problem("model.init.architecture", f"`{name}` cannot be trained: {UNSERVED[name]}", "use `qwen3_moe`")


DIVIDED = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
"""Architectures that can divide their experts among ranks, and the config key with the number of experts."""


@rule
def experts_are_divided(spec: ExperimentSpec) -> Iterator[Problem]:
    """With `trainer.expert_parallel`, `model.init.architecture` is `mixtral` or `qwen3_moe`."""
    name = spec.model.init.architecture if spec.model.init else ""
    if name and spec.trainer.expert_parallel > 1 and name not in DIVIDED:
        hint = f"set it to 1; it is for mixtures of experts: {', '.join(DIVIDED)}"
        yield Problem("trainer.expert_parallel", f"the experts of {name} cannot be divided among ranks", hint)


@cache
def _architectures() -> frozenset[str]:
    """The model types of transformers; empty if transformers is not found.

    They are read from its source, because importing it takes seconds. ``train.model.initial`` asks transformers itself
    before a run starts.
    """
    package = find_spec("transformers")
    source = Path(package.origin or "").parent / "models/auto/modeling_auto.py" if package else Path()
    if not source.is_file():
        return frozenset()
    _, _, mapping_source = source.read_text(encoding="utf-8").partition("\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    return frozenset(re.findall(r'\("([^"]+)", *"', mapping_source.partition("\n)")[0]))


@rule
def config_sizes(spec: ExperimentSpec) -> Iterator[Problem]:
    """Sizes in `model.init.config` (`hidden_size`, `num_hidden_layers`, heads, `head_dim`, `max_position_embeddings`)
    are whole numbers from 1."""
    config, sizes = _init_config(spec), _sizes(spec)
    for name in SIZES:
        # Some architectures read null as "follows from the others".
        if config.get(name) is not None and name not in sizes:
            message = f"must be a whole number from 1 to {LARGEST}"
            yield Problem(f"{CONFIG}.{name}", message, "write digits without quotes, such as 64")


@rule
def attention_heads(spec: ExperimentSpec) -> Iterator[Problem]:
    """In `model.init.config`, the heads divide the hidden size (or `head_dim` is given), the key-value heads divide the
    heads, and `trainer.sequence_parallel` divides the heads."""
    sizes = _sizes(spec)
    yield from head_problems(sizes, CONFIG)
    if "num_attention_heads" in sizes:
        heads = sizes["num_attention_heads"]
        kv_heads = sizes.get("num_key_value_heads", heads)
        yield from sequence_parallel_problems(heads, kv_heads, spec.trainer.sequence_parallel)


def sequence_parallel_problems(heads: int, kv_heads: int, size: int) -> Iterator[Problem]:
    """Yield a problem unless a model's attention heads can be divided into ``size`` equal shares.

    Ulysses needs ``size`` to divide the number of key-value heads, or this number to divide ``size``; in the second
    case several ranks have the same key-value heads.
    """
    if heads % size or (kv_heads % size and size % kv_heads):
        possible_sizes = [n for n in range(1, heads + 1) if not heads % n and not (kv_heads % n and n % kv_heads)]
        message = f"{heads} attention heads and {kv_heads} key-value heads have no equal shares for {size} ranks"
        yield Problem("trainer.sequence_parallel", message, f"use one of {', '.join(map(str, possible_sizes))}")


def head_problems(sizes: Mapping[str, int], path: str) -> Iterator[Problem]:
    """Yield problems with the attention heads of the config at ``path``. ``sizes`` may have defaults, too."""
    size, heads, kv_heads = map(sizes.get, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if size and heads and size % heads and not sizes.get("head_dim"):
        hint = f"use a multiple of {heads}, such as {size - size % heads + heads}, or give head_dim"
        yield Problem(f"{path}.hidden_size", f"{size} is not a multiple of {heads} heads", hint)
    if heads and kv_heads and heads % kv_heads:
        message = f"{kv_heads} does not divide the {heads} heads"
        yield Problem(f"{path}.num_key_value_heads", message, f"use one of {divisors(heads)}")


@rule
def positions(spec: ExperimentSpec) -> Iterator[Problem]:
    """`model.max_length` is at most `max_position_embeddings`, if the config has it."""
    yield from position_problems(_sizes(spec), spec.model.max_length)


def position_problems(sizes: Mapping[str, int], max_length: int) -> Iterator[Problem]:
    """Yield a problem if the model has fewer positions than ``max_length``."""
    limit = sizes.get("max_position_embeddings")
    if limit is not None and limit < max_length:
        message = f"{max_length} is more than the model's {limit} positions"
        yield Problem("model.max_length", message, f"lower it to {limit}, or raise max_position_embeddings")


@rule
def adapter_for_engines(spec: ExperimentSpec) -> Iterator[Problem]:
    """With `model.lora.serve: adapter`, vLLM has slots for `model.lora.rank` and kernels for `rollout.dtype`, engines
    do not quantize weights, and a mixture of experts has engines on GPUs."""
    lora, init = spec.model.published_adapter, spec.model.init
    routed = init is not None and init.architecture in MIXTURES
    if lora is not None and routed and not spec.rollout.gpus_per_engine:
        message = "with adapters vLLM computes a mixture of experts on GPUs only"
        yield Problem("model.lora.serve", message, "set it to merged, or use engines on GPUs (rollout.gpus_per_engine)")
    if lora is not None and lora.rank > SLOT_RANKS[-1]:
        message = f"vLLM applies adapters of rank {SLOT_RANKS[-1]} at most"
        yield Problem("model.lora.rank", message, "lower it, or set model.lora.serve to merged")
    if lora is not None and spec.rollout.gpus_per_engine and spec.rollout.dtype == "float32":
        message = "vLLM has no float32 kernels for adapters on GPUs"
        yield Problem("rollout.dtype", message, "set it to bfloat16, or model.lora.serve to merged")
    if lora is not None and spec.rollout.engine_args.get("quantization") is not None:
        message = "adapters together with quantized weights are not tested"
        yield Problem("rollout.engine_args.quantization", message, "remove it, or set model.lora.serve to merged")


@rule
def cache_holds_a_rollout(spec: ExperimentSpec) -> Iterator[Problem]:
    """`rollout.kv_cache_mb` holds a sequence of `model.max_length`, if `model.init.config` defines its size. It is for
    engines on CPUs."""
    size, cache = _sizes(spec), spec.rollout.kv_cache_mb
    if cache is not None and spec.rollout.gpus_per_engine:
        hint = "remove it; rollout.engine_args.gpu_memory_utilization limits their memory"
        yield warning("rollout.kv_cache_mb", "has no effect on GPU engines", hint)
        return
    heads, layers = size.get("num_attention_heads"), size.get("num_hidden_layers")
    if cache is None or heads is None or layers is None or not ("head_dim" in size or "hidden_size" in size):
        return
    head_dim = size.get("head_dim") or size["hidden_size"] // heads
    item = {"float32": 4, "bfloat16": 2}[spec.rollout.dtype]
    required_bytes = 2 * layers * size.get("num_key_value_heads", heads) * head_dim * item * spec.model.max_length
    if cache * 2**20 < required_bytes:
        hint = f"raise it to {-(-required_bytes // 2**20)} or more, or remove it"
        message = f"{cache} MiB cannot hold a sequence of model.max_length {spec.model.max_length}"
        yield Problem("rollout.kv_cache_mb", message, hint)
