"""Saving a model as a Hugging Face directory, beside what it has from the model that it was made from.

Invariant: ``generation_config.json`` is copied byte for byte. It names the tokens that end a reply; and transformers
loads, but does not save, one whose settings contradict each other, as those of some models on the hub do.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

GENERATION_CONFIG = "generation_config.json"


def save_model(model: Any, source: str | Path, folder: str | Path, **options: Any) -> None:
    """Write weights, config and generation config of a transformers model to ``folder``.

    ``source``: the folder, or the hub id, of the model that it was made from; it may be ``folder``. ``options`` are
    those of ``save_pretrained``.
    """
    from transformers import GenerationConfig

    from asyncrl_cli.train.model.tokenizer import without_progress_bars

    kept = generation_config_file(source)
    text = None if kept is None else kept.read_bytes()
    if text is not None:
        model.generation_config = GenerationConfig()
    with without_progress_bars():
        model.save_pretrained(folder, **options)
    if text is not None:
        (Path(folder) / GENERATION_CONFIG).write_bytes(text)


def copy_generation_config(source: str | Path, folder: Path) -> None:
    """Copy a model's generation config, if it has one; ``source`` as in ``save_model``."""
    if (kept := generation_config_file(source)) is not None:
        shutil.copyfile(kept, folder / GENERATION_CONFIG)


def generation_config_file(source: str | Path) -> Path | None:
    """The generation config of a model's folder or hub id; None if it has none."""
    from transformers.utils import cached_file

    found = cached_file(
        str(source),
        GENERATION_CONFIG,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
