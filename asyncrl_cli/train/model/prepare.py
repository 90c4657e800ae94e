"""The model a run starts from: a saved one, or one made from the spec and kept for the next run.

Made models lie in ``<runs folder>/models/<key>``, where the key is a digest of everything that decides the
weights. A folder appears there complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from asyncrl_cli import __version__
from asyncrl_cli.core.files import atomic_folder
from asyncrl_cli.spec.inputs import ModelSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.tasks.base import Task
from asyncrl_cli.train.model.tokenizer import CHAT_TEMPLATE


def model_key(spec: ExperimentSpec) -> str:
    """A digest of what decides the initial weights."""
    model = spec.model.model_dump(mode="json", exclude={"lora"})
    if spec.model.warm_start is not None:
        model["warm_start"].pop("threads")
        told = {"mix"} if spec.task.mix else {"use", "options"}
        model["task"] = spec.task.model_dump(mode="json", include=told)
    model["chat_template"] = CHAT_TEMPLATE  # of a saved tokenizer it is of no account
    if spec.model.chat_template is not None:
        model["chat_template"] = Path(spec.model.chat_template).read_text()
    facts = json.dumps({"asyncrl": __version__, "seed": spec.seed, **model}, sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def made_model_dir(spec: ExperimentSpec) -> Path | None:
    """Where the model lies once it is made; None when the spec names a saved model to use as it is."""
    if spec.model.init is None and spec.model.warm_start is None:
        return None
    return spec.runs_dir.absolute() / "models" / model_key(spec)


def skeleton_of(model: ModelSpec, folder: Path) -> str:
    """Where ``skeleton`` left config and tokenizer: ``folder``, or the saved model that is used as it is."""
    return str(model.path) if model.init is None and model.chat_template is None else str(folder)


def skeleton(spec: ExperimentSpec, folder: Path) -> Path:
    """A folder with the model's config and tokenizer, which is all that an engine starts from.

    Raises ``ModelInitError`` for a config that makes no model, and ``ChatTemplateError``.
    """
    from asyncrl_cli.train.model.initial import copy_skeleton, write_skeleton

    model = spec.model
    if model.init is not None:
        write_skeleton(model.init, model.max_length, folder, model.chat_template)
    elif model.chat_template is not None:
        copy_skeleton(str(model.path), model.chat_template, folder)
    return Path(skeleton_of(model, folder))


def prepare_model(
    spec: ExperimentSpec, load_task: Callable[[], Task], progress: Callable[[int, int, float], None]
) -> Path:
    """The folder of the initial model, made now unless it was made before.

    ``load_task`` is called only for a warm start, as importing a task takes its time. Raises ``ModelInitError``
    or ``WarmStartError``.
    """
    final = made_model_dir(spec)
    if final is None:
        assert spec.model.path is not None
        return Path(spec.model.path)
    if final.is_dir():
        return final
    try:
        with atomic_folder(final) as folder:
            _make(spec, load_task, folder, progress)
    except OSError:
        if not final.is_dir():  # another run has just made the same model
            raise
    return final


def _make(
    spec: ExperimentSpec, load_task: Callable[[], Task], folder: Path, progress: Callable[[int, int, float], None]
) -> None:
    from asyncrl_cli.train.model.initial import build_initial_model
    from asyncrl_cli.train.warm_start import warm_start

    model = spec.model
    if model.init is not None and model.warm_start is None:
        build_initial_model(model.init, model.max_length, spec.seed, folder, model.chat_template)
        return
    assert model.warm_start is not None
    with tempfile.TemporaryDirectory(prefix=".initial-", dir=folder.parent) as initial:
        source = Path(model.path or initial)
        if model.init is not None:
            build_initial_model(model.init, model.max_length, spec.seed, source, model.chat_template)
        warm_start(
            source,
            load_task(),
            model.warm_start,
            model.max_length,
            spec.seed,
            folder,
            progress,
            model.chat_template,
        )
