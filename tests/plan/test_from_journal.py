"""The planner reads journals that the buffer wrote. Also tests the command `asyncrl plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.cli.app import main
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.plan.comparison import WITHIN, compare
from asyncrl_cli.plan.from_journal import Calibration, calibrate
from asyncrl_cli.plan.prediction import NOTICEABLE, advice, predict
from asyncrl_cli.plan.simulator import Scenario, simulate
from asyncrl_cli.records.generation import EngineRequest
from tests.journal.recorded_run import PUBLISH_S, TRAIN_S, RecordedRun, make_run, settings
from tests.plan.scenarios import lengths, scenario
from tests.plan.scenarios import settings as small

pytestmark = pytest.mark.slow

DURATIONS: tuple[Callable[[int], float], ...] = (
    lambda g: 3.0 + 4 * (g % 3),
    lambda g: 25.0 if g % 7 == 2 else 1.5 + g % 5,
    lambda g: 1.0 + (g * 37 % 11),
)
SPEC = """
name: small
model: {init: {architecture: qwen3, config: {}, tokenizer: characters}, max_length: 64}
task: {use: chain_sum}
rollout: {group_size: 2, max_running_rollouts: 12, max_prompt_tokens: 16, max_response_tokens: 32}
algorithm: {preset: grpo}
pipeline: {mode: async, max_staleness: 1, groups_per_step: 2}
evaluation: {every: 0}
stop: {steps: 60}
"""


def recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], bound: int = 1
) -> RecordedRun:
    """40 steps, with six groups at a time."""
    of = settings(max_staleness=bound)
    run = RecordedRun(path, monkeypatch, of, seconds, concurrency=6)
    for _ in range(40):
        run.step()
    return run


def measured(path: Path) -> Calibration:
    with snapshot(path) as connection:
        return calibrate(connection, shared_host=True)


def of(found: Calibration, bound: int) -> Scenario:
    return Scenario(replace(found.settings, max_staleness=bound), found.groups, found.costs, 1, 12)


@pytest.mark.parametrize("seconds", DURATIONS)
@pytest.mark.parametrize("bound", [0, 2])
def test_a_run_is_reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], bound: int
) -> None:
    run = recorded(tmp_path / "journal.db", monkeypatch, seconds, bound)
    found = measured(tmp_path / "journal.db")
    outcome = simulate(of(found, bound), 30)
    steps = [waited + TRAIN_S + PUBLISH_S for waited in run.waited[-30:]]
    assert found.observed.step_s == pytest.approx(sum(steps) / 30, rel=1e-3)
    assert outcome.step_s == pytest.approx(found.observed.step_s, rel=0.08)
    lines = [line for line in compare(outcome, found.observed) if line.name != "engines idle"]
    assert all(line.fits for line in lines), lines


@pytest.mark.parametrize("seconds", DURATIONS)
def test_another_bound_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
) -> None:
    # The duration of a group depends only on its index, so a run with the other bound gives the correct values.
    recorded(tmp_path / "1.db", monkeypatch, seconds, 1)
    recorded(tmp_path / "3.db", monkeypatch, seconds, 3)
    other = measured(tmp_path / "3.db")
    predicted = of(measured(tmp_path / "1.db"), 3)
    assert simulate(predicted, 40).step_s == pytest.approx(other.observed.step_s, rel=0.08)


def test_too_few_steps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "journal.db", monkeypatch, settings(), DURATIONS[0])
    with pytest.raises(ValueError, match="no step is trained"):
        measured(tmp_path / "journal.db")
    for _ in range(2):
        run.step()
    with pytest.raises(ValueError, match="steps can be measured"):
        measured(tmp_path / "journal.db")


# -- the work of engines

TOKEN_S, START_S, DELIVER_S, SETTLE_S = 0.02, 0.1, 0.25, 0.05


def with_requests(run: RecordedRun, path: Path) -> Calibration:
    """Add the engine requests of the run's groups, with ``TOKEN_S`` for each token, and a simultaneous evaluation."""
    with snapshot(path) as connection:
        lives = connection.execute("SELECT id, admitted_at, ended_at FROM groups WHERE ended_at > 0").fetchall()
        (taken_at,) = connection.execute("SELECT taken_at FROM batches WHERE step = 30").fetchone()
    spans = [(f"{group}-{index}", begin, end) for group, begin, end in lives for index in range(2)]
    spans += [(f"eval:30:greedy:{index}", taken_at - 1, taken_at + 5) for index in range(6)]
    for name, begin, end in spans:
        since, until = begin + START_S, end - SETTLE_S - DELIVER_S
        request = EngineRequest(
            name,
            "engine-0",
            begin,
            end - SETTLE_S,
            "stop",
            tokens=round((until - since) / TOKEN_S),
            context_tokens=3,
            running_from=since,
            running_until=until,
        )
        run.book.journal.requested(request)
    run.commit()
    return measured(path)


def test_recorded_requests_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.db"
    found = with_requests(recorded(path, monkeypatch, DURATIONS[2]), path)
    assert found.engine is not None
    assert found.engine.fixed_s == pytest.approx(TOKEN_S, rel=0.02)
    assert found.engine.per_sequence_s == pytest.approx(0.0, abs=TOKEN_S / 100)
    overheads = found.costs.overheads
    assert (overheads.start_s, overheads.deliver_s, overheads.settle_s) == pytest.approx((START_S, DELIVER_S, SETTLE_S))
    # Steps during the evaluation are not compared with the simulation, which has no evaluation; their costs count.
    assert found.trainer.steps > found.observed.steps


