"""Many sessions of unmodified agents during one training.

    python -m tests.e2e.gateway.campaign --sessions 500
    python -m tests.e2e.gateway.campaign --sessions 200 --agents all

Without ``--agents`` these are the libraries; ``all`` has in addition every program that is there
(``requirements/agents.sh`` installs them). Prints the audit, and exits with 1 if it finds a problem.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from asyncrl_cli.cli.app import main as asyncrl
from tests.e2e.conftest import Runs
from tests.e2e.gateway.installed import AGENTS, LIBRARIES, installed
from tests.e2e.gateway.program_sessions import CONTINUED, Findings
from tests.e2e.gateway.sessions import audit, write_spec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500, help="minimum number; rounded up to a whole step")
    parser.add_argument("--agents", help="`all`, or names of program_agents.KINDS, separated by commas")
    arguments = parser.parse_args()
    runs = Runs(Path(tempfile.mkdtemp(prefix="sessions-")))
    audited = train_agents(runs, arguments.sessions, arguments.agents)
    print(f"\n{audited}", *audited.problems, f"run folder  {runs.newest()}", sep="\n")
    return 1 if audited.problems else 0


def train_agents(runs: Runs, sessions: int, agents: str | None) -> Findings:
    """Train sessions of these agents. Exits with the run's code if it fails."""
    kinds = agents.split(",") if agents else list(LIBRARIES)
    if kinds == ["all"]:
        kinds, missing = installed()
        for name, reason in missing.items():
            print(f"skipped: {name}: {reason}")
    sys.argv = ["asyncrl", "train", str(write_spec(runs, sessions, kinds, AGENTS / "bin"))]
    try:
        asyncrl()
    except SystemExit as ended:
        if ended.code:
            raise
    audited = audit(runs.newest())
    if not all(audited.counts[name] for name in ("updates", "replies with tool calls", CONTINUED)):
        audited.problems.append("no update, no call of a tool, or no call that continued an earlier turn")
    return audited


if __name__ == "__main__":
    sys.exit(main())
