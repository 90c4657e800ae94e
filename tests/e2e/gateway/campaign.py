"""Many sessions of unmodified agents during one training.

    python -m tests.e2e.gateway.campaign --sessions 500
    python -m tests.e2e.gateway.campaign --sessions 200 --agents all --path .agents/bin
    python -m tests.e2e.gateway.campaign --audit RUN

Without ``--agents`` these are the libraries; ``all`` has in addition every program that is there
(``requirements/agents.sh`` installs them). Prints what was found, and exits with 1 if any check of ``sessions`` fails.
``--audit`` checks a run that has ended, without starting a new one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from asyncrl_cli.cli.app import main as asyncrl
from tests.e2e.conftest import Runs
from tests.e2e.gateway.installed import AGENTS, installed
from tests.e2e.gateway.sessions import audit, write_spec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500, help="minimum number; rounded up to a whole step")
    parser.add_argument("--agents", help="`all`, or names of program_agents.KINDS, separated by commas")
    parser.add_argument("--path", type=Path, default=AGENTS / "bin", help="the folder with the programs")
    parser.add_argument("--folder", type=Path, help="where the run is kept; default: a temporary folder")
    parser.add_argument("--audit", type=Path, metavar="RUN", help="check this run only")
    arguments = parser.parse_args()
    if arguments.audit:
        return _report(arguments.audit.resolve())
    kinds = _kinds(arguments.agents, arguments.path) if arguments.agents else []
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="sessions-"))
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(folder)
    sys.argv = ["asyncrl", "train", str(write_spec(runs, arguments.sessions, kinds, arguments.path))]
    try:
        asyncrl()
    except SystemExit as ended:
        if ended.code:
            return 1
    return _report(runs.newest())


def _kinds(wanted: str, path: Path) -> list[str]:
    there, missing = installed(path)
    for name, why in missing.items():
        print(f"skipped: {name}: {why}")
    return there if wanted == "all" else wanted.split(",")


def _report(run: Path) -> int:
    found = audit(run)
    print(f"\n{found}")
    for problem in found.problems:
        print(problem)
    print(f"run folder  {run}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
