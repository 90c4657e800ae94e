"""Which of the programs that ``requirements/agents.sh`` installs are on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from asyncrl_cli.sandbox.trial import problem
from asyncrl_cli.spec.inputs import SandboxSpec
from tests.e2e.conftest import ROOT

AGENTS = Path(os.environ.get("ASYNCRL_AGENTS", ROOT / ".agents"))
"""The folder with the programs."""
PROGRAMS = {
    "mini-swe-agent": "mini",
    "codex": "codex",
    "claude-code": "claude",
    "aider": "aider",
    "openhands": "openhands-python",
}
"""The kinds of ``program_agents``, and the file of each in the folder's ``bin``."""
LIBRARIES = ("plain", "streaming", "smolagents", "openai_agents", "openai_agents_responses")


def installed(path: Path = AGENTS / "bin") -> tuple[list[str], dict[str, str]]:
    """The kinds of agents that can run here, and why the others cannot."""
    missing, no_sandbox = {}, problem(SandboxSpec())
    for kind, file in PROGRAMS.items():
        if no_sandbox:
            missing[kind] = f"no bubblewrap sandbox here: {no_sandbox}"
        elif shutil.which(file, path=str(path)) is None:
            missing[kind] = f"there is no {file} in {path}; `make agents` installs it"
    return [*LIBRARIES, *(kind for kind in PROGRAMS if kind not in missing)], missing
