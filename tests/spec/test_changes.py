"""A resume may change every key except the keys on which the journal's rows depend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl_cli.spec.changes import check_changes, kept_horizon, training_changes
from asyncrl_cli.spec.load import dump_spec, load_recorded
from asyncrl_cli.spec.problems import SpecError
from asyncrl_cli.spec.sections import ExperimentSpec

pytestmark = pytest.mark.slow

BEFORE: dict[str, Any] = {
    "model": {
        "init": {"architecture": "qwen3", "config": {"hidden_size": 64}},
        "warm_start": {"steps": 10, "data": {"path": str(Path(__file__).parents[1] / "fixtures/sft.jsonl")}},
    },
    "task": {"use": "chain_sum", "options": {"terms": 3}},
    "data": {"train": {"size": 100}, "eval": {"size": 10}},
    "rollout": {"sampling": {"stop": [";"]}},
    "stop": {"steps": 10},
}
FIXED = (
    "name",
    "seed",
    "model",
    "task",
    "data.train",
    "data.eval",
    "data.shuffle",
    "data.apply_chat_template",
    "data.special_tokens",
    "rollout.group_size",
    "rollout.max_prompt_tokens",
    "rollout.max_response_tokens",
    "rollout.sampling",
    "evaluation.temperature",
    "pipeline.groups_per_step",
    "pipeline.publish_every",
    "stop.epochs",
)
FREE_ALL_THE_SAME = (
    *("task.reward_timeout_s", "task.reward_workers", "task.reward_memory_mb", "task.reward_concurrency"),
)


MIX: dict[str, Any] = BEFORE | {
    "task": {
        "mix": [
            {"name": "a", "use": "unit_tests", "options": {"sandbox": "bubblewrap"}},
            {"name": "b", "use": "chain_sum", "options": {"max_terms": 3}},
        ]
    }
}


def validated(spec: dict[str, Any]) -> ExperimentSpec:
    return ExperimentSpec.model_validate(spec)


def leaves(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted paths of all values that are not mappings."""
    if not isinstance(value, dict) or not value:
        yield prefix
        return
    for key, item in value.items():
        yield from leaves(item, f"{prefix}.{key}" if prefix else key)


