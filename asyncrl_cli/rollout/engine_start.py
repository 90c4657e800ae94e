"""Starting vLLM: a mistake in the settings and a process that died are told apart.

A mistake comes back at every start, so there is no second try; it is a ``ConfigError``. A core process that was killed
is an ``ActorDied``.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.errors import ConfigError, RunError
from asyncrl_cli.rollout.engine_names import check_engine_arguments
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import ActorDied

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

CORE_FAILED = re.compile(r"Failed core proc\(s\): (\{.*?\})")
"""In vLLM's error: exit codes by process."""
RAISED = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)$")
"""The last line of a traceback in a log."""


def engine_config(spec: ExperimentSpec, model_dir: str, load_format: str) -> tuple[AsyncEngineArgs, VllmConfig]:
    """vLLM's arguments and configuration for a spec. Raises ``ConfigError`` when vLLM refuses them."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from asyncrl_cli.rollout.engine import engine_args

    own = spec.rollout.engine_args
    check_engine_arguments(own, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
    try:
        args = engine_args(spec, model_dir, load_format)
        return args, args.create_engine_config()
    except Exception as error:  # of pydantic, transformers or vLLM
        raise ConfigError(
            f"vLLM refuses the engine's settings: {_refusal(error)}",
            location="rollout.engine_args" if own else "rollout",
            hint=f"correct or remove the argument that it names ({', '.join(own)})"
            if own
            else "change the setting that it names, or use a model that vLLM serves",
        ) from error


def start_vllm(spec: ExperimentSpec, model_dir: str, load_format: str, log: Path | None = None) -> AsyncLLM:
    """A running engine. ``log`` is where this process writes its output.

    Raises ``ConfigError`` when vLLM refuses the settings, ``ActorDied`` when its core process was killed, and
    ``RunError`` with the cause that stands in ``log`` when the core failed by itself.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    args, config = engine_config(spec, model_dir, load_format)
    written = log.stat().st_size if log is not None and log.is_file() else 0
    try:
        return AsyncLLM.from_vllm_config(
            config, enable_log_requests=args.enable_log_requests, disable_log_stats=args.disable_log_stats
        )
    except RuntimeError as error:
        failed = CORE_FAILED.search(str(error))
        if failed is None:
            raise
        codes: dict[str, Any] = ast.literal_eval(failed[1])
        if any(isinstance(code, int) and code < 0 for code in codes.values()):
            raise ActorDied(f"vLLM's core process was killed ({failed[1]})", location="engine") from error
        cause = root_cause(log, written) if log is not None else None
        raise RunError(
            f"vLLM does not start: {cause or error}",
            location="rollout",
            hint="change the setting that it names" + (f"; {log} has vLLM's traceback" if log is not None else ""),
        ) from error


def root_cause(log: Path, start: int) -> str | None:
    """The error that a process wrote last to its log, from the byte ``start`` on; None when there is none."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    raised = [found[1] for line in lines if (found := RAISED.search(line)) and not CORE_FAILED.search(line)]
    return raised[-1] if raised else None


def _refusal(error: Exception) -> str:
    """What an error says, in a line."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else first["msg"]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
