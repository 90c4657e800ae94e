"""Has vLLM check a spec's engine settings in a separate process: its imports would keep 700 MB until a run's end.

    python -m asyncrl_cli.checks.programs PARENT SPEC FOLDER

It ends with the process that has the id PARENT. The line with ANSWER is a JSON list: the result, or a mistake's
message, location and hint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.load import dump_spec, load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.process_tree import die_with

LIMIT_S = 180.0
"""Time limit of the program in seconds. A cold disk takes most of it."""


def check_engine(spec: ExperimentSpec, references: Mapping[tuple[str, ...], str], folder: Path, model_dir: str) -> str:
    """Have vLLM check a spec's engine settings, without starting an engine. ``folder`` is for temporary files,
    ``model_dir`` has the model's config and tokenizer. Raises ``ConfigError`` for invalid settings."""
    spec_file = folder / "spec.yaml"
    spec_file.write_text(dump_spec(spec, references))
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(spec_file), model_dir]
    answers, reason = run_program(command, os.environ | {"TMPDIR": str(folder)}, LIMIT_S)
    if not answers:
        hint = "import vllm in Python to see why; `make install` installs the pinned one"
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


def check_settings(spec_file: str, folder: str) -> list[str]:
    """Return vLLM's architecture and type for a spec, or the mistake that vLLM finds: message, location and hint."""
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


if __name__ == "__main__":
    parent, *arguments = sys.argv[1:]
    die_with(int(parent))
    print("ANSWER", json.dumps(check_settings(*arguments)), flush=True)
