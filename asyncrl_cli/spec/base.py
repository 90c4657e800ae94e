"""The base class of the spec's sections, and the types that their fields share."""

from __future__ import annotations

import ast
import inspect
import os
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError

LARGEST = 2**31 - 1
"""Largest count. numpy, torch and vLLM store some counts in 32 bits."""
YEAR_S = 365 * 24 * 3600
NUL = "\0"

Count = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
MemoryMB = Annotated[int, Field(ge=64, le=LARGEST)]  # A Python process itself needs about 30.
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, strict=True)]
DecayRate = Annotated[float, Field(ge=0, lt=1, strict=True)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, le=10)]
Seconds = Annotated[float, Field(ge=0.001, le=YEAR_S)]
Temperature = Annotated[
    float, Field(ge=0.01, le=2)
]  # vLLM raises lower ones, so log-probs would differ, and refuses higher ones.
Text = Annotated[str, Field(min_length=1)]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,32}$")]
MODULE_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""A user's function or class, `module:name`, as a regular expression."""


def _fits_a_file_system(path: Path | str | None) -> Path | str | None:
    """Refuse invalid paths: with a NUL character, or with a name of more than 255 bytes."""
    text = str(path)
    if NUL in text:
        raise PydanticCustomError("nul", "a path cannot contain a NUL character")
    if len(os.fsencode(text)) > 4000 or any(len(os.fsencode(name)) > 255 for name in text.split("/")):
        raise PydanticCustomError("long_name", "too long: a file name may have 255 bytes, a path 4,000")
    return path


SystemPath = AfterValidator(_fits_a_file_system)
"""Marks a field that holds a path."""


def _whole_or_share(gpus: float) -> float:
    """Return 1.0 as 1, and refuse numbers such as 1.5: above 1, Ray assigns whole GPUs only."""
    if gpus > 1 and gpus != int(gpus):
        raise PydanticCustomError("gpus", "must be a whole number, or a share of one GPU such as 0.5")
    return int(gpus) if gpus == int(gpus) else gpus


Gpus = Annotated[float, Field(ge=0, le=LARGEST), AfterValidator(_whole_or_share)]
OneGpu = Annotated[float, Field(ge=0, le=1), AfterValidator(_whole_or_share)]
"""GPUs of a process: a whole number, or a share of one GPU."""


def pattern(expression: str, message: str) -> AfterValidator:
    """Annotation for a text that must match ``expression``. Other texts are refused with ``message``."""

    def check(text: str | None) -> str | None:
        if text is not None and not re.fullmatch(expression, text):
            raise PydanticCustomError("format", message)
        return text

    return AfterValidator(check)


@cache
def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field as one line, also of inherited fields, or nothing if there is no source.

    The source is parsed only when a description is shown: pydantic's way costs every start 30 to 80 ms (decision 0027).
    """
    try:
        (definition,) = ast.parse(inspect.getsource(section)).body
    except OSError:
        return {}
    assert isinstance(definition, ast.ClassDef)
    base = section.__base__
    inherited = descriptions(base) if base is not None and issubclass(base, Section) else {}
    return inherited | {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


class Section(BaseModel):
    """Base class of every section. The docstring below a field is its description.

    Unknown keys are errors, values are frozen, and nothing is converted: "5" is not a number, and `true` is not 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        for name, text in descriptions(cls).items():
            handler.resolve_ref_schema(schema)["properties"][name]["description"] = text
        return schema
