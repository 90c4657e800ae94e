"""Realistic specs that cannot work are refused before a process starts, with the wrong key and a hint.

`asyncrl train` makes exactly these checks, in this order, before it creates the run's folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl_cli.checks import machine, programs, services
from asyncrl_cli.checks.start import StartChecks
from asyncrl_cli.core.errors import ConfigError, UserError
from asyncrl_cli.rollout.engine_settings import engine_config
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.problems import SpecError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.model.initial import write_model_stub

pytestmark = pytest.mark.slow

SPEC = """
model:
  init:
    architecture: qwen3
    config: {hidden_size: 96, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 3,
             num_key_value_heads: 1, head_dim: 32}
  max_length: 256
task: {use: chain_sum}
data: {train: {size: 40}, eval: {size: 16}}
rollout: {max_prompt_tokens: 32, max_response_tokens: 192, max_running_rollouts: 64}
pipeline: {groups_per_step: 8}
stop: {steps: 20}
"""
CONFIG = "model.init.config"
WRONG = [
    # the model
    (f"{CONFIG}.hiden_size=96", CONFIG, "did you mean `hidden_size`?"),
    (f"{CONFIG}.hidden_size=0", CONFIG, ""),
    (f"{CONFIG}.num_key_value_heads=2", CONFIG, ""),
    (f"{CONFIG}.hidden_act=nosuch", CONFIG, ""),
    (f"{CONFIG}.max_position_embeddings=64", "model", ""),
    ("model={path: ./empty}", "model.path", "save_pretrained"),
    ("model={path: ./no-weights}", "model.path", ".safetensors"),
    ("model={path: no-such-user/nosuch-model}", "model.path", ""),
    ("model.init.tokenizer=./empty", "model.init.tokenizer", ""),
    ("model.chat_template=./README.md", "model.chat_template", "Jinja"),
    ("model.chat_template=./broken.jinja", "model.chat_template", "Jinja"),
    (f"{CONFIG}.hidden_size=100000000", CONFIG, "model.lora"),
    ("model.init={architecture: mamba, config: {num_hidden_layers: 2}}", "rollout.kv_cache_mb", "set"),
    ("model.max_length=2000000000", "model.max_length", "lower it"),
    ("model.lora={target_modules: [q_proj, nosuch]}", "layer nosuch", "all-linear"),
    ("model.lora={target_modules: [nosuch]}", "model.lora.target_modules", ""),
    ("model.lora={target_modules: [embed_tokens]}", "model.lora.target_modules", ""),
    # the task and its data
    ("task.use=nosuch:reward", "task.use", "nosuch.py"),
    ("task.use=exits:reward", "exits.py:3", "remove the call"),
    ("task.use=raises:reward", "task.use", "raises"),
    ("task.options={min_term: 2}", "task.options", "did you mean `min_terms`?"),
    ("task={mix: [{name: a, use: chain_sum}, {name: b, use: 'own:nosuch'}]}", "task.mix.1.use", ""),
    ("evaluation={sets: {hard: {data: {size: 3}, task: {use: nosuch}}}}", "evaluation.sets.hard.task.use", ""),
    (
        "evaluation={sets: {hard: {data: {size: 3}, task: {use: judge, options: {base_url: x:1, model: m}}}}}",
        "evaluation.sets.hard.task.options.base_url",
        "http://",
    ),
    ("task={use: command, options: {command: [agent]}}", "task.options.command", "ASYNCRL_FOLDER"),
    ("task={use: command, options: {command: ' '}}", "task.options.command", "ASYNCRL_FOLDER"),
    ("task.episode={max_calls: 3}", "task.episode", "remove it"),
    ("rollout.history=template", "rollout.history", "remove it"),
    (
        "task.use=own:agent & data={train: {path: chat.jsonl}, apply_chat_template: false}",
        "data.apply_chat_template",
        "remove it",
    ),
    ("data.train={path: missing.jsonl}", "data.train.path", ""),
    ("data.train={path: no-prompt.jsonl}", "no-prompt.jsonl:1", ""),
    ("data.train={path: refused.jsonl}", "refused.jsonl:1", ""),
    ("model.chat_template=./strict.jinja & data.train={path: chat.jsonl}", "chat.jsonl:1", "no system message"),
    ("model.chat_template_kwargs={enable_thinking: false}", "model.chat_template_kwargs.enable_thinking", "remove"),
    ("rollout.max_prompt_tokens=1", "data.train", "raise rollout.max_prompt_tokens"),
    # engines
    ("rollout.tool_parser=hermess", "rollout.tool_parser", ""),
    ("rollout.tool_parser=lama3_json", "rollout.tool_parser", "did you mean `llama3_json`?"),
    ("rollout.reasoning_parser=qwen33", "rollout.reasoning_parser", "did you mean `qwen3`?"),
    ("rollout.engine_args={nosuch: 1}", "rollout.engine_args.nosuch", "remove it"),
    (
        "rollout.engine_args={gpu_memory_utilisation: 0.5}",
        "rollout.engine_args",
        "did you mean `gpu_memory_utilization`?",
    ),
    ("rollout.gpus_per_engine=1", "rollout.gpus_per_engine", "to 0 to run on CPU"),
    ("trainer.gpus_per_rank=1", "trainer.gpus_per_rank", "to 0 to run on CPU"),
    ("rollout.kv_cache_mb=1 & model.max_length=4096", "rollout.kv_cache_mb", "raise it"),
    ("rollout.kv_cache_mb=1000000000", "rollout.kv_cache_mb", "lower it"),
    # the objective
    ("algorithm.advantage=nosuch:advantage", "algorithm.advantage", "nosuch.py"),
    ("algorithm.loss=nosuch:loss", "algorithm.loss", "nosuch.py"),
    ("algorithm.advantage=own:two_arguments", "algorithm.advantage", "parameters"),
    ("algorithm.advantage=own:wrong_shape", "algorithm.advantage", ""),
    ("algorithm.loss=own:wrong_shape", "algorithm.loss", "parameters"),
]
"""A setting, the location of its error, and a part of the hint."""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make a start's checks with one changed setting."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "installed_gpus", lambda: ())  # the result must not depend on this machine
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("empty").mkdir()

    def make(override: str) -> None:
        spec = load_spec("spec.yaml", override.split(" & ") if override else []).spec
        with StartChecks(spec, tmp_path, notices.append) as checks:
            checks.experiment()

    notices: list[str] = []
    yield make
    assert not Path("runs").exists(), "nothing is created"


FILES = {
    "spec.yaml": SPEC,
    "README.md": "# A page, and no template\n",
    "broken.jinja": "{% for message in messages %}",
    "strict.jinja": "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}{{ messages }}",
    "chat.jsonl": '{"prompt": [{"role": "system", "content": "?"}, {"role": "user", "content": "1+1="}]}\n',
    "no-weights/config.json": json.dumps({"model_type": "qwen3"}),
    "exits.py": '"""A script."""\nimport sys\nsys.exit(3)\n',
    "raises.py": "raise RuntimeError('no licence')\n",
    "own.py": "def two_arguments(rewards, more): return rewards\ndef wrong_shape(rewards): return rewards[:, :1]\n"
    "async def agent(prompt, model): ...\n",
    "no-prompt.jsonl": '{"question": "1+1="}\n',
    "refused.jsonl": '{"prompt": [{"role": "user", "content": "?", "tool_calls": [{}]}]}\n',
}


@pytest.mark.parametrize(("override", "location", "hint"), WRONG, ids=[override for override, _, _ in WRONG])
def test_impossible_settings_are_refused_with_location_and_hint(
    check: Callable[[str], None], override: str, location: str, hint: str
) -> None:
    with pytest.raises(UserError) as refused:
        check(override)
    error = refused.value
    assert error.exit_code == 2
    if isinstance(error, SpecError):
        found = [problem for problem in error.problems if problem.severity == "error"]
        assert any(f"{problem.file}: {problem.path}".find(location) >= 0 for problem in found), error
        assert all(
            problem.hint or "must be" in problem.message or "must not be" in problem.message for problem in found
        )
    else:
        assert location in f"{error.location}: {error.message}"
        assert error.hint
        assert hint in error.hint, error


@pytest.mark.usefixtures("check")
def test_validate_spec_fails_when_no_row_can_be_encoded() -> None:
    spec = load_spec("spec.yaml", ["model.chat_template=./strict.jinja", "data.train={path: chat.jsonl}"]).spec
    with StartChecks(spec, Path(), lambda _: None, thorough=True) as checks:
        findings = {finding.check: finding for finding in checks.findings()}
    found = findings["data.train"]
    assert found.status == "failure" and "chat.jsonl:1" in found.found and "no system message" in found.hint


@pytest.mark.parametrize(
    "override",
    ["model.max_length=4096", "model={max_length: 256, init: {architecture: mamba, config: {num_hidden_layers: 2}}}"],
)
def test_a_cache_that_can_be_large_enough_is_accepted(check: Callable[[str], None], override: str) -> None:
    check(f"{override} & rollout.kv_cache_mb=64" if "mamba" in override else override)


def test_an_exception_that_no_check_expects_is_the_error_of_that_check(
    check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> str:
        raise ZeroDivisionError("an unexpected value")

    monkeypatch.setattr(services, "check_upload", fails)
    with pytest.raises(ConfigError, match="upload: the check failed: ZeroDivisionError: an unexpected value"):
        check("")
    with StartChecks(load_spec("spec.yaml").spec, Path(), print) as checks:
        found = {finding.check: finding.status for finding in checks.findings()}
    assert found["upload"] == "failure"
    assert found["algorithm"] == "ok"


def test_the_file_for_the_engine_check_has_references_instead_of_secrets(
    check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def run(command: list[str], *_: object) -> tuple[list[str], str]:
        written.append(Path(command[4]).read_text())
        return ['["fine"]'], ""

    monkeypatch.setattr(programs, "run_program", run)
    monkeypatch.setenv("ADDRESS_OF_A_TEST", "https://example.com/sesame")
    loaded = load_spec("spec.yaml", ["tracking.uri=${env:ADDRESS_OF_A_TEST}"])
    with StartChecks(loaded.spec, Path(), print, thorough=True, references=loaded.references) as checks:
        assert checks._engine() == "fine"
    assert "${env:ADDRESS_OF_A_TEST}" in written[0]
    assert "sesame" not in written[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_during_the_checks_leaves_no_temporary_folder_behind(tmp_path: Path, number: int) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("chain_sum", "slow:reward"))
    (tmp_path / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "asyncrl_cli.cli.app", "train", "spec.yaml", "--dry-run", "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        assert any((tmp_path / "temporary").glob("asyncrl-check-*"))
        process.send_signal(number)
        assert process.wait(120) == (-number if number == signal.SIGKILL else 130)
    deadline = time.monotonic() + 120
    while number == signal.SIGKILL and any((tmp_path / "temporary").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)  # the reaper removes it once the process has ended
    assert not any((tmp_path / "temporary").iterdir())


def test_the_engines_check_does_not_outlive_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", programs.__name__, "1", "engine", "spec.yaml", str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL  # its parent is a different process


def small_spec() -> ExperimentSpec:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = {"architecture": "qwen3", "config": sizes | heads}
    return ExperimentSpec.model_validate(
        {
            "model": {"init": model, "max_length": 64},
            "task": {"use": "chain_sum"},
            "rollout": {"max_running_rollouts": 4, "threads_per_engine": 2},
            "stop": {"steps": 1},
        }
    )


@pytest.mark.parametrize("argument", [{"block_size": 0}, {"gpu_memory_utilization": 7}, {"quantization": "nosuch"}])
def test_impossible_engine_arguments_are_refused_by_vllm_without_an_engine(
    argument: dict[str, object], tmp_path: Path
) -> None:
    """`--dry-run` checks this in a separate process; in `train` the engine reports it, and is not restarted."""
    spec = small_spec()
    write_model_stub(spec.model.init, spec.model.max_length, tmp_path)
    wrong = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"engine_args": argument})})
    with pytest.raises(ConfigError, match="vLLM refuses the engine's settings: ") as refused:
        engine_config(wrong, str(tmp_path), "dummy")
    assert refused.value.location == "rollout.engine_args"
    assert next(iter(argument)) in refused.value.hint


def test_heads_that_crash_a_cpu_engine_are_refused(tmp_path: Path) -> None:
    spec = small_spec()
    assert spec.model.init is not None
    init = spec.model.init.model_copy(update={"config": {**spec.model.init.config, "head_dim": 24}})
    write_model_stub(init, spec.model.max_length, tmp_path)
    with pytest.raises(ConfigError, match="attention heads have 24 dimensions; vLLM's CPU engine supports 32, 64"):
        engine_config(spec, str(tmp_path), "dummy")
