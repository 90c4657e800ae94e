"""Commands' environment: the session in every agent's variables, a separate home, and none of the user's settings."""

from __future__ import annotations

import tomllib
from pathlib import PurePath

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.tasks.ready.agent_environment import FOREIGN, home_files, inherited_by_agents, session_variables

ACCESS = ModelAccess("http://127.0.0.1:9/sessions/3-1/v1", 'a "key"\\', "policy", "3-1")
HOME = "/scratch/home"


def test_the_clients_of_both_apis_find_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in session_variables(ACCESS, HOME).items():
        monkeypatch.setenv(name, value)
    with openai.OpenAI() as client:
        assert (str(client.base_url), client.api_key) == (f"{ACCESS.base_url}/", ACCESS.api_key)
    with anthropic.Anthropic() as other:  # the client adds /v1
        assert (f"{str(other.base_url).rstrip('/')}/v1", other.api_key) == (ACCESS.base_url, ACCESS.api_key)


def test_codex_finds_its_server_in_a_file() -> None:
    variables, ((path, text),) = session_variables(ACCESS, HOME), home_files(ACCESS).items()
    assert PurePath(HOME).parent / path == PurePath(variables["CODEX_HOME"], "config.toml")
    config = tomllib.loads(text)
    provider = config["model_providers"][config["model_provider"]]
    assert (config["model"], provider["base_url"], provider["wire_api"]) == ("policy", ACCESS.base_url, "responses")
    assert variables[provider["env_key"]] == ACCESS.api_key


def test_all_settings_folders_are_in_the_episodes_home() -> None:
    variables = session_variables(ACCESS, HOME)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "CLAUDE_CONFIG_DIR"):
        assert PurePath(variables[name]).is_relative_to(HOME)


FOREIGN_NAMES = st.builds(str.__add__, st.sampled_from(FOREIGN), st.text("ABC_", max_size=8))


@given(st.dictionaries(st.one_of(FOREIGN_NAMES, st.text("XYZ_")), st.just("another's")))
def test_only_settings_of_agents_are_omitted(variables: dict[str, str]) -> None:
    inherited = inherited_by_agents(variables)
    for name in variables:
        assert (name in inherited) is (not name.startswith(FOREIGN))
