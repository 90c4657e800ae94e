"""Checks of a spec's model and functions before a run starts. Each check returns its result, or raises ``UserError``.

No weights are read or made: the model is built on torch's meta device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.core.errors import ConfigError, UserError
from asyncrl_cli.core.files import LFS_HINT, lfs_pointer
from asyncrl_cli.core.user_code import CODE_S, user_code
from asyncrl_cli.sizing.config import ask_hub, cached_config, one_line, saved_config
from asyncrl_cli.sizing.model import REFERENCE, SizedModel, sized, without_weights
from asyncrl_cli.spec.inputs import ModelSpec
from asyncrl_cli.spec.rules.model import UNSERVED
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.model.gpu_kernels import check_fused_model

MIN_VOCABULARY = 0.9
"""Smallest share of a model's token ids that its tokenizer has. Published models pad their vocabulary by up to 2 %."""


def check_saved_model(model: ModelSpec) -> Result:
    """Check that ``model.path`` is the folder of a saved model, or a model of the hub."""
    if model.path is None:
        return f"made from model.init ({model.init.architecture if model.init else ''})"
    return _check_saved(model.path, "model.path")


def _check_saved(path: str, location: str) -> Result:
    folder = Path(path)
    if not folder.is_absolute():
        return _check_hub_model(path, location)
    if folder.is_dir() and (pointer := lfs_pointer(folder)) is not None:
        raise ConfigError(f"{pointer} is a Git LFS pointer, not the file itself", location=location, hint=LFS_HINT)
    if not (folder / "config.json").is_file():
        hint = "name a folder that `save_pretrained` wrote, or a hub id"
        raise ConfigError(f"{folder} has no config.json", location=location, hint=hint)
    if not any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin")):
        hint = "copy its *.safetensors files there"
        raise ConfigError(f"{folder} has no weights", location=location, hint=hint)
    return str(folder)


def _check_hub_model(name: str, location: str) -> Result:
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError

    cached = cached_config(name) is not None
    try:
        if not (cached and constants.HF_HUB_OFFLINE):
            ask_hub(name)
    except RepositoryNotFoundError:
        hint = "correct its name; a private model needs HF_TOKEN in the environment"
        raise ConfigError(f"the hub has no model {name!r}", location=location, hint=hint) from None
    except Exception as error:  # network errors have many types
        if cached:
            return Warned(
                f"{name}, from the cache; the hub does not answer", "set HF_HUB_OFFLINE=1 to start without asking it"
            )
        raise ConfigError(
            f"there is no folder {name!r}, and the model hub does not answer: {one_line(error)}",
            location=location,
            hint="check the network (HF_ENDPOINT names another hub), or download the model and name its folder",
        ) from None
    return f"{name} on the hub" if not cached else f"{name}, from the cache"


def load_saved_tokenizer(load: Callable[[], Any], location: str = "model.path") -> Any:
    """Call ``load`` for a tokenizer. Raises ``ConfigError`` if it fails. ``location``: the model's key."""
    try:
        return load()
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"no tokenizer can be loaded: {one_line(error)}",
            location=location,
            hint="save the tokenizer to the model's folder (tokenizer.save_pretrained)",
        ) from error


