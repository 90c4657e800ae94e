"""Arithmetic and texts that the tables of several trainers share."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from asyncrl_cli.convert.config import ForeignConfig
from asyncrl_cli.convert.table import table

ASSUMED_STEPS = 100
"""Assumed number of steps if a run counts epochs and another number is a share of the steps: a configuration does not
have the number of prompts."""
_IMAGE_MODEL = re.compile(
    r"[-_.]VL\b|VL\d|\dV\b|MiniCPM-[ov]|Qwen3\.5|gemma-?3|pixtral|llava|vision|multimodal", re.IGNORECASE
)
_AUDIO_MODEL = re.compile(r"omni|audio", re.IGNORECASE)

DISTILLATION = {f"algorithm.{key}": value for key, value in table("shared").defaults.items()}
"""On-policy distillation as in other trainers, which do not whiten advantages."""


class Devices(NamedTuple):
    """Numbers of trainer ranks and engines, and the GPUs of each. Below 1, a rank and an engine share a GPU."""

    ranks: int
    engines: int
    per_engine: float
    per_rank: float = 1

    def running_rollouts(self, limit: int, group_size: int, groups: int) -> int:
        """Return `rollout.max_running_rollouts`: an engine's share of ``groups``, at most the limit, or one group."""
        return max(min(limit, -(-groups * group_size // self.engines)), group_size)


def divide_gpus(config: ForeignConfig, gpu_count: int, per_engine: int) -> Devices:
    """Divide GPUs that trainer and engines used in turn, because in asyncrl both work at the same time.

    A single GPU is shared, and an engine has at most half of the GPUs. Adds a remark.
    """
    if gpu_count <= 1:
        config.check("shared_gpu")
        return Devices(1, engines=1, per_engine=0.5, per_rank=0.5)
    per_engine = min(per_engine, gpu_count // 2)
    engines = max(gpu_count // 2 // per_engine, 1)
    ranks = max(gpu_count - engines * per_engine, 1)
    config.check("divided", gpus=gpu_count, ranks=ranks, engines=engines * per_engine)
    return Devices(ranks, engines, per_engine)


def run_name(text: object) -> str | None:
    """Return a valid run name made from a text, or None if no valid character is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).strip("-._")[:64] or None if text else None


def model_path(config: ForeignConfig, path: Any) -> Any:
    """Return `model.path`. A model for audio is unsupported, because its data probably has audio."""
    if _AUDIO_MODEL.search(PurePosixPath(str(path)).name):
        config.unsupported.append(f"{path} is a model for audio: asyncrl trains on text and images")
    return path


def sees_images(path: Any) -> bool:
    """Return True if the name of a model says that it is made for images."""
    return bool(_IMAGE_MODEL.search(PurePosixPath(str(path)).name))


def image_settings(config: ForeignConfig, path: Any, column: Any, limit: int, is_frozen: bool) -> dict[str, Any]:
    """Return the settings of a run with images, at most ``limit`` per prompt.

    Without ``limit`` and ``column``, a run has images if its model is made for them.
    """
    keys = ("model.max_images", "model.freeze", "data.train.image_column", "data.eval.image_column")
    if not limit and not column and not sees_images(path):
        return dict.fromkeys(keys)
    if not limit:
        config.check("image_limit")
    if not column:
        config.check("image_column")
    return dict(zip(keys, (limit or 1, ["vision"] if is_frozen else [], column, column), strict=True))


def multiple(steps: float, divisor: int) -> int:
    """Round steps up to a multiple of the divisor; 0 stays 0."""
    return -(-int(steps) // divisor) * divisor if steps > 0 else 0
