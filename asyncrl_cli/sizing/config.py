"""Finds the config of a spec's model without its weights: in its folder, in the hub's cache, among the copies next to
this file, or on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.sections import ExperimentSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

COPIES = Path(__file__).parent / "configs"
"""A `config.json` for each public model of specs/, in a folder with its hub id (`/` is `--`)."""
HUB_S = 5.0
"""Time limit (s) for the model hub's answer."""


def find_config(spec: ExperimentSpec, folder: Path) -> PreTrainedConfig:
    """Return the config. ``folder``: an empty folder, for the files of a model that ``model.init`` describes.

    Raises ``ConfigError`` if there is no config.
    """
    from asyncrl_cli.train.model.initial import write_model_stub

    model = spec.model
    if model.init is not None:
        write_model_stub(model.init, max_length=model.max_length, directory=folder, chat_template=model.chat_template)
        return load_config(folder, "model.init.config")
    assert model.path is not None
    return saved_config(model.path, "model.path")


def saved_config(path: str, location: str) -> PreTrainedConfig:
    """Return a saved model's config by its absolute path or hub id; ``location``: its key. Raises ``ConfigError``."""
    return load_config(Path(path) if Path(path).is_absolute() else _hub_folder(path, location), location)


def load_config(model: Path | str, location: str) -> PreTrainedConfig:
    """Load a saved model's config by its folder or hub id. Raises ``ConfigError``."""
    from transformers import AutoConfig

    try:
        # Explicitly False: with None, transformers asks on a terminal whether to run the folder's code.
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything for a broken file
        message = f"no model config: {one_line(error)}"
        hint = "transformers must know the model_type in its config.json; asyncrl runs no code from a model folder"
        raise ConfigError(message, location=location, hint=hint) from error


def cached_config(name: str) -> Path | None:
    """Return the cached config of a model on the hub, if any. Raises ``ConfigError`` for a name that is no hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        hint = "name a saved model's folder, or a hub id such as Qwen/Qwen3-0.6B"
        message = f"{name!r} is neither a folder nor a hub id: {one_line(error)}"
        raise ConfigError(message, location="model.path", hint=hint) from None
    return Path(cached) if isinstance(cached, str) else None


def ask_hub(name: str) -> None:
    """Check with one quick request that the hub has the model: a download would retry for half a minute."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    HfApi().model_info(name, timeout=HUB_S)


def _hub_folder(name: str, location: str) -> Path:
    from huggingface_hub import hf_hub_download

    if (cached := cached_config(name)) is not None:
        return cached.parent
    copy = COPIES / name.replace("/", "--")
    if copy.is_dir():
        return copy
    try:
        ask_hub(name)
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_S)).parent
    except Exception as error:  # network errors have many types
        raise ConfigError(
            f"the config of {name} is not on this machine, and the model hub does not answer: {one_line(error)}",
            location=location,
            hint="save the model's config.json in a folder, and name it with --set model.path=FOLDER"
            if location == "model.path"
            else "download the model, and name its folder",
        ) from None


def one_line(error: BaseException) -> str:
    """Return a library's error message in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or "no message"
    return text if len(text) <= 300 else f"{text[:300]}…"
