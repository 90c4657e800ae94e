"""Has vLLM check a spec's engine settings in a separate process, without starting an engine.

    python -m asyncrl_cli.checks.engine SPEC FOLDER PARENT

FOLDER has the model's config and tokenizer. The process ends when the process with the id PARENT ends. The line with
ANSWER is a JSON list: the result, or a mistake's message, location and hint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from asyncrl_cli.checks.finding import run_program
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
    command = [sys.executable, "-m", __name__, str(spec_file), model_dir, str(os.getpid())]
    answers, last = run_program(command, os.environ | {"TMPDIR": str(folder)}, ENGINE_S)
    if not answers:
        hint = "`asyncrl doctor` shows whether vLLM can be imported here"
        raise ConfigError(f"vLLM cannot check its settings: {last}", location="rollout", hint=hint)
    found, *mistake = json.loads(answers[-1])
    if mistake:
        location, hint = mistake
        raise ConfigError(found, location=location, hint=hint)
    return str(found)


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
        answer = [error.message, error.location, error.hint]
    else:
        model = config.model_config
        answer = [f"vLLM takes {', '.join(model.architectures)} in {model.dtype}"]
    print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
