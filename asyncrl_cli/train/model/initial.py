"""The model that a run starts from: a saved one, or one made from the spec and kept for later runs.

A made model has a Hugging Face directory in ``<runs folder>/models/<key>``; the key is a digest of everything that
determines the weights. The directory appears complete or not at all.

A model is made in two parts, which can run at the same time in different processes. Engines need only the model stub
(config and tokenizer) to start with dummy weights; the weights follow.

Invariant: everything that depends on the tokenizer (the vocabulary's size, the special tokens) comes only from the
tokenizer, and the weights depend only on the stub and the seed. Weights are float32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli import __version__
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.files import atomic_folder, read_regular
from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.data.tokenizer import (
    CHAT_TEMPLATE,
    TEMPLATE_BYTES,
    character_tokenizer,
    load_tokenizer,
    with_chat_template,
)
from asyncrl_cli.spec.inputs import CHARACTERS, ModelInit, ModelSpec
from asyncrl_cli.spec.rules.model import SIZES, head_problems, position_problems
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.model.saving import copy_generation_config, copy_processor, model_class, save_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
"""Config keys that follow from the tokenizer."""

OLDER_NAMES = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Keys that every transformers config accepts and converts into its ``rope_parameters``."""


def model_key(spec: ExperimentSpec) -> str:
    """Return a digest of everything that determines the weights of ``model.init``."""
    model = spec.model.model_dump(mode="json", exclude={"lora", "warm_start"})
    model["chat_template"] = CHAT_TEMPLATE  # has no effect on a saved tokenizer
    if (text := spec.model.chat_template) is not None:
        model["chat_template"] = read_regular(text, TEMPLATE_BYTES).decode()
    facts = json.dumps({"asyncrl": __version__, "seed": spec.seed, **model}, sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def model_stub_path(model: ModelSpec, folder: Path) -> str:
    """Return where ``model_stub`` left config and tokenizer: ``folder``, or a saved model that is used unchanged."""
    return str(model.path) if model.init is None and model.chat_template is None else str(folder)


def model_stub(spec: ExperimentSpec, folder: Path) -> Path:
    """Return a folder with the model's config and tokenizer, from which an engine can start.

    Raises ``ConfigError`` for an invalid config or chat template.
    """
    model = spec.model
    if model.init is not None:
        write_model_stub(model.init, max_length=model.max_length, directory=folder, chat_template=model.chat_template)
    elif model.chat_template is not None:
        copy_model_stub(str(model.path), model.chat_template, folder)
    return Path(model_stub_path(model, folder))


def prepare_model(spec: ExperimentSpec) -> Path:
    """Return the folder of ``model.path``, or of the model that ``model.init`` describes, which is made unless it was
    made before. Raises ``ConfigError``."""
    model = spec.model
    if model.init is None:
        assert model.path is not None
        return Path(model.path)
    final = spec.runs_dir.absolute() / "models" / model_key(spec)
    if final.is_dir():
        return final
    try:
        with atomic_folder(final) as folder:
            build_initial_model(
                model.init,
                max_length=model.max_length,
                seed=spec.seed,
                directory=folder,
                chat_template=model.chat_template,
            )
    except OSError:
        if final.is_dir():  # another run made the same model at the same time
            return final
        raise
    return final


def build_initial_model(
    init: ModelInit, max_length: int, seed: int, directory: Path, chat_template: str | None = None
) -> None:
    """Write model stub and weights to ``directory``. Raises ``ConfigError``."""
    write_model_stub(init, max_length=max_length, directory=directory, chat_template=chat_template)
    write_weights(directory, seed)


def write_model_stub(init: ModelInit, max_length: int, directory: Path, chat_template: str | None = None) -> None:
    """Write config, generation config and tokenizer to ``directory``; needs no model code.

    ``max_length`` (tokens) becomes ``max_position_embeddings`` unless the config has it. ``chat_template``: a file's
    path, as in the spec. Raises ``ConfigError`` for an unknown architecture, unknown config keys, sizes that do not
    fit, and an invalid chat template.
    """
    is_new = init.tokenizer == CHARACTERS
    tokenizer = character_tokenizer(max_length) if is_new else _saved_tokenizer(init.tokenizer)
    tokenizer = with_chat_template(tokenizer, chat_template)
    special = {name: getattr(tokenizer, name) for name in FROM_TOKENIZER[1:]}
    config = _config(init, max_length, {"vocab_size": len(tokenizer), **special})
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    config.save_pretrained(directory)
    generation = {name: value for name, value in special.items() if value is not None}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def copy_model_stub(model: str, chat_template: str, directory: Path) -> None:
    """Write config and tokenizer of a saved model (a folder, or a hub id) to ``directory``, with another template.

    Raises ``ConfigError``, and the error of transformers if there is no such model.
    """
    from transformers import AutoConfig

    load_tokenizer(model, chat_template).save_pretrained(directory)
    AutoConfig.from_pretrained(model).save_pretrained(directory)
    copy_generation_config(model, directory)
    copy_processor(model, directory)


def write_weights(directory: Path, seed: int) -> None:
    """Add random float32 weights to the model stub in ``directory``; they depend only on ``seed``.

    Does not change the process's random state. Raises ``ConfigError`` if transformers cannot build the architecture.
    """
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = model_class(images=hasattr(config, "vision_config")).from_config(config, dtype=torch.float32)
        except Exception as error:
            raise ConfigError(
                f"transformers cannot build this {config.model_type}: {type(error).__name__}: {error}",
                location="model.init",
                hint="change the sizes in model.init.config",
            ) from error
    save_model(model, directory, directory)


def _saved_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {path!r}: {error}",
            location="model.init.tokenizer",
            hint="give the folder of a saved tokenizer, or `characters`",
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{path} has no end token, so no response could end",
            location="model.init.tokenizer",
            hint="set eos_token in its tokenizer_config.json",
        )
    return tokenizer


