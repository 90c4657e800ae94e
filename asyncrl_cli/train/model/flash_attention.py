"""Requirements of flash attention (`trainer.attention`), by version. Nothing heavy is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from asyncrl_cli.core.errors import ConfigError


class Flash(NamedTuple):
    """One version's requirements."""

    package: str | None  # None: torch has the kernel
    install: str
    majors: range  # major compute capabilities of supported GPUs
    gpus: str


VERSIONS = {
    "varlen": Flash(None, "", range(8, 100), "Ampere or newer"),
    "flash_attention_2": Flash(
        "flash-attn", "pip install flash-attn --no-build-isolation", range(8, 100), "Ampere or newer"
    ),
    "flash_attention_3": Flash(
        "flash-attn-3",
        "pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu130",
        range(8, 10),
        "Ampere, Ada or Hopper (such as A100, H100)",
    ),
    "flash_attention_4": Flash(
        "flash-attn-4", "pip install flash-attn-4==4.0.0b36", range(9, 100), "Hopper or Blackwell (such as H100, B200)"
    ),
}


def check_attention(attention: str, major: int | None) -> None:
    """Raise ``ConfigError`` unless this machine can compute ``attention`` (`trainer.attention`).

    ``major``: the GPU's major compute capability; None: unknown.
    """
    needs = VERSIONS.get(attention)
    if needs is None:
        return
    if major is not None and major not in needs.majors:
        able = [name for name, version_needs in VERSIONS.items() if major in version_needs.majors]
        raise ConfigError(
            f"{attention} is for {needs.gpus}, and this GPU has compute capability {major}.x",
            location="trainer.attention",
            hint=f"use {' or '.join([*able, 'sdpa'])}",
        )
    if needs.package is None:
        return
    try:
        version(needs.package)
    except PackageNotFoundError:
        raise ConfigError(
            f"{attention} needs the package {needs.package}, which is not installed",
            location="trainer.attention",
            hint=f"{needs.install}, or use sdpa",
        ) from None
