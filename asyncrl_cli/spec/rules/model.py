"""Rules of the model."""

from __future__ import annotations

import os
from collections.abc import Iterator

from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import divisors, rule
from asyncrl_cli.spec.sections import CHARACTERS, ExperimentSpec


@rule
def one_model(spec: ExperimentSpec) -> Iterator[Problem]:
    """The model has one source: `model.path` or `model.init`, not both."""
    if spec.model.path is None and spec.model.init is None:
        yield Problem("model", "says no model", "Give model.path (a saved one) or model.init (a new one).")
    if spec.model.path is not None and spec.model.init is not None:
        yield Problem("model.path", "is given, and model.init too", "Set one of the two to null.")


@rule
def saved_model_exists(spec: ExperimentSpec) -> Iterator[Problem]:
    """A `model.path` or `model.init.tokenizer` that is a path exists and is a folder."""
    if spec.model.path is not None and os.path.isabs(spec.model.path) and not os.path.isdir(spec.model.path):
        mend = "Name a saved model's folder, or a hub id."
        yield Problem("model.path", f"there is no folder {spec.model.path}", mend)
    tokenizer = spec.model.init.tokenizer if spec.model.init else CHARACTERS
    if tokenizer != CHARACTERS and not os.path.isdir(tokenizer):
        mend = f"Name a saved tokenizer's folder, or `{CHARACTERS}`."
        yield Problem("model.init.tokenizer", f"there is no folder {tokenizer}", mend)


@rule
def chat_template_exists(spec: ExperimentSpec) -> Iterator[Problem]:
    """A `model.chat_template` is a file."""
    if spec.model.chat_template is not None and not os.path.isfile(spec.model.chat_template):
        mend = "Name a Jinja file, or leave it out to use the tokenizer's own template."
        yield Problem("model.chat_template", f"there is no file {spec.model.chat_template}", mend)


@rule
def attention_heads(spec: ExperimentSpec) -> Iterator[Problem]:
    """In `model.init.config`, heads divide the hidden size (or `head_dim` is given), key-value heads divide heads."""
    config = spec.model.init.config if spec.model.init else {}

    def number(name: str) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and value > 0 else 0

    size, heads, kv_heads = map(number, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if size and heads and size % heads and not number("head_dim"):
        mend = f"Use a multiple of {heads}, such as {size - size % heads + heads}, or give head_dim."
        yield Problem("model.init.config.hidden_size", f"{size} cannot be split over {heads} heads", mend)
    if heads and kv_heads and heads % kv_heads:
        message = f"{kv_heads} key-value heads cannot share {heads} heads"
        yield Problem("model.init.config.num_key_value_heads", message, f"Use one of {divisors(heads)}.")


@rule
def positions(spec: ExperimentSpec) -> Iterator[Problem]:
    """`model.max_length` is within `max_position_embeddings`, where the config has it."""
    limit = spec.model.init.config.get("max_position_embeddings") if spec.model.init else None
    if isinstance(limit, int) and limit < spec.model.max_length:
        message = f"{spec.model.max_length} tokens are more than the model's {limit} positions"
        yield Problem("model.max_length", message, f"Lower it to {limit}, or raise max_position_embeddings.")
