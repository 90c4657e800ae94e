"""The monitors that a spec names: TensorBoard, Weights & Biases, and classes of the user's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.monitors.base import Monitor
from asyncrl_cli.spec.sections import TrackingSpec

PROTOCOL = f"{Monitor.__module__}.{Monitor.__name__}"


def load_monitors(tracking: TrackingSpec, search_path: Path) -> list[Monitor]:
    """One of each, not started. ``search_path``: the folder of the user's modules. Raises ``ConfigError``, with the key
    of the spec, for one that cannot be made."""
    monitors: list[Monitor] = []
    if tracking.tensorboard:
        _require("tensorboard", "tracking.tensorboard")
        from asyncrl_cli.monitors.tensorboard import TensorBoard

        monitors.append(TensorBoard())
    if tracking.wandb is not None:
        _require("wandb", "tracking.wandb")
        from asyncrl_cli.monitors.wandb import WeightsAndBiases, check_key

        if tracking.wandb.mode == "online":
            check_key()
        monitors.append(WeightsAndBiases(tracking.wandb))
    for index, name in enumerate(tracking.monitors):
        monitors.append(_own(name, search_path, f"tracking.monitors.{index}"))
    return monitors


def _require(package: str, location: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"the package {package} is not installed", location=location, hint=f"pip install 'asyncrl[{package}]'"
        )


def _own(name: str, search_path: Path, location: str) -> Monitor:
    """The user's monitor that a spec calls ``module:Class``."""
    hint = f"name a subclass of {PROTOCOL} whose constructor needs no argument"
    found = import_named(name, search_path, location, hint)
    if not (isinstance(found, type) and issubclass(found, Monitor)):
        raise ConfigError(f"{name} is not a subclass of {PROTOCOL}", location=location, hint=hint)
    try:
        return found()
    except Exception as error:
        raise ConfigError(f"{name}() failed: {type(error).__name__}: {error}", location=location, hint=hint) from error
