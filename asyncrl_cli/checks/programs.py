"""Programs of checks, each in a separate process: vLLM's imports would keep 700 MB until a run's end.

    python -m asyncrl_cli.checks.programs PARENT PROGRAM ARGUMENT…

It ends with the process that has the id PARENT. The line with ANSWER is a JSON list: the result, or a mistake's
message, location and hint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.load import dump_spec, load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.process_tree import die_with

LIMIT_S = 180.0
"""Time limit of a program in seconds. A cold disk takes most of it."""


def import_library(library: str, gpu: bool) -> str:
    """Import vLLM, DeepSpeed or Ray, and have it use the GPUs or the CPU. Raises ``ConfigError`` if this fails."""
    start_s = time.perf_counter()
    command = _command(library, "cuda" if gpu else "cpu")
    with tempfile.TemporaryDirectory(prefix="asyncrl-check-") as folder:
        environment = os.environ | {"TMPDIR": folder} | ({} if gpu else {"DS_ACCELERATOR": "cpu"})
        answers, reason = run_program(command, environment, LIMIT_S)
    if not answers:
        raise ConfigError(reason, hint=f"import {library} in Python to see why; `make install` installs the pinned one")
    return f"{json.loads(answers[-1])[0]}, in {time.perf_counter() - start_s:.0f} s"


def check_engine(spec: ExperimentSpec, references: Mapping[tuple[str, ...], str], folder: Path, model_dir: str) -> str:
    """Have vLLM check a spec's engine settings, without starting an engine. ``folder`` is for temporary files,
    ``model_dir`` has the model's config and tokenizer. Raises ``ConfigError`` for invalid settings."""
    spec_file = folder / "spec.yaml"
    spec_file.write_text(dump_spec(spec, references))
    command = _command("engine", str(spec_file), model_dir)
    answers, reason = run_program(command, os.environ | {"TMPDIR": str(folder)}, LIMIT_S)
    if not answers:
        hint = "`asyncrl doctor` shows whether vLLM can be imported here"
        raise ConfigError(f"vLLM cannot check its settings: {reason}", location="rollout", hint=hint)
    text, *mistake = json.loads(answers[-1])
    if mistake:
        location, hint = mistake
        raise ConfigError(text, location=location, hint=hint)
    return str(text)


def run_program(command: list[str], environment: Mapping[str, str], limit_s: float) -> tuple[list[str], str]:
    """Return a program's answers (none if it failed) and the last line of its error output.

    It runs in its own session, which is killed afterwards, because libraries leave child processes behind.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return [], f"no answer within {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    answers = [line.removeprefix("ANSWER ") for line in output.splitlines() if line.startswith("ANSWER ")]
    reason = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return answers if process.returncode == 0 else [], reason


def _command(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "asyncrl_cli.checks.programs", str(os.getpid()), program, *arguments]


def _import_vllm(device: str) -> list[str]:
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401

    if current_platform.device_type != device:
        raise RuntimeError(f"uses {current_platform.device_type or 'no device'}")
    return [f"{vllm.__version__} on {device}"]


def _import_deepspeed(device: str) -> list[str]:
    import deepspeed
    import torch

    if not torch.distributed.is_gloo_available():
        raise RuntimeError("torch has no gloo")
    if device == "cuda":
        torch.zeros(1, device="cuda")
    name = deepspeed.accelerator.get_accelerator().device_name()
    if name != device:
        raise RuntimeError(f"uses {name}")
    return [f"{deepspeed.__version__} on {device}"]


def _import_ray(_device: str) -> list[str]:
    import ray

    return [str(ray.__version__)]


def _check_settings(spec_file: str, folder: str) -> list[str]:
    from asyncrl_cli.gateway.chat import ChatFormat
    from asyncrl_cli.rollout.engine_settings import engine_config, engine_environment

    spec = load_spec(spec_file).spec
    os.environ |= engine_environment(spec)
    try:
        _, config = engine_config(spec, folder, "dummy")
        parsers = spec.rollout.tool_parser, spec.rollout.reasoning_parser
        if any(name is not None for name in parsers):
            from transformers import AutoTokenizer

            ChatFormat(AutoTokenizer.from_pretrained(folder), *parsers)
    except ConfigError as error:
        return [error.message, error.location, error.hint]
    return [f"vLLM takes {', '.join(config.model_config.architectures)} in {config.model_config.dtype}"]


PROGRAMS: dict[str, Callable[..., list[str]]] = {
    "vLLM": _import_vllm,
    "DeepSpeed": _import_deepspeed,
    "Ray": _import_ray,
    "engine": _check_settings,
}

if __name__ == "__main__":
    parent, program, *arguments = sys.argv[1:]
    die_with(int(parent))
    print("ANSWER", json.dumps(PROGRAMS[program](*arguments)), flush=True)
