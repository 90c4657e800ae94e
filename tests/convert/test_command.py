"""`asyncrl convert`: where it writes specs, and its exit codes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.convert.conftest import Command

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data"


def test_one_file_goes_to_standard_output_or_where_it_is_wanted(home: Path, asyncrl: Command) -> None:
    file = str(DATA / "verl/ppo_trainer.yaml")
    code, out, err = asyncrl("convert", "verl", file, "trainer.total_training_steps=9")
    assert code == 0 and "\n  steps: 9\n" in out and "keys read" in err and "keys read" not in out
    code, out, _ = asyncrl("convert", "verl", file, "-o", "mine/spec.yaml")
    assert code == 0 and f"{file} -> mine/spec.yaml" in out
    Path("mine/spec.yaml").write_text("my own work")
    code, _, err = asyncrl("convert", "verl", file, "-o", "mine/spec.yaml")
    assert code == 2 and "the file exists, with other content" in err and Path("mine/spec.yaml").stat().st_size == 11
    assert asyncrl("convert", "verl", file, "-o", "mine/spec.yaml", "--force")[0] == 0


def test_relative_paths_start_from_the_specs_folder(home: Path, asyncrl: Command) -> None:
    Path("here.parquet").touch()
    overrides = ["data.train_files=here.parquet", "data.val_files=here.parquet"]
    assert asyncrl("convert", "verl", *overrides, "-o", "deep/er/spec.yaml")[0] == 0
    assert "path: ../../here.parquet" in Path("deep/er/spec.yaml").read_text()


def test_files_that_are_elsewhere_are_listed_and_do_not_fail(home: Path, asyncrl: Command) -> None:
    code, out, err = asyncrl("convert", "verl", "data.train_files=/no/such/train.parquet", "-o", "spec.yaml")
    assert code == 0 and "not on this machine: data.train.path" in out and not err


def test_a_spec_that_needs_changes_ends_with_1(home: Path, asyncrl: Command) -> None:
    code, _, err = asyncrl("convert", "verl", "actor_rollout_ref.rollout.temperature=0", "-o", "spec.yaml")
    assert code == 1 and "rollout.sampling.temperature" in err and Path("spec.yaml").exists()


def test_an_unsupported_run_ends_with_1(home: Path, asyncrl: Command) -> None:
    code, out, err = asyncrl("convert", "verl", "algorithm.adv_estimator=grpo", "data.video_key=clips", "-o", "s.yaml")
    assert code == 1 and 'error: not supported: data.video_key = "clips"' in err and "asyncrl train" not in out
    assert "CHECK: no counterpart" in Path("s.yaml").read_text()


@pytest.mark.parametrize(("trainer", "program"), [("verl", "main.py"), ("trl", "train.py")])
def test_a_program_gets_a_hint_with_the_right_page(home: Path, asyncrl: Command, trainer: str, program: str) -> None:
    Path(program).write_text("print()\n")
    code, _, err = asyncrl("convert", trainer, program)
    assert code == 2 and "program" in err and f"docs/from-{trainer}.md" in err


def test_mistakes_end_with_2(home: Path, asyncrl: Command) -> None:
    for name in ("x.yaml", "y.yaml"):
        Path(name).write_text("data: {seed: 1}")
    for arguments, message in {
        ("no-such.yaml",): "cannot be read: No such file",
        ("x.yaml", "y.yaml"): "a spec comes from one",
    }.items():
        code, _, err = asyncrl("convert", "verl", *arguments)
        assert code == 2 and message in err


@pytest.mark.parametrize(
    ("trainer", "files"), [("verl", ["verl/fully_async_ppo_trainer.yaml"]), ("trl", ["trl/open_r1_math.yaml"])]
)
def test_the_documented_change_for_two_cores_is_valid(
    home: Path, asyncrl: Command, trainer: str, files: list[str]
) -> None:
    """docs/from-verl.md and docs/from-trl.md: two steps of a converted spec, on the template's model and data."""
    shutil.copytree(DATA.parents[1] / "templates/saved-model", home / "my-task")
    (home / "my-task/model").mkdir(exist_ok=True)
    arguments = ["grpo", "--num_processes", "8"] if trainer == "trl" else []
    paths = [str(DATA / file) for file in files]
    asyncrl("convert", trainer, *arguments[:1], *paths, *arguments[1:], "-o", f"my-task/{trainer}.yaml")
    page = (DATA.parents[1] / "docs/from-verl.md").read_text(encoding="utf-8")
    small = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "extends:" in block)
    if trainer == "trl":
        small = small.replace("verl.yaml", "trl.yaml").replace(
            '"{question}"}', '"{question}", split: null, config: null}'
        )
    (home / "my-task/small.yaml").write_text(small)
    code, out, err = asyncrl("validate-spec", "my-task/small.yaml")
    assert code == 0, err
    assert "runs 2 steps of 8 groups" in out and "on CPU and 1 trainer rank on CPU" in out