def check_model(spec: ExperimentSpec, config: Any, tokenizer: Any) -> tuple[Result, SizedModel, ExperimentSpec]:
    """Check that transformers can build the model, that adapters find their layers, and that vocabulary and lengths
    fit. The spec that is returned has an attention that the model can be computed with."""
    key = "model.init.config" if spec.model.init is not None else "model.path"
    check_served(config, key)
    try:
        model = without_weights(config, spec.model)
    except Exception as error:  # any layer may raise
        model_kind = "vision-language model (model.max_images)" if spec.model.max_images else "causal language model"
        hint = "change the sizes in model.init.config" if spec.model.init else f"name a {model_kind}"
        message = f"transformers cannot build this {config.model_type}: {type(error).__name__}: {one_line(error)}"
        raise ConfigError(message, location=key, hint=hint) from error
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = tokenizer.get_vocab()
    token, largest = max(tokens.items(), key=lambda item: item[1])  # ids may have gaps
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer's token {token!r} has the id {largest}, and the model embeds {vocabulary} tokens",
            location=key,
            hint="use the tokenizer that belongs to the model",
        )
    if len(tokens) < MIN_VOCABULARY * vocabulary:
        raise ConfigError(
            f"the model has {vocabulary} token ids, and its tokenizer has only {len(tokens)} of them: the others have "
            "no text",
            location=key,
            hint="use the tokenizer that belongs to the model, or resize the model (resize_token_embeddings)",
        )
    _check_positions(config, spec.model.max_length, "the model")
    if spec.trainer.fused_kernels:
        check_fused_model(config)
    spec, reason = _possible_attention(spec, model)
    if spec.algorithm.router_replay:
        from asyncrl_cli.train.model.router_replay import replayed_routers

        replayed_routers(model)
    if spec.model.lora is not None:
        from asyncrl_cli.rollout.engine_settings import check_adapters
        from asyncrl_cli.train.model.adapter_folder import load_adapter
        from asyncrl_cli.train.model.lora import adapted_layers, add_adapters

        add_adapters(model, spec.model.lora, seed=0)
        if spec.model.lora.path is not None:
            load_adapter(model, spec.model.lora)
        if spec.model.published_adapter is not None:
            check_adapters(model, adapted_layers(model), spec.rollout.gpus_per_engine > 0)
    sized_model = sized(spec, config, model)
    text = f"{sized_model.name}, {_many(sized_model.parameters)} parameters"
    if spec.model.lora is not None:
        text += f", of adapters {_many(sized_model.trained)}"
    if reason is None:
        return text, sized_model, spec
    warned = Warned(f"{text}; attention by sdpa, because {reason}", "rows are padded, which takes more time")
    return warned, sized_model, spec


def _possible_attention(spec: ExperimentSpec, model: Any) -> tuple[ExperimentSpec, str | None]:
    """Return the spec, and None. If the default attention cannot compute the model's, return the spec with `sdpa`, and
    the reason. Raises ``ConfigError`` if the user has chosen it."""
    from asyncrl_cli.train.model.attention import why_not_varlen

    trainer = spec.trainer
    if trainer.attention != "varlen":
        return spec, None
    reason = why_not_varlen(model, bidirectional=spec.model.max_images > 0 and spec.rollout.gpus_per_engine > 0)
    if reason is None:
        return spec, None
    if "attention" in trainer.model_fields_set:
        raise ConfigError(f"varlen does not work: {reason}", location="trainer.attention", hint="use sdpa")
    packing = "packing" in trainer.model_fields_set and trainer.packing
    changes = {"trainer": trainer.model_copy(update={"attention": "sdpa", "packing": packing})}
    return spec.model_copy(update=changes), reason


def check_teacher(spec: ExperimentSpec, tokenizer: Any) -> Result:
    """Check that the model in ``algorithm.reference_path`` can score the policy's tokens: it exists, each token has the
    same id in both tokenizers, and sequences fit."""
    from asyncrl_cli.data.tokenizer import load_tokenizer
    from asyncrl_cli.train.model.sequence_parallel import check_config

    path = spec.algorithm.reference_path
    assert path is not None
    source = _check_saved(path, REFERENCE)
    teacher_ids = load_saved_tokenizer(lambda: load_tokenizer(path, None), REFERENCE).get_vocab()
    differing = ((id_, token) for token, id_ in tokenizer.get_vocab().items() if teacher_ids.get(token) != id_)
    if (mismatch := min(differing, default=None)) is not None:
        token_id, token = mismatch
        teacher = f"has the id {teacher_ids[token]} there" if token in teacher_ids else "does not exist there"
        raise ConfigError(
            f"{path} has another vocabulary: the policy's token {token!r} (id {token_id}) {teacher}",
            location=REFERENCE,
            hint="use a teacher of the policy's model family, with the same tokenizer",
        )
    config = saved_config(path, REFERENCE)
    _check_positions(config, spec.model.max_length, "the reference model")
    check_config(config, spec.trainer.sequence_parallel)
    return source


def _check_positions(config: Any, max_length: int, owner: str) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    scaled = "factor" in (getattr(config, "rope_parameters", None) or {})
    if isinstance(positions, int) and positions < max_length and not scaled:
        raise ConfigError(
            f"{max_length} tokens are more than {owner}'s {positions} positions",
            location="model.max_length",
            hint=f"lower it to {positions}",
        )