# -- predictions


def in_situation(name: str) -> Scenario:
    """A run that this limits."""
    usual = scenario(small(8, 4))
    costs = usual.costs
    quick = replace(usual, costs=replace(costs, trainer=replace(costs.trainer, per_step_s=0.01, per_token_s=0)))
    long = replace(usual.groups[0], rollouts=tuple(replace(one, response=30_000) for one in usual.groups[0].rollouts))
    return {
        "trainer": replace(usual, costs=replace(costs, trainer=replace(costs.trainer, per_step_s=9.0))),
        "publish": replace(usual, costs=replace(costs, publish=replace(costs.publish, held_s=9.0))),
        "engines": replace(quick, slots=8),
        "bound": replace(scenario(small(8, 1), lengths(60, 0.9, 400)), slots=256),
        "tail": replace(usual, groups=(long, *usual.groups[1:60]), slots=256),
    }[name]


@pytest.mark.parametrize("part", ["trainer", "publish", "engines", "bound", "tail"])
def test_the_limit_is_the_part_that_shortens_a_step_most(part: str) -> None:
    of = in_situation(part)
    found = predict(of, 30_000, steps=12)
    assert found.limit == part, found.savings
    limit, _, bound = advice(found)
    assert f"steps would take {found.savings[found.limit]:.0%} less time." in limit
    assert bound.startswith(f"max_staleness {found.free} is the smallest that costs no noticeable time")
    # The advice has a single source: the bound is the limit exactly if a larger bound is proposed.
    assert (found.free > found.bound) is (found.savings["bound"] > NOTICEABLE)


@pytest.mark.parametrize(("own_s", "limits"), [(1.05, False), (1.06, True), (1.5, True)])
def test_a_bound_whose_removal_saves_five_percent_does_not_limit(own_s: float, limits: bool) -> None:
    found = predict(scenario(small(8, 2)), 300, steps=2)
    found = replace(
        found, bounds={2: own_s, 4: 1.0}, savings=dict.fromkeys(found.savings, 0.0) | {"bound": 1 - 1 / own_s}
    )
    assert (found.limit, found.free) == (("bound", 4) if limits else (None, 2))
    assert ("No single part limits the speed" in advice(found)[0]) is not limits


def test_a_prediction_is_consistent() -> None:
    found = predict(scenario(small(8, 2)), 300, steps=12)
    assert found.bounds[2] == found.outcome.step_s
    assert (1 - NOTICEABLE) * found.bounds[found.free] <= min(found.bounds.values())
    assert found.ratio_to_sync > 1


def test_slow_rewards_cost_time_that_a_larger_bound_hides() -> None:
    usual = scenario(small(8, 2))
    slow = replace(usual, costs=replace(usual.costs, overheads=replace(usual.costs.overheads, settle_s=10.0)))
    found = predict(slow, 300, steps=12)
    assert found.limit == "bound" and found.savings["rewards"] > 0.3
    assert "rewards twice as fast" in advice(found)[1]


# -- the command


@pytest.fixture
def asyncrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):  # type: ignore[no-untyped-def]
    """Run a command line in this process: its exit code, stdout and stderr."""
    monkeypatch.setenv("ASYNCRL_DEBUG", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(SPEC)

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = make_run(tmp_path / "runs").path
    (path / "spec.yaml").write_text(SPEC)
    monkeypatch.setattr("tests.journal.recorded_run.METRICS", {"tokens/trained": 22.0})
    recorded(path / "journal.db", monkeypatch, DURATIONS[2])
    return path


def test_plan_from_a_run(run_folder: Path, asyncrl: Any) -> None:
    code, out, _ = asyncrl("plan", "spec.yaml", "--calibrate-from", "latest", "--set", "pipeline.max_staleness=3")
    assert code == 0, out
    assert "its own steps" in out and "max_staleness 3" in out and "limit  " in out
    assert "as with the measured" not in out
    changes = ("trainer.tokens_per_microbatch=auto", "trainer.epochs=4", "algorithm.kl_coef=0.1", "task.use=math")
    overrides = [word for change in changes for word in ("--set", change)]
    _, out, _ = asyncrl("plan", "spec.yaml", "--calibrate-from", "latest", "--set", "data.eval=null", *overrides)
    text = " ".join(out.split())
    for guess in ("tokens_per_microbatch auto as with the measured 8192", "trainer.epochs 4 as with the measured 1"):
        assert guess in text
    assert "algorithm.kl_coef 0.1 as" in text and "task.use math as with the measured chain_sum" in text
    code, out, _ = asyncrl("plan", "spec.yaml", "--calibrate-from", "latest", "--json")
    document = json.loads(out)
    assert code == 0
    assert all(line["fits"] for line in document["calibration"]["reproduced"])
    assert document["plan"]["outcome"]["step_s"] == pytest.approx(
        document["calibration"]["reproduced"][0]["measured"], rel=0.1
    )


def test_another_model_is_refused(run_folder: Path, asyncrl: Any) -> None:
    code, _, err = asyncrl("plan", "spec.yaml", "--calibrate-from", "latest", "--set", "rollout.dtype=bfloat16")
    assert code == 2
    assert "error: the calibration run had another rollout.dtype" in err


def test_a_run_that_is_not_reproduced_is_refused(
    run_folder: Path, asyncrl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WITHIN, "s", -1.0)
    code, out, err = asyncrl("plan", "spec.yaml", "--calibrate-from", "latest")
    assert (code, out) == (2, "")
    assert "not reproduced within 10 %" in err
