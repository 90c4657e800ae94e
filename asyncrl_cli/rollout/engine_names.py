"""Names that the installed vLLM knows, read from its source: importing vLLM takes ten seconds and 700 MB.

Where vLLM's source has another shape than expected, nothing is known (None), and the engine itself refuses the name.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.suggest import did_you_mean


def engine_arguments() -> set[str] | None:
    """The names of vLLM's engine arguments."""
    found = {
        statement.target.id
        for node in _statements("engine/arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return found or None


def tool_parsers() -> set[str] | None:
    """The names of vLLM's tool parsers."""
    for node in _statements("tool_parsers/__init__.py"):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            (target,) = node.targets
            if isinstance(target, ast.Name) and target.id == "_TOOL_PARSERS_TO_REGISTER":
                return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return None


def check_engine_arguments(arguments: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Raises ``ConfigError`` for the first argument of ``rollout.engine_args`` that vLLM does not have."""
    for name in arguments:
        if known is not None and name not in known:
            written = name.strip("-").replace("-", "_")
            raise ConfigError(
                f"vLLM has no engine argument {name!r}",
                location=f"rollout.engine_args.{name}",
                hint=did_you_mean(written, known, "remove it; `vllm serve --help` lists the arguments"),
            )


def _statements(path: str) -> list[ast.stmt]:
    package = find_spec("vllm")  # does not import it
    if package is None or package.origin is None:
        return []
    file = Path(package.origin).parent / path
    return ast.parse(file.read_text()).body if file.is_file() else []
