"""Has vLLM check a spec's engine settings in a separate process, without starting an engine.

    python -m asyncrl_cli.checks.engine SPEC FOLDER PARENT

FOLDER has the model's config and tokenizer. The process ends when the process with the id PARENT ends. The line with
ANSWER is the result; a line with MISTAKE is a JSON list: message, location, hint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.rollout.engine_settings import engine_config, engine_environment
from asyncrl_cli.spec.load import dump_spec, load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.process_tree import die_with

ENGINE_S = 180.0
"""Time limit for vLLM's check in seconds. A cold disk takes most of it."""


def check_engine(spec: ExperimentSpec, references: Mapping[tuple[str, ...], str], folder: Path, model_dir: str) -> str:
    """Have vLLM check its settings. ``folder`` is for temporary files. Raises ``ConfigError`` for invalid settings."""
    spec_file = folder / "spec.yaml"
    spec_file.write_text(dump_spec(spec, references))
    see_doctor = "`asyncrl doctor` shows whether vLLM can be imported here"
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(spec_file), model_dir, str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=ENGINE_S,
            env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"vLLM gave no answer within {ENGINE_S:.0f} s", location="rollout", hint=see_doctor) from None
    for line in done.stdout.splitlines():
        kind, _, answer = line.partition(" ")
        if kind == "ANSWER":
            return answer
        if kind == "MISTAKE":
            message, location, hint = json.loads(answer)
            raise ConfigError(message, location=location, hint=hint)
    last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    raise ConfigError(f"vLLM cannot check its settings: {last}", location="rollout", hint=see_doctor)


def main() -> None:
    """Check a spec's settings, as described in the module's docstring."""
    spec_file, folder, parent = sys.argv[1:]
    die_with(int(parent))
    spec = load_spec(spec_file).spec
    os.environ |= engine_environment(spec)
    try:
        _, config = engine_config(spec, folder, "dummy")
        parsers = spec.rollout.tool_parser, spec.rollout.reasoning_parser
        if any(name is not None for name in parsers):
            from transformers import AutoTokenizer

            ChatFormat(AutoTokenizer.from_pretrained(folder), *parsers)
    except ConfigError as error:
        print("MISTAKE", json.dumps([error.message, error.location, error.hint]), flush=True)
    else:
        model = config.model_config
        print("ANSWER", f"vLLM takes {', '.join(model.architectures)} in {model.dtype}", flush=True)


if __name__ == "__main__":
    main()
