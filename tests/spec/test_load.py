"""A spec file becomes a checked spec, or all of its mistakes with their locations."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl_cli.spec.inputs import SplitSpec
from asyncrl_cli.spec.load import dump_spec, load_spec
from asyncrl_cli.spec.problems import Problem, SpecError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.validation_errors import suggest
from tests.spec.conftest import SMALLEST

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
Write = Callable[..., Path]


def mistakes(path: Path, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    return caught.value.problems


def test_the_smallest_spec(write: Write) -> None:
    loaded = load_spec(write())
    assert loaded.spec.model.path == "org/model"
    assert loaded.spec.pipeline.max_staleness == 4
    assert loaded.files == (write().resolve(),)


def test_every_mistake_is_reported_at_its_location(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCRL_NOT_SET", raising=False)
    problems = mistakes(FIXTURES / "broken.yaml")
    assert [(p.line, p.column, p.path) for p in problems] == [
        (3, 1, "seeds"),
        (8, 13, "model.init.config"),
        (9, 15, "model.max_length"),
        (11, 1, "tasks"),
        (15, 3, "rollout.group_sizes"),
        (16, 24, "rollout.max_response_tokens"),
        (18, 3, "rollout.dtype"),
        (19, 17, "rollout.engine_args"),
        (22, 3, "trainer.learning_rate"),
        (23, 15, "trainer.zero_stage"),
        (24, 22, "trainer.optimizer.betas"),
        (24, 34, "trainer.optimizer.eps"),
        (25, 13, "trainer.schedule"),
        (28, 9, "pipeline.mode"),
        (29, 13, "pipeline.on_stale"),
        (32, 21, "evaluation.every"),
        (33, 8, "stop.step"),
    ]
    text = str(SpecError(problems))
    assert f"error: trainer.learning_rate: unknown key\n --> {FIXTURES}/broken.yaml:22:3\nhint: did you mean " in text
    assert "`trainer.optimizer.learning_rate`, `model.warm_start.learning_rate` or " in text
    assert text.endswith("17 errors")
    assert "Input should" not in text and "pydantic" not in text


@pytest.mark.parametrize(
    ("parent", "key", "meant"),
    [
        ("rollout", "group_sizes", "rollout.group_size"),
        ("trainer", "learning_rate", "trainer.optimizer.learning_rate"),
        ("", "extend", "extends"),
        ("rollout", "max_length", "model.max_length"),
        ("", "trainer.ranks", "trainer.ranks"),
        ("trainer.optimizer", "beta", "trainer.optimizer.betas"),
    ],
)
def test_unknown_keys_get_suggestions(parent: str, key: str, meant: str) -> None:
    assert suggest(parent, key)[0] == meant


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("rollout.sampling.top_p", "would make the recorded log-probs wrong"),
        ("cluster.engines.nodes", "chosen by labels"),
        ("notify", "tracking.monitors"),
    ],
)
def test_removed_keys_have_a_hint(write: Write, key: str, hint: str) -> None:
    (problem,) = mistakes(write(), f"{key}=1")
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("actor_rollout_ref: {rollout: {n: 8}}\n", "asyncrl convert verl FILE"),
        ("model_name_or_path: a/b\nnum_generations: 4\n", "asyncrl convert trl FILE"),
    ],
)
def test_a_configuration_of_another_trainer_can_be_converted(write: Write, text: str, command: str) -> None:
    hints = {problem.path: problem.hint for problem in mistakes(write(text))}
    assert hints["task"].endswith(command) and command not in hints["model"]


def test_a_dotted_key_in_a_file_has_its_own_location(write: Write) -> None:
    (problem,) = mistakes(write(f"{write().read_text()}trainer: {{}}\ntrainer.ranks: 2\n"))
    assert (problem.line, problem.hint) == (5, "did you mean `trainer.ranks`?")


def test_a_broken_extends_hides_missing_keys(write: Write) -> None:
    assert [p.path for p in mistakes(write("extends: gone.yaml\nstop: {step: 3}\n"))] == ["extends", "stop.step"]
    assert [p.path for p in mistakes(write("extends: [3]\n"))] == ["extends"]


def test_thousands_of_mistakes_are_counted_and_the_first_are_named(write: Write) -> None:
    problems = mistakes(write("".join(f"key{number}: 1\n" for number in range(3000))))
    assert len(problems) == 3003
    text = str(SpecError(problems))
    assert text.endswith("... and 2,953 more\n\n3,003 errors") and text.count("\n") < 210


def test_keys_are_printed_without_control_characters(write: Write) -> None:
    (problem,) = mistakes(write(write().read_text() + '"a\\e[2J\\nb": 1\n'))
    assert r"a\x1b[2J\nb: unknown key" in str(problem)


def test_unknown_keys_without_a_similar_one_list_the_keys(write: Write) -> None:
    (problem,) = mistakes(write(), "stop.zzz=1")
    assert problem.hint == "keys here: steps, epochs, on_unhealthy"
    assert str(problem) == f"error: stop.zzz: unknown key\n --> --set stop.zzz\nhint: {problem.hint}"


def test_a_run_without_an_end_is_refused(write: Write) -> None:
    (problem,) = mistakes(write(), "stop.steps=null")
    assert (problem.path, problem.message) == ("stop", "has neither steps nor epochs")


def test_missing_keys_point_at_their_parent(write: Write) -> None:
    problems = mistakes(write("model: {path: org/model}\ntask:\n  mix:\n  - {name: a}\n"))
    assert [(p.path, p.line, p.column) for p in problems] == [("stop", 1, 1), ("task.mix.0.use", 4, 5)]
    assert [p.hint for p in problems] == [
        "add it, such as `stop: {steps: 100}`",
        "add `use`: the task, as in `task.use`",
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stop.steps='5'", "must be a whole number, not '5'"),
        ("stop.steps=true", "must be a whole number, not true"),
        ("stop.steps=2.5", "must be a whole number, not 2.5"),
        ("rollout.group_size=0", "must be at least 1, not 0"),
        ("rollout.sampling.temperature=.inf", "must be a finite number, not inf"),
        ("algorithm.clip_low=2", "must be at most 1, not 2"),
        ("algorithm.advantage=best", "`none`, `gae` or `module:function`, not 'best'"),
        ("algorithm.advantage=group_nrom", "not 'group_nrom' (did you mean `group_norm`?)"),
        ("rollout.sampling.stop=x", "must be a list, not 'x'"),
        ("trainer.optimizer.betas=[1,2,3]", "must have 2 values, not 3"),
        ("trainer.optimizer.betas=[0.1]", "too few values: [0.1]"),
        ("name=a b", "must match ^[A-Za-z0-9]"),
        (f"name={'a' * 65}", "must have at most 64 characters, not 65"),
        ("runs_dir=3", "must be a path, not 3"),
        ("model.init={}", "missing"),
        ("trainer=3", "must be a mapping of keys to values, not 3"),
        ("data.shuffle=yes", "must be true or false, not 'yes'"),
        ("stop.steps=2147483648", "must be at most 2147483647"),
        ("data.train.size=100000000000000000000000", "does not fit into 64 bits"),
        (f"runs_dir={'r' * 300}", "too long: a file name may have 255 bytes"),
        ("rollout.sampling.stop=['']", "must not be empty"),
        ("pipeline.stall_minutes=1e300", "must be at most 525600"),
        ("algorithm.sapo_temperatures=[-1, 1]", "must be more than 0, not -1"),
        ("algorithm.loss=a..b:c", "or `module:function`, not 'a..b:c'"),
        ("rollout.gateway.host=not a host", "must be a host name or an address, not 'not a host'"),
        ("cluster.address=not an address", "must be `auto` or `host:port`"),
        ("stop.steps=1e3", "must be a whole number, not 1000.0 (write 1000)"),
        ("model.lora.target_modules=[]", "must have at least 1 item, not 0"),
        ("model.lora.target_modules=all", "must be `all-linear` or a list, not 'all'"),
        ("task.mix=3", "write a list of mappings with the keys name, weight, use"),
        ("evaluation=off", "(to evaluate nothing, set data.eval: null)"),
        ("evaluation.sets=3", "write names, each with a mapping with the keys data, task"),
        ("name={a: 1}", "must be text, not a mapping (default: 'run')"),
        ("name=3", "must be text, not 3 (put it in quotes)"),
    ],
)
def test_values_of_the_wrong_kind(write: Write, override: str, words: str) -> None:
    (problem,) = mistakes(write(), override)
    assert words in f"{problem.message} ({problem.hint})"
    assert problem.path.startswith(override.partition("=")[0]) and "[" not in problem.path
    assert problem.file == f"--set {override.partition('=')[0]}" and problem.line is None


def test_one_of_path_and_init_can_be_set_to_null(write: Write) -> None:
    base = write(name="base.yaml")
    top = write(f"extends: {base.name}\nmodel: {{path: null, init: {{architecture: qwen3}}}}\n")
    assert load_spec(top).spec.model.init is not None
    assert load_spec(top, ["model.init=null", "model.path=org/other"]).spec.model.path == "org/other"


def test_a_section_set_to_null_has_its_defaults(write: Write) -> None:
    base = write(f"{SMALLEST}evaluation: {{every: 5}}\ntrainer: {{optimizer: {{eps: 1e-6}}}}\n", "base.yaml")
    top = write(f"extends: {base.name}\nevaluation:\ntrainer: {{optimizer: null}}\n")
    assert load_spec(top).spec == load_spec(write()).spec
    assert [problem.message for problem in mistakes(write(), "stop=null")] == ["missing"]


def test_held_out_prompts_are_switched_off(write: Write) -> None:
    loaded = load_spec(write(f"{SMALLEST}data: {{eval: null}}\n"))
    assert (loaded.spec.data.eval, loaded.spec.evaluation.sets, loaded.warnings) == (None, {}, ())
    again = write(dump_spec(loaded.spec, loaded.references), "again.yaml")
    assert load_spec(again).spec == loaded.spec
    assert load_spec(again, ["data.eval.size=8"]).spec.data.eval == SplitSpec(size=8), "and on again"


def test_paths_are_relative_to_their_file(write: Write, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "sub/model").mkdir(parents=True)
    for name in ("sub/train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("{}\n")
    write("model: {path: model}\ndata: {train: {path: train.jsonl}}\n", "sub/base.yaml")
    path = write("extends: sub/base.yaml\ntask: {use: m:f}\nstop: {steps: 1}\nname: x\n")
    monkeypatch.chdir(tmp_path)
    spec = load_spec(path.name, ["data.eval.path=eval.jsonl", "evaluation.every=1"]).spec
    assert spec.data.train.path == str(tmp_path / "sub/train.jsonl")
    assert spec.data.eval.path == str(tmp_path / "eval.jsonl")
    assert spec.model.path == str(tmp_path / "sub/model")
    assert str(spec.runs_dir) == "runs"


def test_deep_nesting_has_a_line(write: Write) -> None:
    (problem,) = mistakes(write("name: x\na: " + "[" * 3000))
    assert "nested too deeply" in problem.message and problem.line == 2
    assert len(mistakes(write(), f"{'a.' * 3000}b=1")) == 1


@pytest.mark.parametrize(
    "path",
    ["model.path", "model.init.tokenizer", "model.chat_template", "data.train.path", "data.eval.path", "runs_dir"],
)
def test_a_path_with_a_nul_is_refused(path: str, write: Write) -> None:
    overrides = ["model.init={architecture: qwen3}", "model.path=null"] if "tokenizer" in path else []
    for text in ("a\\0b", "/a\\0", "~\\0/b"):
        (problem,) = mistakes(write(), *overrides, f'{path}="{text}"')
        assert (problem.path, problem.message) == (path, "a path cannot contain a NUL character")


@pytest.mark.parametrize("assignment", ["\0", "a\0b=1", "runs_dir=a\0b", "model.path\0=x"])
def test_an_override_with_a_nul_is_a_problem_like_any_other(assignment: str, write: Write) -> None:
    assert mistakes(write(), assignment)


def test_spec_errors_travel_between_processes(write: Write) -> None:
    error = SpecError(mistakes(write(), "stop.steps=0"))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.exit_code == 2


texts = st.text(max_size=8) | st.sampled_from(["${env:HOME}", "$${env:X}", "1e-4", "no", "0o7", "<<", "null", ""])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.text(max_size=6), documents, max_size=4),
    st.lists(texts.filter(bool), max_size=3),
    st.floats(1e-300, 1),
)
def test_a_dumped_spec_loads_as_the_same_spec(
    tmp_path: Path, options: dict[str, Any], stop: list[str], rate: float
) -> None:
    document = {
        "model": {"path": "org/model"},
        "task": {"use": "chain_sum", "options": options},
        "rollout": {"sampling": {"stop": stop}},
        "trainer": {"optimizer": {"learning_rate": rate}},
        "stop": {"steps": 10},
    }
    spec = ExperimentSpec.model_validate(document)
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_spec(spec, {}), encoding="utf-8")
    assert load_spec(path).spec == spec


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("{a: &long '" + 30_000 * "x" + "', " + ", ".join(f"a{number}: *long" for number in range(5)) + "}", "bytes"),
        ("{a: '" + 130_000 * "x" + "'}", "bytes"),
        ("{a: &list [" + "1, " * 400 + "1], " + ", ".join(f"a{number}: *list" for number in range(3)) + "}", ""),
        ("{a: [" + "1, " * 9900 + "1]}", "values"),
    ],
)
def test_a_spec_that_could_not_be_loaded_again_is_refused(options: str, says: str, tmp_path: Path) -> None:
    """The limits apply to each file, and a run's own spec is one file that contains everything."""
    path = tmp_path / "spec.yaml"
    path.write_text(MINIMAL_TEXT.format(options=options))
    if says:
        with pytest.raises(SpecError, match=rf"the resolved spec has more than [0-9,]+ {says}"):
            load_spec(path)
        return
    loaded = load_spec(path)
    path.write_text(dump_spec(loaded.spec, loaded.references))
    assert load_spec(path).spec == loaded.spec


MINIMAL_TEXT = """
model: {{init: {{architecture: qwen3, config: {{hidden_size: 32}}}}}}
task: {{use: "own:Task", options: {options}}}
stop: {{steps: 1}}
"""