def _config(init: ModelInit, max_length: int, from_tokenizer: dict[str, Any]) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto import modeling_auto

    names: dict[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if init.architecture not in names or init.architecture not in CONFIG_MAPPING:
        raise ConfigError(
            f"transformers has no causal language model of type {init.architecture!r}",
            location="model.init.architecture",
            hint=did_you_mean(init.architecture, names, "for a small model, use qwen3 or llama"),
        )
    config_class = CONFIG_MAPPING[init.architecture]
    if "vision_config" in config_class.sub_configs:
        raise ConfigError(
            f"{init.architecture} is a model for images, and model.init makes models for text",
            location="model.init.architecture",
            hint="name a saved model in model.path; `asyncrl init vision` has a small one",
        )
    _check_keys(init.config, config_class)
    settings = {"max_position_embeddings": max_length, **init.config, **from_tokenizer}
    try:
        config = AutoConfig.for_model(init.architecture, **settings, architectures=[names[init.architecture]])
    except Exception as error:
        raise ConfigError(
            f"refused by {config_class.__name__}: {' '.join(str(error).split())}",
            location="model.init.config",
            hint="change the value that the message names",
        ) from error
    config.dtype = "float32"
    _check_sizes(config, max_length)
    return config


def _check_keys(settings: Mapping[str, Any], config_class: type[PreTrainedConfig]) -> None:
    """Refuse keys that the config class does not know: it would accept and ignore them."""
    known_keys = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    known_keys.add("head_dim")  # some classes do not declare it, although the model's code reads it (Qwen3-MoE)
    for key in settings:
        if key in FROM_TOKENIZER or config_class.attribute_map.get(key, key) in map(
            config_class.attribute_map.get, FROM_TOKENIZER
        ):
            raise ConfigError("follows from the tokenizer", location=f"model.init.config.{key}", hint="remove it")
        if key not in known_keys and key not in OLDER_NAMES:
            raise ConfigError(
                f"{config_class.__name__} has no {key!r}",
                location="model.init.config",
                hint=did_you_mean(key, known_keys, "remove it or correct its name"),
            )


def _check_sizes(config: PreTrainedConfig, max_length: int) -> None:
    """Apply the spec's rules to the config with the architecture's defaults: a trainer or an engine would fail later,
    and less clearly."""
    where, names = "model.init.config", (*SIZES, "intermediate_size")
    sizes = {name: size for name in names if isinstance(size := getattr(config, name, None), int)}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{size} is less than 1", location=f"{where}.{name}", hint="raise it")
    for problem in (*head_problems(sizes, where), *position_problems(sizes, max_length)):
        raise ConfigError(problem.message, location=problem.path, hint=problem.hint)