def set_at(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The spec with another value at a path."""
    key, _, rest = path.partition(".")
    return {**spec, key: set_at(spec.get(key) or {}, rest, value) if rest else value}


def words(schema: Any) -> Iterator[str]:
    """Every word that is a possible value of some key of the spec."""
    if isinstance(schema, dict):
        yield from (word for word in (*schema.get("enum", ()), schema.get("const")) if isinstance(word, str))
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from words(part)


CANDIDATES = [
    *(True, False, 1, 2, 0, 7, 1024, 0.5, 0.125, "other", "own:function", "http://there", "there:6379"),
    *(["a"], ["stall"], ["own:Class"], [0.5, 0.5], [], {"a": 1}, {"a": "b"}, {}),
    *(
        [{"name": "a", "use": "b"}],
        {"field": "a", "stages": [{}]},
        {"a": {"data": {}}},
        {"mcp": {"a": {"url": "http://b"}}},
    ),
    *words(ExperimentSpec.model_json_schema()),
]
UNCHANGED = ("runs_dir",)
"""A key that can change without changing the run."""
WHOLE = validated(BEFORE).model_dump(mode="json")


def changed(path: str) -> ExperimentSpec:
    """The spec with another valid value at a path."""
    before = validated(WHOLE)
    for candidate in CANDIDATES:
        try:
            after = validated(set_at(WHOLE, path, candidate))
        except ValidationError:
            continue
        if after != before and after.pipeline.max_staleness >= before.pipeline.max_staleness:
            return after
    raise AssertionError(f"nothing else fits {path}")


def is_below(path: str, keys: tuple[str, ...]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in keys)


@pytest.mark.parametrize("path", [path for path in leaves(WHOLE) if path not in UNCHANGED])
def test_a_key_may_change_unless_the_journal_depends_on_it(path: str) -> None:
    after = changed(path)
    if is_below(path, FIXED) and path not in FREE_ALL_THE_SAME:
        with pytest.raises(SpecError) as error:
            check_changes(validated(WHOLE), after)
        assert all(is_below(problem.path, (path,)) for problem in error.value.problems)
        assert "cannot change for a recorded run: " in str(error.value)
    else:
        changes = check_changes(validated(WHOLE), after)
        assert changes
        assert all(is_below(change.split("=")[0], (path,)) for change in changes)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("seed", 1, "it decides the order of prompts and the seeds of rollouts"),
        ("model.init.config.hidden_size", 32, "checkpoints and recorded log-probs belong to this model"),
        ("model.warm_start", None, "checkpoints and recorded log-probs belong to this model"),
        ("task.options", {}, "recorded rewards belong to this task"),
        ("data.eval", None, "recorded accuracies belong to these prompts"),
        ("evaluation.temperature", 0.5, "recorded accuracies belong to this temperature"),
        ("data.eval.size", 20, "recorded accuracies belong to these prompts"),
        ("rollout.group_size", 2, "recorded groups have this size"),
        ("rollout.sampling.temperature", 0.5, "recorded log-probs belong to this distribution"),
        ("pipeline.publish_every", 2, "it decides which steps have a version"),
    ],
)
def test_a_refusal_has_its_reason(path: str, value: Any, why: str) -> None:
    with pytest.raises(SpecError) as error:
        check_changes(validated(WHOLE), validated(set_at(WHOLE, path, value)))
    for problem in error.value.problems:
        assert problem.path.startswith(path)
        assert problem.message == f"cannot change for a recorded run: {why}"
        assert problem.hint


def test_an_evaluation_set_keeps_its_prompts_and_its_task() -> None:
    def with_sets(**sets: Any) -> ExperimentSpec:
        return validated(set_at(WHOLE, "evaluation.sets", sets))

    before = with_sets(a={"data": {"size": 8}}, b={"data": {"size": 8}})
    after = with_sets(a={"data": {"size": 8}, "every": 3}, c={"data": {"size": 9}})
    changes = check_changes(before, after)
    assert [change for change in changes if ".a." in change] == ["evaluation.sets.a.every=3"]
    assert {change.split(".")[2] for change in changes} == {"a", "b", "c"}, "sets may come and go"
    for settings in ({"data": {"size": 9}}, {"data": {"size": 8}, "greedy": False}):
        with pytest.raises(SpecError, match="give the changed set another name"):
            check_changes(before, with_sets(a=settings, b={"data": {"size": 8}}))


def test_all_refusals_are_reported_together() -> None:
    after = set_at(set_at(set_at(WHOLE, "seed", 1), "rollout.group_size", 2), "pipeline.max_staleness", 1)
    with pytest.raises(SpecError) as error:
        check_changes(validated(WHOLE), validated(after))
    assert sorted(problem.path for problem in error.value.problems) == [
        "pipeline.max_staleness",
        "rollout.group_size",
        "seed",
    ]


def test_the_staleness_bound_can_only_be_raised() -> None:
    def bounded(staleness: int) -> ExperimentSpec:
        return validated(set_at(WHOLE, "pipeline.max_staleness", staleness))

    assert check_changes(bounded(2), bounded(3)) == ["pipeline.max_staleness=3"]
    assert check_changes(bounded(2), bounded(2)) == []
    with pytest.raises(SpecError, match="cannot be lower than 2: groups were admitted under that bound"):
        check_changes(bounded(2), bounded(1))


ENGINE = set_at(WHOLE, "rollout.engine_args", {"a": 1, "b": {}})
CODE = BEFORE | {"task": {"use": "unit_tests"}}
UNCONFINED_CODE = set_at(CODE, "task.options", {"sandbox": "none"})


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (WHOLE, set_at(WHOLE, "runs_dir", "/elsewhere"), []),
        (WHOLE, ENGINE, ["rollout.engine_args.a=1"]),
        (ENGINE, WHOLE, ["rollout.engine_args.a=None"]),
        (
            WHOLE,
            set_at(set_at(WHOLE, "stop.steps", 20), "algorithm.clip_high", 0.3),
            ["algorithm.clip_high=0.3", "stop.steps=20"],
        ),
        (CODE, UNCONFINED_CODE, ["task.options.sandbox=none"]),
        (UNCONFINED_CODE, CODE, ["task.options.sandbox=None"]),
    ],
)
def test_changes_are_reported_in_order_with_their_new_values(
    before: dict[str, Any], after: dict[str, Any], changes: list[str]
) -> None:
    assert check_changes(validated(before), validated(after)) == changes


def test_the_address_of_an_mcp_server_may_change_and_its_tools_may_not() -> None:
    def spec(**server: Any) -> ExperimentSpec:
        return validated(BEFORE | {"task": {"use": "exact", "tools": {"mcp": {"a": {"url": "http://b/mcp"} | server}}}})

    after = spec(url="http://c/mcp", headers={"X-Key": "d"}, timeout_s=5.0)
    assert check_changes(spec(), after) == [
        "task.tools.mcp.a.headers.X-Key=d",
        "task.tools.mcp.a.timeout_s=5.0",
        "task.tools.mcp.a.url=http://c/mcp",
    ]
    with pytest.raises(SpecError, match="allowed_tools"):
        check_changes(spec(), spec(allowed_tools=["e"]))


def test_only_the_scoring_of_the_members_of_a_mix_may_change() -> None:
    code, arithmetic = MIX["task"]["mix"]
    members = [code | {"options": {"sandbox": "none"}}, arithmetic | {"reward_timeout_s": 7.0}]
    assert check_changes(validated(MIX), validated(MIX | {"task": {"mix": members}})) == [
        "task.mix.0.options.sandbox=none",
        "task.mix.1.reward_timeout_s=7.0",
    ]
    for other in (
        [code, arithmetic | {"options": {"max_terms": 4}}],
        [code | {"use": "math"}, arithmetic],
        [arithmetic, code],
        [code, arithmetic, arithmetic | {"name": "c"}],
    ):
        with pytest.raises(SpecError, match="recorded rewards belong to this task"):
            check_changes(validated(MIX), validated(MIX | {"task": {"mix": other}}))


@pytest.mark.parametrize(
    ("before", "after", "horizon"),
    [
        ({"kind": "cosine"}, {"kind": "cosine"}, 10),
        ({"kind": "linear"}, {"kind": "linear"}, 10),
        ({"kind": "linear"}, {"kind": "linear", "final_fraction": 0.1}, 10),
        ({"kind": "linear"}, {"kind": "cosine", "warmup_updates": 2}, 10),
        ({"kind": "cosine", "steps": 6}, {"kind": "cosine"}, None),
        ({"kind": "cosine"}, {"kind": "constant"}, None),
        ({"kind": "constant"}, {"kind": "constant"}, None),
        ({"kind": "cosine", "steps": 6}, {"kind": "cosine", "steps": 6}, None),
        ({"kind": "cosine"}, {"kind": "cosine", "steps": 20}, None),
        ({"kind": "constant"}, {"kind": "cosine"}, None),
    ],
)
def test_more_steps_keep_the_length_of_the_schedule(
    before: dict[str, Any], after: dict[str, Any], horizon: int | None
) -> None:
    old = validated(BEFORE | {"trainer": {"schedule": before}})
    new = validated(BEFORE | {"trainer": {"schedule": after}, "stop": {"steps": 20}})
    assert kept_horizon(old, new) == horizon
    assert kept_horizon(old, old) is None


def test_changes_of_the_training_are_found_in_a_note() -> None:
    note = "stop.steps=20, trainer.optimizer.learning_rate=0.1, rollout.engines=2, algorithm.clip_low=0.1, steps 3"
    assert training_changes(note) == ["trainer.optimizer.learning_rate=0.1", "algorithm.clip_low=0.1"]
    parts = ["algorithm.reward_parts.format-ok=0.5", "algorithm.reward_parts.is short=None"]
    assert training_changes(f"stop.steps=20, {', '.join(parts)}, seed=1") == parts
    assert training_changes("") == []
    exact = "rollout.dtype=bfloat16, pipeline.weight_update=recompute, pipeline.max_staleness=2"
    assert training_changes(f"{exact}, pipeline.ahead=2") == exact.split(", "), "they decide which tokens are exact"


@pytest.mark.parametrize("change", ["model.path=other/model", "model.init=null", "data.train.path=none.jsonl"])
def test_a_fixed_key_is_the_only_problem(tmp_path: Path, change: str) -> None:
    (tmp_path / "spec.yaml").write_text(dump_spec(validated(BEFORE), {}))
    with pytest.raises(SpecError) as refused:
        load_recorded(tmp_path, ["stop.steps=20", change])
    (problem,) = refused.value.problems
    assert problem.path == change.partition("=")[0] and "cannot change for a recorded run" in problem.message
    assert load_recorded(tmp_path, ["stop.steps=20", "seed=0"]).spec.stop.steps == 20


def test_other_problems_of_a_change_are_reported(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(dump_spec(validated(BEFORE), {}))
    with pytest.raises(SpecError, match=r"stop\.stepz"):
        load_recorded(tmp_path, ["stop.stepz=20"])