def check_served(config: Any, key: str) -> None:
    """Raise ``ConfigError`` if engines cannot load the model's published weights, or if it has no trainable weights.

    ``config`` is the model's config, ``key`` its key in the spec.
    """
    configs = (config, config.get_text_config())
    for model_type in {config.model_type for config in configs} & UNSERVED.keys():
        message = f"a {model_type} cannot be trained: {UNSERVED[model_type]}"
        raise ConfigError(message, location=key, hint="use another model; docs/models.md lists the tested models")
    if quantized := next(filter(None, (getattr(config, "quantization_config", None) for config in configs)), None):
        settings = quantized if isinstance(quantized, dict) else quantized.to_dict()
        method = settings.get("quant_method", "an unknown method")
        raise ConfigError(
            f"the checkpoint is quantized ({method}), and a trainer cannot update quantized weights",
            location=key,
            hint="use the model's bfloat16 checkpoint; engines on GPUs can quantize the published weights "
            "(rollout.engine_args.quantization: fp8_per_tensor)",
        )


def check_cache(spec: ExperimentSpec, config: Any) -> Result:
    """Check that a CPU engine's key-value cache has room for the longest sequence. Warn if it has none for a group."""
    from asyncrl_cli.rollout.engine_settings import cache_bytes_per_token, kv_cache_bytes

    config = config.get_text_config()
    if not (per_token := cache_bytes_per_token(spec, config)):
        text = f"not checked: the config of {config.model_type} does not give the size of a token's keys and values"
        if spec.rollout.kv_cache_mb is None:
            raise ConfigError(text, location="rollout.kv_cache_mb", hint="set rollout.kv_cache_mb")
        return Warned(text, "try a short run first")
    size = kv_cache_bytes(spec, per_token)
    tokens = size // per_token
    text = f"{size / 2**20:.0f} MiB, {tokens:,} tokens in each engine"
    if tokens < spec.model.max_length:
        raise ConfigError(
            f"room for {tokens} tokens is less than one sequence of model.max_length {spec.model.max_length}",
            location="rollout.kv_cache_mb",
            hint="raise it, or leave it out",
        )
    if tokens < spec.rollout.group_size * spec.rollout.longest_rollout:
        return Warned(f"{text}: less than a group of longest rollouts", "raise rollout.kv_cache_mb")
    return text


def check_algorithm(spec: ExperimentSpec, search_path: Path, notice: Callable[[str], None]) -> str:
    """Check that the objective's functions can be imported, and that user functions return valid results for a small
    batch."""
    import torch

    from asyncrl_cli.train.algorithms.advantages import check_advantages
    from asyncrl_cli.train.algorithms.objective import Objective
    from asyncrl_cli.train.algorithms.policy_loss import TokenLosses

    algorithm = spec.algorithm
    with user_code("importing the functions of algorithm", notice, CODE_S):
        objective = Objective.of(algorithm, search_path)
        location = "algorithm.advantage"
        try:
            if objective.advantage is not None and ":" in algorithm.advantage:
                rewards = torch.arange(2.0 * spec.rollout.group_size).reshape(2, -1) % 3
                # Every name is a metric here, because the task's metrics are not known yet.
                inputs = {"lengths": 1 + rewards.long(), "metrics": defaultdict(rewards.clone)}
                arguments = {name: inputs[name] for name in objective.asks}
                check_advantages(objective.advantage(rewards=rewards, **arguments), rewards)
            if ":" in algorithm.loss:
                location = "algorithm.loss"
                logprobs = torch.full((2, 4), -1.0, requires_grad=True)
                mask = torch.ones(2, 4, dtype=torch.bool)
                losses = objective.loss(logprobs, logprobs.detach(), torch.ones(2, 4), mask, objective.algorithm)
                if not isinstance(losses, TokenLosses) or losses.loss.shape != mask.shape:
                    raise TypeError(f"it must return TokenLosses of shape [rows, tokens], not {type(losses).__name__}")
        except Exception as error:  # user functions may raise any type
            name = getattr(algorithm, location.rpartition(".")[2])
            message = f"{name} fails on a small batch: {type(error).__name__}: {one_line(error)}"
            hint = "docs/algorithms.md describes the function"
            raise ConfigError(message, location=location, hint=hint) from error
    return f"advantage {algorithm.advantage}, loss {algorithm.loss}"


def _many(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
