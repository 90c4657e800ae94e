"""A run does not continue at its position in edited data, unless the user accepts the edit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from stand_ins import spec

from asyncrl_cli.core.errors import DataError, RunError
from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.data.sources import read_source
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.progress import newest_serial, untrained_prompts
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.launch import DriverStart
from asyncrl_cli.orchestrator.resume import Plan, check_data
from asyncrl_cli.records.groups import BufferSettings, Candidate
from asyncrl_cli.records.prompt import OWN_UID_PREFIX, Prompt
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.inputs import SplitSpec

SPEC = spec(rollout={"group_size": 1}, pipeline={"groups_per_step": 1, "max_staleness": 0})
SETTINGS = replace(BufferSettings.from_spec(SPEC), max_staleness=100, total_steps=100)
PLAN = Plan(DriverStart("resume"), trained=0, again=False, without_journal=False)


def with_data(run: RunDirectory, rows: list[dict[str, str]]) -> Experiment:
    """The run's experiment, with these rows in its file."""
    path = run.path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Experiment(SPEC, run.path, read_source(SplitSpec(path=str(path)), "train", path.parent), ())


ROWS = [{"prompt": f"question {row}", "answer": str(row), "uid": f"p{row}"} for row in range(9)]


def admit(book: DurableLedger, experiment: Experiment, count: int, serial: int = 0) -> None:
    """Admit the prompts after a serial, like a run."""
    loader = PromptLoader(experiment.train_prompts, SPEC.seed, SPEC.data.shuffle)
    if serial:
        loader.restore(book.opening().loader or {})
    for number in range(serial + 1, serial + 1 + count):
        book.admit([Candidate(number, loader.next(), (1,), loader.state())])
    book.journal.commit(book.journal.noted())
    book.journal.close()


def admit_first(run: RunDirectory, count: int) -> None:
    """Admit a new run's first prompts."""
    admit(DurableLedger(run.path / FILE, SETTINGS), with_data(run, ROWS), count)


def edited(**change: str) -> list[dict[str, str]]:
    return [*ROWS[:3], ROWS[3] | change, *ROWS[4:]]


@pytest.mark.parametrize("admitted", [4, 9, 20])
def test_data_as_it_was_is_accepted(run: RunDirectory, admitted: int) -> None:
    admit_first(run, admitted)
    check_data(run, with_data(run, ROWS), PLAN)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (edited(uid="other"), "the data now has prompt 'other' at its position"),
        (edited(prompt="another question"), "prompt 'p3' was trained on, and the data now has other contents"),
        (edited(answer="5"), "the data now has other contents"),
        ([*ROWS, ROWS[0] | {"uid": "p9"}], "at its position"),
        (ROWS[1:], "at its position"),
    ],
)
def test_edited_data_is_noticed_before_the_run_continues(
    run: RunDirectory, rows: list[dict[str, str]], fault: str
) -> None:
    admit_first(run, 8 if len(rows) < 9 else 20)
    with pytest.raises(RunError, match=fault) as caught:
        check_data(run, with_data(run, rows), PLAN)
    assert caught.value.hint.endswith(f"asyncrl resume {run.argument} --accept-changed-data")


def test_prompts_that_a_checkpoint_kept_have_no_row_to_be_compared_with(run: RunDirectory) -> None:
    experiment = with_data(run, ROWS)
    waiting = {"uid": "from before", "content": "text", "fields": {}}
    book = DurableLedger(run.path / FILE, BufferSettings.from_spec(SPEC), {"step": 0, "prompts": [waiting]})
    book.admit([Candidate(1, Prompt("from before", "text"), (1,), {"epoch": 0, "position": 5})])
    book.journal.commit(book.journal.noted())
    check_data(run, experiment, PLAN)


@pytest.mark.parametrize("rows_before", [0, 2])
def test_own_prompts_of_programs_have_no_row_to_be_compared_with(run: RunDirectory, rows_before: int) -> None:
    experiment = with_data(run, ROWS)
    loader = PromptLoader(experiment.train_prompts, SPEC.seed, SPEC.data.shuffle)
    book = DurableLedger(run.path / FILE, SETTINGS)
    for number in range(1, rows_before + 1):
        book.admit([Candidate(number, loader.next(), (1,), loader.state())])
    own_prompt = Prompt(f"{OWN_UID_PREFIX}1", "a program's own")
    book.admit([Candidate(rows_before + 1, own_prompt, (1,), loader.state())])
    book.journal.commit(book.journal.noted())
    assert [prompt.uid for prompt in book.journal.read(untrained_prompts, 0)] == ["p0", "p1"][:rows_before]
    book.journal.close()
    check_data(run, experiment, PLAN)


def resumed_with(run: RunDirectory, experiment: Experiment, count: int) -> None:
    """Resume with accepted changed data, and admit its next prompts."""
    check_data(run, experiment, PLAN, accept_changed_data=True)
    PLAN.carry_out(run, accept_changed_data=True)
    book = DurableLedger.begin(run.path / FILE, SETTINGS, "resume", "")
    admit(book, experiment, count, serial=book.journal.read(newest_serial))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_data_that_was_accepted_is_accepted_from_then_on(run: RunDirectory, count: int) -> None:
    admit_first(run, 9)
    changed = with_data(run, [row | {"answer": "other"} for row in ROWS])
    with pytest.raises(RunError, match="other contents"):
        check_data(run, changed, PLAN)
    resumed_with(run, changed, count)
    check_data(run, changed, PLAN)
    again = with_data(run, [row | {"answer": "yet another"} for row in ROWS])
    if count:
        with pytest.raises(RunError, match="other contents"):
            check_data(run, again, PLAN)


@pytest.mark.parametrize("accept", [True, False])
def test_data_without_the_place_of_the_run_is_refused_before_anything_starts(run: RunDirectory, accept: bool) -> None:
    admit_first(run, 7)
    with pytest.raises(DataError, match="there is no position 7 in epoch 0 of 5 training prompts"):
        check_data(run, with_data(run, ROWS[:5]), PLAN, accept)
    checkpoint = DriverStart("resume", base={"loader": {"epoch": 0, "position": 7}})
    with pytest.raises(DataError, match="there is no position 7"):
        check_data(run, with_data(run, ROWS[:5]), Plan(checkpoint, 0, again=True, without_journal=True))
