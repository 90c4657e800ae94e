"""Converts all scripts of a copy of verl that start its trainers: `python -m tests.convert.verl_scripts FOLDER`.

Prints the scripts that are refused or need a change, with the first error, and the number that gave a valid spec.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from asyncrl_cli.cli.app import main

FOLDERS = (
    "examples/**/*trainer*/*.sh",
    "verl/experimental/fully_async_policy/**/*.sh",
    "verl/experimental/one_step_off_policy/**/*.sh",
)


def converted(script: Path) -> tuple[object, str]:
    """The exit code of the conversion without further arguments, and its standard error."""
    sys.argv = ["asyncrl", "convert", "verl", str(script)]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            return ended.code or 0, errors.getvalue()
    return 0, errors.getvalue()


if __name__ == "__main__":
    scripts = sorted({script for pattern in FOLDERS for script in Path(sys.argv[1]).glob(pattern)})
    valid = 0
    for script in scripts:
        code, errors = converted(script)
        valid += code == 0
        if code:
            problem = next(line for line in errors.splitlines() if line.startswith("error"))
            print(f"{code}  {script}: {problem}")
    print(f"{valid} of {len(scripts)} scripts give a valid spec")
