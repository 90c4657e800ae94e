"""Chain sums: the splits, the verifier, the demonstrations."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import DemonstrationTask, PromptTask, Task
from asyncrl_cli.tasks.ready.chain_sum import ChainSum

pytestmark = pytest.mark.slow

TASK = ChainSum()


def prompt_for(expression: str) -> Prompt:
    """The row of an expression such as ``7+6-0``."""
    return Prompt("row", f"{expression}=", {"answer": str(eval(expression)), "metadata": {}, "terms": 0})


def test_it_is_a_task_with_prompts_and_demonstrations() -> None:
    assert isinstance(TASK, Task)
    assert isinstance(TASK, PromptTask)
    assert isinstance(TASK, DemonstrationTask)


def test_the_splits_and_the_demonstrations_share_no_expression_even_for_two_terms() -> None:
    task = ChainSum(min_terms=2, max_terms=2)
    train = {prompt.content for prompt in task.prompts("train", 3000)}
    held_out = {prompt.content for prompt in task.prompts("eval", 500)}
    rng = random.Random(0)
    shown = {task.demonstration(rng, clean)[0] for clean in (True, False) for _ in range(1500)}
    assert not train & held_out
    assert not shown & held_out
    assert len(train | held_out) == 200, "together they are all expressions"
    assert len(held_out) >= 10


def test_rows_are_the_same_at_every_call_and_size_and_have_distinct_uids() -> None:
    few, many = TASK.prompts("train", 20), ChainSum().prompts("train", 40)
    assert list(few) == many[:20]
    assert few[-1] == many[19]
    assert len({prompt.uid for prompt in many}) == 40
    with pytest.raises(IndexError):
        few[20]


def test_a_hundred_thousand_prompts_cost_nothing_until_they_are_used() -> None:
    TASK.prompts("train", 1)[0]
    start = time.perf_counter()
    prompts = TASK.prompts("train", 100_000)
    assert len(prompts) == 100_000
    assert prompts[99_999].uid == "chain_sum/train/99999"
    assert time.perf_counter() - start < 0.1


def test_the_number_of_terms_follows_the_decay() -> None:
    terms = [prompt.fields["terms"] for prompt in ChainSum(2, 4, decay=0.5).prompts("train", 2000)]
    assert [round(terms.count(n) / 2000, 1) for n in (2, 3, 4)] == [0.6, 0.3, 0.1]


@pytest.mark.parametrize("answer", ["4", "+04", "+4", " 4 ", "04", "000004"])
def test_the_right_number_scores_with_any_padding(answer: str) -> None:
    assert TASK.reward(prompt_for("7+6-0-9"), f"+6=+13-0=+13-9=+04#{answer}", True) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "#",
        "4",
        "#5",
        "#4#5",
        "#4#",
        "#4 apples",
        "#4.0",
        "#+-4",
        "#--4",
        "#4,",
        "#0x4",
        "#1e0",
        "#٤",
        "#" + "4" * 5000,
    ],
)
def test_any_other_response_scores_zero(response: str) -> None:
    assert TASK.reward(prompt_for("7+6-0-9"), response, True) == 0.0


def test_the_last_mark_counts_and_only_in_a_finished_response() -> None:
    assert TASK.reward(prompt_for("7+6-0-9"), "#9#4", True) == 1.0
    assert TASK.reward(prompt_for("7+6-0-9"), "#4", False) == 0.0
    assert TASK.reward(prompt_for("0-9"), "-9=-09#-9", True) == 1.0


@given(st.text(), st.booleans())
@settings(deadline=None)
def test_no_response_raises(response: str, finished: bool) -> None:
    assert TASK.reward(prompt_for("1+1"), response, finished) in (0.0, 1.0)


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_clean_demonstrations_are_right(seed: int) -> None:
    text, response = TASK.demonstration(random.Random(seed), clean=True)
    expression = text.removesuffix("=")
    assert TASK.reward(prompt_for(expression), response, True) == 1.0
    steps, _, answer = response.partition("#")
    assert answer == str(eval(expression))
    assert len(steps) == 6 * (len(expression) // 2) or abs(int(answer)) > 99, "every total has the same width"


def test_the_working_is_written_in_running_totals_of_fixed_width() -> None:
    task = ChainSum(min_terms=4, max_terms=4)
    rng = random.Random(5)
    text, response = task.demonstration(rng, clean=True)
    first, *terms = text.removesuffix("=").replace("+", " +").replace("-", " -").split()
    total, steps = int(first), ""
    for term in terms:
        total += int(term)
        steps += f"{term}={total:+03d}"
    assert response == f"{steps}#{total}"


def test_the_mixture_has_the_given_shares_of_guesses_slips_and_repetitions() -> None:
    task = ChainSum(careful=0.4, slip=0.03, repeat=0.25)
    rng = random.Random(1)
    shown = [task.demonstration(rng, clean=False) for _ in range(4000)]
    guesses = [pair for pair in shown if pair[1].startswith("#")]
    worked = [pair for pair in shown if not pair[1].startswith("#")]
    assert 0.57 < len(guesses) / 4000 < 0.63
    lucky = sum(TASK.reward(prompt_for(text.removesuffix("=")), response, True) for text, response in guesses)
    assert lucky / len(guesses) < 0.05, "a guess does not know the sum"
    right = sum(TASK.reward(prompt_for(text.removesuffix("=")), response, True) for text, response in worked)
    assert 0.82 < right / len(worked) < 0.95
    repeated = [response for _, response in worked if "?" in response]
    assert 0.21 < len(repeated) / len(worked) < 0.29
    assert all(len(set(response.partition("#")[0].split("?"))) == 1 for response in repeated), "the same working again"
    assert max(len(response) for _, response in shown) + 1 < 192


@pytest.mark.parametrize(
    "options", [{"min_terms": 1}, {"min_terms": 5, "max_terms": 4}, {"decay": 0}, {"careful": 1.5}]
)
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ChainSum(**options)  # type: ignore[arg-type]
