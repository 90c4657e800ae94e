"""Fully asynchronous reinforcement learning of language models, from one YAML spec."""

from __future__ import annotations

from os import PathLike
from typing import Any

__version__ = "0.1.0"


def load_run(run: str | PathLike[str], runs_dir: str | PathLike[str] = "runs") -> Any:
    """Return the records of a run for pandas: an ``inspect.run_data.RunData`` (docs/python.md).

    ``run``: a run's id, a unique prefix of it, `latest`, or the path of its folder. Raises ``RunError`` if there is
    none.
    """
    from importlib import import_module

    # Not an import statement: packages that import this one for its version would depend on the whole of inspect/.
    return import_module("asyncrl_cli.inspect.run_data").find(run, runs_dir)
