"""Has vLLM check a spec's engine settings, without starting an engine.

    python -m asyncrl_cli.checks.engine SPEC FOLDER PARENT

FOLDER has the model's config and tokenizer. The process ends when the one with the id PARENT does. The line with ANSWER
is the result; a line with MISTAKE is a JSON list: message, location, hint.
"""

from __future__ import annotations

import json
import os
import sys

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.rollout.engine_settings import engine_config, engine_environment
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.system.process_tree import die_with


def main() -> None:
    """Check the settings of a spec, as the module's docstring says."""
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
