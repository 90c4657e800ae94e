"""Which processes belong to which part of a run."""

from __future__ import annotations

from pathlib import Path

from asyncrl_cli.system.reaper import marked_processes

TITLES: dict[str, str] = {
    "scorer": "ray::RewardActor",
    "trainer": "ray::TrainerWorker",
    "engine": "ray::RolloutWorker",
    "core": "VLLM::EngineCore",
    "gateway": "ray::GatewayActor",
    "agent": "ray::HostAgent",
    "player": "ray::EpisodeActor",
    "tracker": "asyncrl_cli.monitors.mlflow.tracker",
}
"""Text in the command line of each part's processes. ``engine`` is the actor, ``core`` the process behind it."""


def processes_of_part(mark: str, part: str) -> list[int]:
    """Living processes of one part of the run with this mark, in the order of their ids."""
    return sorted(pid for pid in marked_processes(mark) if TITLES[part] in _title(pid))


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
