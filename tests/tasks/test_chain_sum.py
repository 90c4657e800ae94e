"""Chain sums: the splits and the verifier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.ready.chain_sum import ChainSum

pytestmark = pytest.mark.slow

TASK = ChainSum()


def prompt_for(expression: str) -> Prompt:
    """The row of an expression such as ``7+6-0``."""
    return Prompt("row", f"{expression}=", {"answer": str(eval(expression)), "metadata": {}, "terms": 0})


def test_the_splits_share_no_expression_even_for_two_terms() -> None:
    task = ChainSum(min_terms=2, max_terms=2)
    train = {prompt.content for prompt in task.prompts("train", 3000)}
    held_out = {prompt.content for prompt in task.prompts("eval", 500)}
    assert not train & held_out
    assert len(train | held_out) == 200, "together they are all expressions"
    assert len(held_out) >= 10


def test_rows_are_the_same_at_every_call_and_size_and_have_distinct_uids() -> None:
    few, many = TASK.prompts("train", 20), ChainSum().prompts("train", 40)
    assert list(few) == many[:20]
    assert few[-1] == many[19]
    assert len({prompt.uid for prompt in many}) == 40
    with pytest.raises(IndexError):
        few[20]


def test_prompts_cost_nothing_until_they_are_used() -> None:
    prompts = TASK.prompts("train", 10**12)  # more than a machine could make
    assert len(prompts) == 10**12
    assert prompts[10**12 - 1].uid == "chain_sum/train/999999999999"


def test_the_number_of_terms_follows_the_decay() -> None:
    terms = [prompt.fields["terms"] for prompt in ChainSum(2, 4, decay=0.5).prompts("train", 2000)]
    assert [round(terms.count(n) / 2000, 1) for n in (2, 3, 4)] == [0.6, 0.3, 0.1]


@pytest.mark.parametrize("answer", ["4", "+04", "+4", " 4 ", "04", "000004"])
def test_the_right_number_scores_with_any_padding(answer: str) -> None:
    assert TASK.reward(prompt_for("7+6-0-9"), f"+6=+13-0=+13-9=+04#{answer}", True) == 1.0


@pytest.mark.parametrize(
    "response",
    ["", "#", "4", "#5", "#4#5", "#4#", "#4 apples", "#4.0", "#+-4", "#4,", "#0x4", "#1e0", "#٤", "#" + "4" * 5000],
)
def test_any_other_response_scores_zero(response: str) -> None:
    assert TASK.reward(prompt_for("7+6-0-9"), response, True) == 0.0


def test_the_last_mark_counts_and_only_in_a_finished_response() -> None:
    assert TASK.reward(prompt_for("7+6-0-9"), "#9#4", True) == 1.0
    assert TASK.reward(prompt_for("7+6-0-9"), "#4", False) == 0.0
    assert TASK.reward(prompt_for("0-9"), "-9=-09#-9", True) == 1.0


@given(st.text(), st.booleans())
def test_no_response_raises(response: str, finished: bool) -> None:
    assert TASK.reward(prompt_for("1+1"), response, finished) in (0.0, 1.0)


@pytest.mark.parametrize("options", [{"min_terms": 1}, {"min_terms": 5, "max_terms": 4}, {"decay": 0}])
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ChainSum(**options)  # type: ignore[arg-type]
