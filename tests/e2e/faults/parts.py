"""Which processes belong to which part of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from asyncrl_cli.system.reaper import marked_processes

Part = Literal["driver", "scorer", "trainer", "engine", "core", "agent"]

TITLES: dict[str, str] = {
    "scorer": "ray::RewardActor",
    "trainer": "ray::TrainerWorker",
    "engine": "ray::RolloutWorker",
    "core": "VLLM::EngineCore",
    "gateway": "ray::GatewayActor",
    "agent": "ray::HostAgent",
}
"""How the command line of each part's processes begins. ``engine`` is the actor, ``core`` the process behind it."""


def processes_of_part(mark: str, part: str) -> list[int]:
    """Living processes of one part of the run with this mark, in the order of their ids."""
    return sorted(pid for pid in marked_processes(mark) if _title(pid).startswith(TITLES[part]))


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
