"""Many sessions of unmodified agent libraries during one training.

    python -m tests.e2e.gateway.campaign --sessions 500

Prints what was found, and ends with 1 when anything does not hold (see ``sessions``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from asyncrl_cli.cli.app import main as asyncrl
from tests.e2e.conftest import Runs
from tests.e2e.gateway.sessions import audit, write_spec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=500, help="at least so many, up to a whole step")
    parser.add_argument("--folder", type=Path, help="where the run is kept; a temporary folder when left out")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="sessions-"))
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(folder)
    sys.argv = ["asyncrl", "train", str(write_spec(runs, arguments.sessions))]
    try:
        asyncrl()
    except SystemExit as ended:
        if ended.code:
            return 1
    found = audit(runs.newest())
    print(f"\n{found}")
    for problem in found.problems:
        print(problem)
    print(f"run folder  {runs.newest()}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
