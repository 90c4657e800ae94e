"""Keys of earlier versions: refused with the new name, translated in the specs of recorded runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from asyncrl_cli.inspect.resolved import resolved_spec, value_at
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.changes import check_changes
from asyncrl_cli.spec.keys import keys
from asyncrl_cli.spec.load import load_recorded, load_spec
from asyncrl_cli.spec.problems import SpecError
from asyncrl_cli.spec.renamed import RENAMED, REPLACED
from tests.spec.conftest import Write

ALL = {path: f"{path.rpartition('.')[0]}.{new}" for path, new in (RENAMED | REPLACED).items()}
OTHER_VALUES = {
    "algorithm.kl_placement": "reward",
    "algorithm.mask_truncated": True,
    "algorithm.reference_update_every": 3,
    "data.filter": {},
    "data.filter.solved_streak": 2,
    "data.filter.revisit_fraction": 0.5,
    "evaluation.fix_version": True,
}
"""By new key, a value that is not the default."""


@pytest.mark.parametrize("path", ALL)
def test_an_earlier_key_is_refused_with_its_present_name(write: Write, path: str) -> None:
    assert path not in keys() and ALL[path] in keys()
    with pytest.raises(SpecError) as error:
        load_spec(write(), [f"{path}=1"])
    problems = [problem for problem in error.value.problems if problem.path == path]
    assert [problem.message for problem in problems] == ["unknown key"]
    assert f" to `{ALL[path]}`" in problems[0].hint or f" by `{ALL[path]}`" in problems[0].hint


def test_an_earlier_section_names_its_keys_too(write: Write) -> None:
    with pytest.raises(SpecError) as error:
        load_spec(write(), ["data.pools={retire_after: 2}"])
    (problem,) = error.value.problems
    assert problem.path == "data.pools"
    assert problem.hint == (
        "renamed to `data.filter`, `retire_after` to `solved_streak`, `revisit` to `revisit_fraction`"
    )


def test_the_spec_of_a_run_of_an_earlier_version_is_translated(tmp_path: Path) -> None:
    assert set(OTHER_VALUES) == {ALL[path] for path in RENAMED}
    old = {
        "model": {"path": "org/model"},
        "task": {"use": "chain_sum"},
        "stop": {"steps": 10},
        "algorithm": {"kl_in": "reward", "mask_cut": True, "reference_every": 3, "kl_coef": 0.1},
        "data": {"pools": {"retire_after": 2, "revisit": 0.5}},
        "evaluation": {"pin": True},
        "rollout": {"max_failures": 16},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(old))
    spec = load_recorded(tmp_path).spec.model_dump()
    shown = resolved_spec(RunDirectory(tmp_path))
    for path, value in OTHER_VALUES.items():
        if value != {}:
            assert value_at(spec, path) == value_at(shown, path) == value
    assert spec["rollout"]["max_failed_share"] == 0.25, "its own default: a count is not a share"
    assert not any(value_at(shown, path) for path in ALL)


@pytest.mark.parametrize(("recorded", "applied"), [({}, False), ({"apply_chat_template": True}, True)])
def test_runs_of_earlier_versions_keep_their_texts_as_they_were(
    tmp_path: Path, recorded: dict[str, bool], applied: bool
) -> None:
    spec = {"model": {"path": "org/model"}, "task": {"use": "chain_sum"}, "stop": {"steps": 10}}
    for data in (recorded, {"train": {"size": 5}} | recorded):
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec | ({"data": data} if data else {})))
        assert load_recorded(tmp_path).spec.data.apply_chat_template is applied
        assert resolved_spec(RunDirectory(tmp_path))["data"]["apply_chat_template"] is applied
        assert load_spec(tmp_path / "spec.yaml").spec.data.apply_chat_template, "a new run"
        with pytest.raises(SpecError, match="cannot change for a recorded run"):
            check_changes(
                load_recorded(tmp_path).spec,
                load_recorded(tmp_path, [f"data.apply_chat_template={str(not applied).lower()}"]).spec,
            )
