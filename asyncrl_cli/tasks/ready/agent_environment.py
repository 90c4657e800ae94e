"""Environment variables and files through which a third-party agent finds the policy, and no other server.

Every agent reads the base URL, key and model under its own names; all of them are set here. The home folder belongs to
the episode, and the user's own settings do not reach the agent: no files in the user's home folder, no variables such
as ``OPENAI_API_KEY``. The agent does what the policy asks for, and could otherwise call another server with the user's
key (decision 0034).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from asyncrl_cli.tasks.base import ModelAccess

FOREIGN = (
    *("OPENAI_", "ANTHROPIC_", "CLAUDE_CODE_", "CLAUDE_CONFIG_DIR", "CLAUDECODE", "CODEX_", "LITELLM_", "LLM_"),
    *("AIDER_", "MSWEA_", "OPENHANDS_"),
)
"""Prefixes of the variables with agents' settings. Agents do not inherit these variables from the run."""
QUIET: Mapping[str, str] = {
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
}
"""Keep agents from contacting other servers (telemetry, updates, price lists) and from asking for settings."""
HOME = "home"
"""The home folder, relative to the episode's folder."""
CODEX = ".codex"


def session_variables(model: ModelAccess, home: str) -> dict[str, str]:
    """Variables that lead an agent to its session and keep it from other servers. ``home``: the folder for its settings
    and caches."""
    root = model.base_url.removesuffix("/v1")  # clients of Anthropic's API add the version
    folders = {
        "XDG_CACHE_HOME": ".cache",
        "XDG_CONFIG_HOME": ".config",
        "XDG_DATA_HOME": ".local/share",
        "XDG_STATE_HOME": ".local/state",
        "CLAUDE_CONFIG_DIR": ".claude",
        "CODEX_HOME": CODEX,
        "MSWEA_GLOBAL_CONFIG_DIR": ".config/mini-swe-agent",
    }
    tiers = (f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("HAIKU", "SONNET", "OPUS", "FABLE"))
    plain = ("OPENAI_MODEL", "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *tiers)
    # These agents use litellm, which takes the protocol from the model's name.
    prefixed = ("AIDER_MODEL", "LLM_MODEL", "MSWEA_MODEL_NAME")
    return {
        **QUIET,
        "HOME": home,
        **{name: os.path.join(home, folder) for name, folder in folders.items()},
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL"), model.base_url),
        **dict.fromkeys(("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE"), root),
        **dict.fromkeys(("OPENAI_API_KEY", "LLM_API_KEY", "ANTHROPIC_API_KEY"), model.api_key),
        **dict.fromkeys(plain, model.model),
        **dict.fromkeys(prefixed, f"openai/{model.model}"),
    }


def home_files(model: ModelAccess) -> dict[str, str]:
    """Files for the episode's folder, by path: Codex reads its server only from a file."""
    # A JSON string is also a TOML string.
    config = f"""\
model = {json.dumps(model.model)}
model_provider = "asyncrl"
check_for_update_on_startup = false

[model_providers.asyncrl]
name = "asyncrl"
base_url = {json.dumps(model.base_url)}
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    return {f"{HOME}/{CODEX}/config.toml": config}


def inherited_by_agents(variables: Mapping[str, str]) -> dict[str, str]:
    """The run's environment without settings of agents."""
    return {name: value for name, value in variables.items() if not name.startswith(FOREIGN)}
