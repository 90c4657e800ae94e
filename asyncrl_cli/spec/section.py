"""What sections of a spec are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,32}$")]
NUL = "\0"


def _without_nul(path: Path | str | None) -> Path | str | None:
    if NUL in str(path):
        raise PydanticCustomError("nul", "holds a NUL character, which no path may")
    return path


SystemPath = AfterValidator(_without_nul)
"""Marks a field that holds a path: the system's calls take none with a NUL."""


class Section(BaseModel):
    """Base of every section.

    Unknown keys are errors, values do not change after validation, and nothing is converted on the quiet:
    the text "5" is no number and `true` is not 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
