"""What a check found: `asyncrl doctor` looks at a machine, `asyncrl train --dry-run` at a spec on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failure"]
"""``failure``: a run cannot work. ``warning``: some runs cannot, or slowly."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it unless it is ``ok``."""

    check: str
    status: Status
    found: str
    hint: str = ""
