"""Arithmetic and texts that the converters of several trainers share."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, NamedTuple, get_args

from asyncrl_cli.convert.source import Source
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.spec.sections import TrainerSpec

VIDEO, AUDIO = (f"asyncrl trains on text and images: {kind} in the data is dropped" for kind in ("video", "audio"))
PROCESSOR = "the limits of images are in the model's preprocessor_config.json: change them in a copy of the model"
_IMAGE_MODEL = re.compile(
    r"[-_.]VL\b|VL\d|\dV\b|MiniCPM-[ov]|Qwen3\.5|gemma-?3|pixtral|llava|vision|multimodal", re.IGNORECASE
)
_AUDIO_MODEL = re.compile(r"omni|audio", re.IGNORECASE)
IN_TURN = (
    "the other trainer generates and trains in turn, and so does `sync`: one part of the GPUs waits for the other. "
    "`mode: async` with `max_staleness: 1` uses all of them"
)
ASSUMED_STEPS = 100
"""Assumed number of steps if a run counts epochs and another number is a share of the steps: a configuration does not
have the number of prompts."""
ATTENTION = get_args(TrainerSpec.model_fields["attention"].annotation)
"""Values of `trainer.attention`."""

DISTILLATION: dict[str, Any] = {
    "algorithm.preset": "distill",
    "algorithm.advantage": "none",
    "algorithm.whiten_advantages": False,
    "algorithm.gamma": 0.0,
    "algorithm.reward_coef": 0.0,
    "algorithm.kl_coef": 1.0,
    "algorithm.kl_estimator": "k1",
    "algorithm.kl_placement": "reward",
    "algorithm.uniform_groups": "train",
}
"""On-policy distillation as in other trainers, which do not whiten advantages."""


class Devices(NamedTuple):
    """Numbers of trainer ranks and engines, and the GPUs of each. Below 1, a rank and an engine share a GPU."""

    ranks: int
    engines: int
    per_engine: float
    per_rank: float = 1


def split(total: int, per_engine: int) -> Devices:
    """Divide GPUs that trainer and engines used in turn, because in asyncrl both work at the same time.

    A single GPU is shared, and an engine has at most half of the GPUs.
    """
    if total <= 1:
        return Devices(1, engines=1, per_engine=0.5, per_rank=0.5)
    per_engine = min(per_engine, total // 2)
    engines = max(total // 2 // per_engine, 1)
    return Devices(max(total - engines * per_engine, 1), engines, per_engine)


def divided(source: Source, found: Devices, total: int) -> None:
    """Add a remark about the division of GPUs that the other trainer uses for both in turn."""
    generating = int(found.engines * found.per_engine)
    text = (
        f"the other trainer uses {counted(total, 'GPU')} for both in turn. Here {found.ranks} train and {generating} "
        f"generate, {found.ranks + generating} in total"
    )
    if found.per_rank < 1:
        text = "engine and rank share one GPU, half each; in mode sync the engine sleeps during training"
    source.remark("trainer.ranks", text)


def run_name(text: object) -> str | None:
    """Return a valid run name made from a text, or None if no valid character is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).strip("-._")[:64] or None if text else None


def model_path(path: Any, source: Source) -> Any:
    """Return `model.path`. A model for audio is unsupported, because its data probably has audio."""
    if _AUDIO_MODEL.search(PurePosixPath(str(path)).name):
        source.unsupported.append(f"{path} is a model for audio: {AUDIO}")
    return path


def sees_images(path: Any) -> bool:
    """Return True if the name of a model says that it is made for images."""
    return bool(_IMAGE_MODEL.search(PurePosixPath(str(path)).name))


def images(source: Source, path: Any, column: Any, limit: int, frozen: bool) -> dict[str, Any]:
    """Return the settings of a run with images, at most ``limit`` per prompt.

    Without ``limit`` and ``column``, a run has images if its model is made for them.
    """
    keys = ("model.max_images", "model.freeze", "data.train.image_column", "data.eval.image_column")
    if not limit and not column and not sees_images(path):
        return dict.fromkeys(keys)
    if not limit:
        source.remark("model.max_images", "the configuration has no number: raise it if a row has more images")
    if not column:
        source.remark("data.train.image_column", "name the column with images, often `images` or `image`")
    return dict(zip(keys, (limit or 1, ["vision"] if frozen else [], column, column), strict=True))


def running_rollouts(limit: int, group_size: int, groups: int, devices: Devices) -> int:
    """Return `rollout.max_running_rollouts`: an engine's share of ``groups``, at most the limit, at least one group."""
    return max(min(limit, -(-groups * group_size // devices.engines)), group_size)


def multiple(steps: float, of: int) -> int:
    """Round steps up to a multiple; 0 stays 0."""
    return -(-int(steps) // of) * of if steps > 0 else 0


def tracking(source: Source, name: str, project: Any) -> dict[str, Any]:
    """Return `tracking` from the key ``name``, which has one logger or a list of loggers."""
    loggers = source.get(name)
    listed = [str(logger).lower() for logger in (loggers if isinstance(loggers, list) else [loggers])]
    return {
        "tracking.mlflow": "mlflow" in listed,
        "tracking.tensorboard": "tensorboard" in listed,
        "tracking.wandb.project": project if "wandb" in listed else None,
    }
