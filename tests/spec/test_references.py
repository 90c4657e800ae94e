"""Secrets from the environment remain references in everything that is written."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.secrets import hide, hide_settings, is_secret, remember
from asyncrl_cli.gateway.actor import GatewaySetup
from asyncrl_cli.inspect.resolved import resolved_spec, spec_text
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.manifest import describe_start
from asyncrl_cli.spec.changes import check_changes
from asyncrl_cli.spec.load import LoadedSpec, dump_spec, load_spec, resolved
from asyncrl_cli.spec.problems import SpecError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.tasks.base import ModelAccess

pytestmark = pytest.mark.slow

SECRET = "s3cret-value-1"
SPEC = """
name: from-${env:TEAM}
model: {init: {architecture: llama, config: {hidden_size: "${env:WIDTH}"}}}
task:
  use: chain_sum
  options: {key: "${env:API_KEY}", pin: "${env:PIN}", deep: [{env: "a ${env:API_KEY} $${env:NO}"}]}
data: {eval: {path: "${env:HELD_OUT}"}}
rollout: {engines: "${env:ENGINES}", engine_args: {hf_token: "${env:API_KEY}"}}
tracking: {uri: "https://me:${env:API_KEY}@mlflow.example.com"}
checkpoints: {upload: "s3://${env:WHOM:-no one}"}
stop: {steps: 3}
"""


@pytest.fixture
def spec_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    settings = {"TEAM": "maths", "WIDTH": "64", "API_KEY": SECRET, "PIN": "123456", "ENGINES": "2"}
    for name, value in (settings | {"HELD_OUT": "rows.jsonl"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one"}\n')
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


def written(loaded: LoadedSpec, folder: Path) -> Path:
    folder.mkdir()
    (folder / "spec.yaml").write_text(dump_spec(loaded.spec, loaded.references))
    return folder / "spec.yaml"


def test_a_written_spec_has_references_and_loads_as_the_same_spec(spec_file: Path, tmp_path: Path) -> None:
    loaded = load_spec(spec_file)
    again = written(loaded, tmp_path / "run")
    text = again.read_text()
    assert SECRET not in text and "123456" not in text
    values = yaml.safe_load(text)
    assert values["task"]["options"]["deep"] == [{"env": "a ${env:API_KEY} $${env:NO}"}]
    assert values["tracking"]["uri"] == "https://me:${env:API_KEY}@mlflow.example.com"
    assert values["data"]["eval"]["path"] == f"{tmp_path}/${{env:HELD_OUT}}", "read from its own folder"
    # Values that other commands read as numbers, and values that determine the run, are written out.
    assert (values["rollout"]["engines"], values["name"]) == (2, "from-maths")
    assert values["model"]["init"]["config"]["hidden_size"] == 64
    reloaded = load_spec(again)
    assert reloaded.spec == loaded.spec
    assert dump_spec(reloaded.spec, reloaded.references) == text
    assert SECRET not in json.dumps(resolved(loaded))


def test_a_run_keeps_its_model_and_takes_a_new_secret(
    spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_spec(spec_file)
    again = written(loaded, tmp_path / "run")
    for name in ("TEAM", "WIDTH"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("API_KEY", "another-secret")
    spec = load_spec(again).spec
    assert (spec.name, spec.task.options["key"]) == ("from-maths", "another-secret")
    changed = load_spec(again, ["checkpoints.upload=s3://${env:API_KEY}"])
    assert check_changes(spec, changed.spec, changed.references) == ["checkpoints.upload=s3://${env:API_KEY}"]
    monkeypatch.delenv("API_KEY")
    with pytest.raises(SpecError) as error:
        load_spec(again)
    assert "tracking.uri: environment variable API_KEY is not set" in str(error.value)
    assert "export it" in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(
    "assignment",
    [
        "stop.steps=${env:API_KEY}",
        "pipeline.mode=${env:API_KEY}",
        "tracking.monitors=[${env:API_KEY}]",
        "trainer.ranks=!!int ${env:API_KEY}",
        "rollout.max_running_rollouts=[https://me:${env:API_KEY}@host]",
    ],
)
def test_no_error_quotes_a_secret(spec_file: Path, assignment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", long := SECRET + 80 * "x")
    with pytest.raises(SpecError) as error:
        load_spec(spec_file, [assignment])
    assert SECRET not in str(error.value), long
    assert SECRET not in repr(error.value.problems)
    assert SECRET not in str(RunError(f"the judge answered 401 to {long}", location=long, hint=long))


def test_no_page_of_a_run_shows_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, hook = "https://me:opensesame@mlflow.example.com/x", "https://hooks.example.com/services/opensesame"
    file = tmp_path / "spec.yaml"
    file.write_text(
        "model: {init: {architecture: llama, config: {}}}\nstop: {steps: 3}\n"
        f"task: {{use: chain_sum, options: {{webhook: '{hook}'}}}}\ntracking: {{uri: '{uri}'}}\n"
    )
    loaded = load_spec(file)
    run = RunDirectory.create(tmp_path / "runs", "test")
    run.begin(dump_spec(loaded.spec, loaded.references), 3)
    assert load_spec(run.path / "spec.yaml").spec == loaded.spec
    shown: dict[str, Any] = resolved_spec(run)
    assert shown["tracking"]["uri"] == "https://***@mlflow.example.com/x"
    assert shown["task"]["options"]["webhook"] == "https://hooks.example.com/***"
    assert "opensesame" not in str(shown)
    assert stat.S_IMODE((run.path / "spec.yaml").stat().st_mode) == 0o600
    monkeypatch.setattr(
        sys, "argv", ["asyncrl", "train", "--set", f"tracking.uri={uri}", f"task.options.webhook={hook}"]
    )
    assert "opensesame" not in str(describe_start(file)["command"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no answer from postgresql+psycopg://me:a%20b/@db:5432/x", None),
        ("see https://example.com/a@b and sqlite:////tmp/a.db", "see https://example.com/a@b and sqlite:////tmp/a.db"),
        ("hf_abcdefghijklmnopqrstuv is not valid", "hf_*** is not valid"),
        ("mail me@example.com", "mail me@example.com"),
        ("github_pat_11ABCDEFG0123456789_x and glpat-0123456789abcdefghij", "github_pat_*** and glpat-***"),
        ("xoxb-123456789012-abcdefghij, AKIAIOSFODNN7EXAMPLE", "xoxb-***, AKIA***"),
        ("https://hooks.slack.com/services/T000/B000/opensesame", "https://hooks.slack.com/services/***"),
        ("GET /x?a=1&access_token=opensesame&b=2", "GET /x?a=1&access_token=***&b=2"),
        ("Authorization: Bearer opensesame.opensesame", "Authorization: Bearer ***"),
        ("the bearer of this, and --set a.monkey=1", "the bearer of this, and --set a.monkey=1"),
        ("OPENAI_API_KEY=opensesame a.py --password 'open sesame'", "OPENAI_API_KEY=*** a.py --password ***"),
        ("env -i HF_TOKEN=opensesame a --v --api-key=opensesame -b", "env -i HF_TOKEN=*** a --v --api-key=*** -b"),
        ("--token $TOKEN --key --port 8000 KEY=100000", "--token $TOKEN --key --port 8000 KEY=100000"),
        ("a key value, key=prompt, sorted(key=lambda)", "a key value, key=prompt, sorted(key=lambda)"),
        ("give `KEY=VALUE`, and --tokenizer folder", "give `KEY=VALUE`, and --tokenizer folder"),
    ],
)
def test_secrets_in_texts_are_hidden(text: str, shown: str | None) -> None:
    assert hide(text) == (text if shown is None else shown)


@pytest.mark.parametrize("text", ["a: &a [*a]\n", f"a: {'[' * 50_000}\n", "a: [\n", "- 1\n", "a: \x00\n"])
def test_resolved_spec_survives_a_file_that_no_run_writes(tmp_path: Path, text: str) -> None:
    run = RunDirectory.create(tmp_path / "runs", "test")
    run.write_text("spec.yaml", text)
    assert resolved_spec(run) in ({}, {"a": [None]})


def test_secrets_in_arguments_and_headers_are_hidden() -> None:
    settings = {
        "args": [
            "--token",
            "opensesame",
            "--api-key=opensesame",
            "--key",
            "--port",
            "8000",
            "name",
            "--column",
            "text",
        ],
        "headers": {"Cookie": "sess=opensesame", "Accept": "text/plain"},
        "command": "API_KEY=opensesame python a.py --password opensesame --column text",
    }
    assert hide_settings(settings) == {
        "args": ["--token", "***", "--api-key=***", "--key", "--port", "8000", "name", "--column", "text"],
        "headers": {"Cookie": "***", "Accept": "text/plain"},
        "command": "API_KEY=*** python a.py --password *** --column text",
    }


def test_hiding_is_linear_and_survives_every_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("a." * 500_000, "--key=" * 200_000, "--key '" * 200_000, "A_KEY" * 200_000, "-a" * 500_000):
        assert hide(word) == word, "a quadratic search would take an hour"
    arguments = ["a=&a [*a]", f"a={'[' * 10_000}", "a=2024-13-45"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert describe_start(tmp_path / "spec.yaml")["command"] == arguments


def test_settings_with_names_of_secrets_are_masked_wherever_a_spec_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "{API_KEY: opensesame, db_password: 'open, sesame', tokenizer: kept, max_tokens: '12', by: '${env:HOME}'}"
    file = tmp_path / "spec.yaml"
    file.write_text(f"model: {{path: m}}\ntask: {{use: chain_sum, options: {options}}}\nstop: {{steps: 3}}\n")
    run = RunDirectory.create(tmp_path / "runs", "test")
    monkeypatch.setattr(
        sys, "argv", ["asyncrl", "--set", "a.API_KEY=opensesame", "a={token: opensesame, b: 1}", "seed=3", "x=a: b: c"]
    )
    run.begin(file.read_text(), 3, describe_start(file))
    assert resolved_spec(run)["task"]["options"] == {
        "API_KEY": "***",
        "db_password": "***",
        "tokenizer": "kept",
        "max_tokens": "12",
        "by": "${env:HOME}",
    }
    assert "sesame" not in spec_text(run) and "kept" in spec_text(run)
    command = ["asyncrl", "--set", "a.API_KEY=***", "a={b: 1, token: '***'}", "seed=3", "x=a: b: c"]
    assert run.manifest["command"] == command
    modes = {stat.S_IMODE((run.path / name).stat().st_mode) for name in ("spec.yaml", "manifest.json")}
    assert modes == {0o600}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("API_KEY", True),
        ("apiKey", True),
        ("HFTOKEN", True),
        ("PGPASSWORD", True),
        ("SLACK_WEBHOOK", True),
        ("PGPASS", True),
        ("SSHKEY", True),
        ("OPENAIKEY", True),
        ("apikeys", True),
        ("Cookie", True),
        ("bypass", False),
        ("tokens_per_microbatch", False),
        ("MONKEY", False),
        ("AUTHOR", False),
        ("TOKENIZER", False),
        ("max_prompt_tokens", False),
        ("PASSES", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) == secret


def test_numbers_of_the_environment_are_not_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    remember("KEY_COUNT", "1234567")
    assert hide("1234567 keys") == "1234567 keys"


def test_printed_objects_do_not_show_keys() -> None:
    setup = GatewaySetup(ExperimentSpec.model_construct(), lambda: None, "m", b"opensesame", "opensesame")  # type: ignore[arg-type, return-value]
    assert "opensesame" not in repr(setup) + repr(ModelAccess("http://x", "opensesame", "m"))


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Z")), min_size=1))
@settings(max_examples=50)
def test_no_password_in_a_uri_is_shown(password: str) -> None:
    password = "".join(char for char in password if char not in "/?#'\"") or "x"
    assert hide(f"x https://me:{password}@host/path y") == "x https://***@host/path y"


KEY = "${env:API_KEY}"
TASKS = {
    "mix": (f'{{mix: [{{name: a, use: chain_sum, options: {{key: "{KEY}"}}}}]}}', 1),
    "mcp": (
        f'{{use: chain_sum, tools: {{mcp: {{a: {{url: "http://b/mcp", headers: {{Authorization: "Bearer {KEY}"}}}}, '
        f'c: {{command: d, args: ["--key={KEY}"], env: {{KEY: "{KEY}"}}}}}}}}}}',
        3,
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_options_of_a_mix_and_of_mcp_servers_stay_references(spec_file: Path, tmp_path: Path, name: str) -> None:
    task, count = TASKS[name]
    spec_file.write_text(f"{SPEC.partition('task:')[0]}task: {task}\nrollout: {SPEC.partition('rollout: ')[2]}")
    text = written(load_spec(spec_file), tmp_path / "run").read_text()
    assert SECRET not in text
    assert text.count(KEY) == count + text.count("hf_token") + text.count("mlflow.example.com")
