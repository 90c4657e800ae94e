"""The result of one check of `asyncrl doctor` (a machine) or `asyncrl train --dry-run` (a spec on this machine)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failure"]
"""``failure``: a run cannot work. ``warning``: some runs cannot work, or are slow."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and a hint on what to do unless the status is ``ok``."""

    check: str
    status: Status
    found: str
    hint: str = ""


def joined(check: str, *found: str | Finding) -> str | Finding:
    """Join the findings of one check; they are a warning if one of them is."""
    warnings = [one for one in found if isinstance(one, Finding)]
    text = "; ".join(filter(None, (one.found if isinstance(one, Finding) else one for one in found)))
    return Finding(check, "warning", text, "; ".join(one.hint for one in warnings)) if warnings else text
