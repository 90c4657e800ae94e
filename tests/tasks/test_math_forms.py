"""The forms of answers in MATH and GSM8K: what is equal, what is not, and what is unreadable."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.ready.math_answers import Extract, MathAnswers
from asyncrl_cli.tasks.ready.math_forms import Unreadable, read, same

FORMS = [
    ("1,2,3", ["1, 2, 3", "3,2,1", r"1,2,\text{ and }3", "1, 2 and 3"], ["123", "1,2", "1,2,3,4", "1,2,4"]),
    ("-2,1", ["1,-2"], ["-21", "-2", "2,1"]),
    (r"\$36", ["36", r"\$36", "$36", "36 dollars", "36.00"], ["35", "3.6"]),
    (r"\$18.90", ["18.90", "18.9", r"\$18.90"], ["18.91", "1890"]),
    (r"\$1,\!200", ["1200", "1,200", r"\$1,200"], ["1.2", "12"]),
    (r"10,\!080", ["10080", "10,080", "10{,}080", r"10\,080"], ["10", "10.08"]),
    ("1,234", ["1234"], ["1", "1.234", "1,2,3,4"]),
    ("1,234,567.5", ["1234567.5"], ["1234567"]),
    (".5", ["0.5", r"\frac12", "1/2"], ["5"]),
    (r"50\%", ["50", r"50\%", "50%", "0.5", "1/2"], ["5", "500"]),
    (r"5.4\%", ["5.4", "5.4%", "0.054"], ["54"]),
    (r"30^\circ", ["30", r"30^{\circ}", "30°", r"30\text{ degrees}", "30 degrees"], ["3", r"\pi"]),
    (r"\frac{3}{4}", ["0.75", r"\frac34", r"\dfrac{3}{4}", "3/4", r"\tfrac34"], [r"\frac43", "34"]),
    (r"-\frac{1}{2}", [r"\frac{-1}{2}", "-0.5", "-1/2", r"-\frac12"], ["0.5"]),
    (r"3\frac{1}{5}", ["16/5", "3.2", r"3 \frac{1}{5}", "3 1/5"], ["3/5", "0.6"]),
    (r"-1\frac{1}{2}", ["-3/2", "-1.5"], ["-1/2"]),
    (r"\frac{\sqrt{3}}{2}", [r"\frac{\sqrt3}2", r"\sqrt{3}/2", r"\dfrac{\sqrt 3}{2}"], [r"\sqrt{3}", r"\frac{3}{2}"]),
    (r"2\sqrt{3}", [r"\sqrt{12}", r"2\cdot\sqrt{3}"], [r"\sqrt{3}"]),
    (
        r"\frac{1 \pm \sqrt{5}}{2}",
        [r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}"],
        [r"\frac{1+\sqrt{5}}{2}"],
    ),
    (r"\pm 3", ["3,-3", r"\pm3", "-3, 3"], ["3", "-3"]),
    (r"1 \pm 2i", ["1+2i, 1-2i"], ["1+2i"]),
    ("3+4i", ["4i+3"], ["3-4i", "7"]),
    (r"\pi", [r"\pi"], ["3.14", "3"]),
    (r"\frac{\pi}{3}", [r"\pi/3", r"\frac\pi3", r"\frac\pi{3}"], [r"\frac{3}{\pi}"]),
    ("x^2+2x+1", ["(x+1)^2", "1+2x+x^{2}"], ["x^2+1"]),
    ("x=5", ["5", "x = 5"], ["6", "x=6", "y=5"]),
    ("5", ["x=5", "x = 5"], ["x=6"]),
    ("y = 2x+3", ["2x+3", "y=3+2x"], ["y=2x-3"]),
    (r"x \in [1,2]", ["[1,2]"], ["(1,2)", "[1,3]"]),
    ("(1,2)", ["(1, 2)", r"\left(1,2\right)"], ["(2,1)", "[1,2]", "12"]),
    ("[1,2]", [r"\left[1, 2\right]"], ["(1,2)", "[1,2)"]),
    ("[0,1)", [r"\left[0,1\right)"], ["[0,1]", "(0,1)"]),
    (r"(-\infty, 2)", [r"(-\infty,2)", "x<2"], [r"(-\infty,2]", r"(2,\infty)"]),
    (
        r"(-\infty,-1)\cup(1,\infty)",
        [r"(1,\infty) \cup (-\infty,-1)", r"\left(-\infty,-1\right)\cup\left(1,\infty\right)"],
        [r"(-\infty,1)\cup(1,\infty)", "(-1,1)", r"(-\infty,-1]\cup(1,\infty)"],
    ),
    (r"\{1,2,3\}", ["1,2,3", r"\{3,2,1\}"], [r"\{1,2\}"]),
    ("(1,2), (3,4)", ["(3,4), (1,2)", r"(1,2) \text{ and } (3,4)"], ["(1,2)", "(2,1),(3,4)", "1,2,3,4"]),
    ("(1,2,3)", ["(1, 2, 3)"], ["(3,2,1)", "(1,2)", "1"]),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        [r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"],
        [r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", "12"],
    ),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"],
        [r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"],
    ),
    (
        r"\begin{pmatrix} -1/3 \\ \frac{2}{3} \end{pmatrix}",
        [r"\begin{pmatrix} -\frac13 \\ 2/3 \end{pmatrix}"],
        [r"\begin{pmatrix} \frac13 \\ 2/3 \end{pmatrix}"],
    ),
    (r"\text{(A)}", ["A", "(A)", r"\text{A}", r"\textbf{(A)}"], ["B", r"\text{(B)}"]),
    (r"\text{Monday}", ["Monday", "monday", r"\text{Monday}"], ["Tuesday", r"\text{Sunday}"]),
    (r"\text{Yes}", ["yes"], ["no"]),
    (r"\text{June 20}", ["June 20"], ["June 21", "20"]),
    (r"\text{no solution}", ["no solution"], ["0"]),
    ("1101_2", ["1101_{2}", "1101 base 2"], ["1100_2", "1101_3", "1101", "13"]),
    ("2516_8", ["2516_{8}"], ["2517_8"]),
    ("3:2", ["3:2"], ["2:3", "5"]),
    ("10!", ["3628800"], ["10"]),
    (r"\binom{10}{3}", ["120"], ["30"]),
    ("2^{10}", ["1024"], ["20"]),
    (r"6.02 \times 10^{23}", [r"6.02\cdot10^{23}", "6.02e23"], [r"6.02 \times 10^{22}"]),
    (r"1.25 \cdot 10^4", ["12500"], ["1250"]),
    (r"\emptyset", [r"\emptyset", r"\varnothing"], ["0", r"\{0\}"]),
    (r"\infty", [r"\infty"], [r"-\infty", "1"]),
    (r"x \le 3", [r"x \leq 3", r"(-\infty,3]"], ["x<3", r"x \ge 3"]),
    ("-1 < x < 3", ["(-1,3)", "-1<x<3"], [r"-1 \le x < 3", "[-1,3]"]),
    (r"x<-2 \text{ or } x>3", [r"(-\infty,-2)\cup(3,\infty)"], ["(-2,3)"]),
    (r"\left( \frac{1}{2}, 3 \right)", ["(0.5, 3)", r"(\frac12,3)"], [r"(3,\frac12)"]),
    (r"\frac{x+2}{7}", ["(x+2)/7"], [r"\frac{x-2}{7}"]),
    (r"864 \mbox{ inches}^2", ["864", r"864\text{ inches}^2", "864 square inches"], ["864.5", "86"]),
    (r"15\text{ cm}^2", ["15", r"15\text{ cm}^2", "15 cm^2"], ["225", "1"]),
    (r"5.4 \text{ cents}", ["5.4"], ["54"]),
    (r"(3, \frac{\pi}{2})", [r"\left(3,\frac{\pi}{2}\right)"], [r"(\frac{\pi}{2},3)"]),
    (r"\frac{2}{3} \text{ hours}", [r"\frac23"], [r"\frac32"]),
    (r"137 \frac{1}{2}", ["137.5", r"\frac{275}{2}"], ["137", "68.5"]),
    (r"7,\!371", ["7371", "7,371"], ["7"]),
    (r"\sqrt{13} \text{ units}", [r"\sqrt{13}"], ["13"]),
    (r"(-\infty, \infty)", [r"(-\infty,\infty)", r"\mathbb{R}"], [r"(0,\infty)"]),
    ("9,-9", ["-9,9", r"\pm 9"], ["9"]),
    (r"\log_2 3", [r"\log_{2}3"], [r"\log_3 2"]),
    (r"0.\overline{3}", [r"\frac13", r"0.\overline{3}"], ["0.3"]),
    (r"\frac{1}{2}, \frac{1}{3}", [r"\frac13,\frac12", "1/3, 1/2"], [r"\frac12"]),
    ("A,B,C", ["A,B,C", "C, B, A"], ["A,B"]),
    ("f(x)=x^2", ["x^2", "f(x) = x^2"], ["x^3"]),
    ("72", ["72", "72.0", "72."], ["27", "7"]),
    ("-3", ["-3", "−3"], ["3"]),
    ("2280000", ["2,280,000", "2{,}280{,}000", "2 280 000"], ["2,280"]),
    ("11:20", ["11:20"], ["20:11", "11"]),
    (r"6:15 \text{ p.m.}", ["6:15 p.m.", r"6:15\text{ pm}"], ["6:16 p.m."]),
    (r"8\pi-16", [r"-16+8\pi"], [r"16-8\pi"]),
    (r"\dfrac{9}{7}", ["9/7"], ["7/9"]),
    ("1,000", ["1000", "1,000"], ["1", "0", "1,0"]),
    (r"2 \text{ and } 3", ["2,3"], ["2", "23"]),
    (r"10\text{ or }20", ["10, 20"], ["10", "1020"]),
    ("x = 1, y = 2", ["x=1, y=2", "y=2, x=1"], ["x=2, y=1", "x=1"]),
    (r"\frac{1}{x}", ["1/x"], ["x"]),
    (r"\sin x", [r"\sin(x)"], [r"\cos x"]),
    ("2k+1", ["1+2k"], ["2k"]),
    (r"-\infty", [r"-\infty"], [r"\infty"]),
    (r"\left[\frac{3}{2}, 4\right)", ["[1.5,4)"], ["[1.5,4]"]),
    (r"\{(1,2),(3,4)\}", [r"\{(3,4),(1,2)\}"], [r"\{(1,2)\}"]),
    (r"[-1,2) \cup (3,5]", [r"(3,5]\cup[-1,2)"], [r"[-1,2]\cup(3,5]"]),
    (r"\boxed{7}", ["7"], ["8"]),
    ("5000000", ["5 million", r"5\text{ million}", r"\$5 million", "5 million dollars", "5,000 thousand"], ["5"]),
    ("24", ["2 dozen", r"2\text{ dozen eggs}"], ["2"]),
    ("60", [r"60\text{ km/h}", r"60\frac{\text{km}}{\text{h}}", "60 miles per hour", "60mph", "60 sq. ft"], ["6"]),
    (r"10\text{ m}", ["10", r"10\text{ m/s}^2", "10 cups of tea"], ["1"]),
    (r"12\pi", [r"12\pi\text{ cm}^2", r"12\pi cm^2", r"12\pi square inches"], ["12"]),
    ("3 p.m.", ["3 pm", r"3\text{ PM}", r"\text{3 p.m.}"], ["3 a.m.", "3"]),
    ("1A_{16}", ["1a_{16}"], ["1A_{12}", "1B_{16}", "26"]),
    ("13_{10}", ["13"], ["13_8"]),
    ("12xy", ["12yx", r"12x\cdot y"], ["12x"]),
    ("i", [r"\sqrt{-1}"], ["1"]),
    ("{1,2,3}", [r"\{3,2,1\}"], ["{1,2}"]),
    (r"\mathbf{i}+2\mathbf{j}", [r"\mathbf{i}+2\mathbf{j}"], [r"\mathbf{i}"]),
]
"""Answers from the data sets, with correct and with wrong responses."""
TASK = MathAnswers()


def graded(answer: str, response: str) -> float:
    return TASK.reward(Prompt("row", "?", {"answer": answer}), f"Thus the answer is $\\boxed{{{response}}}$.", True)


@pytest.mark.parametrize(("answer", "right", "wrong"), FORMS, ids=[form[0] for form in FORMS])
def test_answers_of_real_data_sets(answer: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in [answer, *right] if graded(answer, text) != 1.0] == []
    assert [text for text in wrong if graded(answer, text) != 0.0] == []
    assert [text for text in right if graded(text, answer) != 1.0] == [], "the comparison is symmetric"


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("1", "x+y=1"),
        ("5", "y^2=5"),
        (r"6 \times 10^{-23}", r"1 \times 10^{-23}"),
        ("0.0000001", "0.0000002"),
        ("5", "5.000001"),
        (r"\text{east}", r"\text{seat}"),
        ("(1,x)", "1x"),
        (r"3+4\text{i}", "7"),
        (r"5\mathrm{e}^2", "5"),
        (r"6:15 \text{ a.m.}", r"6:15 \text{ p.m.}"),
        ("1,1,2", "1,2"),
        ("1,1,2", "1,2,2"),
        ("[1,2)", "(1,2]"),
        (r"\pm 1", "1,1"),
        ("12", "12xy"),
        ("12", "12ab"),
        ("2", "2 ab"),
        ("3", "3 abc"),
        ("10", "10m"),
        ("6ab", "6cd"),
        (r"\frac12", r"\frac{1}{2}bh"),
        (r"2\pi", r"2\pi rh"),
        ("3", "3abc"),
        ("5 billion", "5 million"),
        ("7", "7 thousand"),
        ("2", "2 dozen"),
        ("2", r"2\text{ or more}"),
        ("2", r"2\text{ more}"),
        ("9", "3 squared"),
        ("5", r"5\text{ hundredths}"),
        ("1011_2", "1011_3"),
        ("12", "12_3"),
        ("1011_2 + 0", "1011_3"),
        ("a_1", "a_2"),
        ("3 pm", "3 am"),
        ("3 pm", "3"),
        (r"\text{3 p.m.}", r"\text{3 a.m.}"),
        ("5pm", "5am"),
        (r"5\text{ east}", r"5\text{ west}"),
        ("10 north", "10"),
        ("cat", "act"),
        ("no", "on"),
        (r"\angle ABC", r"\angle CAB"),
        (r"\overline{AB}", r"\overline{BA}"),
        ("x'", "x"),
        ("A'B", "AB"),
        ("i", r"-\sqrt{-1}"),
    ],
)
def test_similar_answers_with_other_values_are_not_equal(answer: str, response: str) -> None:
    assert graded(answer, response) == graded(response, answer) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("The answer is 1, 2 and 3.", 1.0),
        ("So the answer is: $1$, $2$, $3$", 1.0),
        ("Answer: 3,2,1\nI hope this helps.", 1.0),
        ("#### 1, 2, 3", 1.0),
        ("The answer is 123.", 0.0),
        ("The answer is 1, 2 and 4.", 0.0),
    ],
)
def test_a_list_needs_no_box(response: str, reward: float) -> None:
    assert TASK.reward(Prompt("row", "?", {"answer": "1,2,3"}), response, True) == reward


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("42", "I get 42", 1.0),
        ("18", "She makes $18 every day.", 1.0),
        (r"\frac{1}{2}", r"so it is $\frac{2}{4}$ in all.", 1.0),
        ("0.0000001", "I get 0.0000002", 0.0),
        ("42", "The answer is 41. Wait, 42 was a guess", 0.0),
        ("41", "The answer is 41. Wait, 42 was a guess", 0.0),
        ("5", "The answer is 5. Wait, 7. Final: 7", 0.0),
        ("7", "The answer is 5. Wait, 7. Final: 7", 1.0),
        ("5", "The answer is 5.\n\nHmm, 7.", 0.0),
        ("5", "The answer is 5. No: 7", 0.0),
        ("4", "The answer is 1, 2 and 4.", 0.0),
        ("9", "The answer is 9 (3*3).", 1.0),
        ("9", "The answer is 9, since 3*3 = 9.", 1.0),
        ("15", "The answer is $15 per day. No other way is cheaper.", 1.0),
        ("no", "Answer: No, it is not.", 1.0),
        ("no solution", "The answer is no solution.", 1.0),
        ("1,2,3", "The answer is 1, 2, and 3.", 1.0),
        ("5", "The answer is 5 apples, and the change is 3.", 1.0),
        ("3", "The answer is 5 apples, and the change is 3.", 0.0),
        ("7", "The answer is 6, not 7.", 0.0),
        ("7", "The answer is not 7.", 0.0),
        ("7", "The answer isn't 7.", 0.0),
        ("7", "So the answer is either 6 or 7.", 0.0),
        ("B", "The correct answer is **B**.", 1.0),
        ("40", "#### The answer is 40", 1.0),
    ],
)
def test_prose_is_searched_for_its_last_expression(answer: str, response: str, reward: float) -> None:
    assert TASK.reward(Prompt("row", "?", {"answer": answer}), response, True) == reward


STEPS = "Add.\n#### Step 2\nSo the sum is"


@pytest.mark.parametrize(
    ("answer", "response", "extract", "reward"),
    [
        ("42", "20+22 is 42\n#### 42\nI hope that these 3 steps help.", "any", 1.0),
        ("42", "#### **42**", "last_number", 1.0),
        ("even", "It is even.\n#### even", "any", 1.0),
        ("42", f"{STEPS} $\\boxed{{42}}$ (of 2).", "any", 1.0),
        ("2", f"{STEPS} $\\boxed{{42}}$ (of 2).", "any", 0.0),
        ("42", "#### Since f(0)=1\nWe get $\\boxed{42}$. (Since 1-p=p.)", "any", 1.0),
        ("42", "So $\\boxed{42}$.\n#### Step 2", "any", 1.0),
        ("42", "So $\\boxed{42}$.\n#### 1. Check", "any", 1.0),
        ("42", "$\\boxed{41}$\n#### 42", "any", 1.0),
        ("42", "$\\boxed{41}$\n#### 42", "boxed", 0.0),
        ("42", "#### 42\nSo $\\boxed{41}$", "any", 0.0),
        ("42", "#### 42\nno box", "boxed", 0.0),
        ("42", f"{STEPS} 42.", "last_number", 1.0),
        ("42", f"{STEPS} <answer>42</answer>", "answer_tag", 1.0),
    ],
)
def test_a_heading_is_not_an_answer(answer: str, response: str, extract: Extract, reward: float) -> None:
    assert MathAnswers(extract=extract).reward(Prompt("row", "?", {"answer": answer}), response, True) == reward


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("-4", "x is −4"),
        ("0.5", "is .5"),
        ("1500", "1.5e3"),
        ("5", "3-5"),
        ("5", "3 - 5"),
        ("-18", "-$18"),
        ("-5", "=-5"),
    ],
)
def test_the_last_number_has_its_sign_point_and_exponent(answer: str, response: str) -> None:
    prompt = Prompt("row", "?", {"answer": answer})
    assert MathAnswers(extract="last_number").reward(prompt, response, True) == 1.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (" $ $ ", "empty"),
        (r"\boxed{}", "empty"),
        (r"\frac{1}{2", "not closed"),
        ("1}", "not opened"),
        ("(1,2", "do not match"),
        ("(" * 1000 + ")" * 1000, "nested"),
        ("1" * 10_000, "more than"),
    ],
)
def test_unreadable_answers_are_reported_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read(text)


# -- whatever the text

PIECES = st.sampled_from(
    [
        *("1", "23", "456", "0.5", ",", ", ", "(", ")", "[", "]", "{", "}", r"\{", r"\}", r"\frac", r"\text{ cm}", "x"),
        *(
            "=",
            "+",
            "-",
            "/",
            " ",
            r"\pm",
            r"\cup",
            "%",
            r"\$",
            "^",
            "and",
            r"\\",
            r"\begin{pmatrix}",
            r"\end{pmatrix}",
        ),
        *("A", "Monday", r"\boxed{", "$", "<", r"\overline{3}", "e5", "^\\circ", ";", "."),
    ]
)
TEXTS = st.lists(PIECES, max_size=9).map("".join) | st.text(max_size=20)


def never(one: str, other: str) -> bool:
    return False


@given(TEXTS, TEXTS)
def test_reading_never_crashes_and_comparison_is_symmetric(one: str, other: str) -> None:
    answers = []
    for text in (one, other):
        try:
            answers.append(read(text))
        except Unreadable:
            continue
        assert same(answers[-1], answers[-1], never)
    if len(answers) == 2:
        assert same(*answers, never) == same(*reversed(answers), never)


def ways_to_write(number: int) -> Iterator[str]:
    commas = f"{number:,}"
    yield from (str(number), f"{number}.0", commas, commas.replace(",", r"{,}"), commas.replace(",", r",\!"))
    yield from (
        commas.replace(",", r"\,"),
        f"${number}$",
        rf"\${commas}",
        rf"{number}\text{{ cm}}^2",
        f"{number} dollars",
    )
    yield from (
        rf"\frac{{{2 * number}}}{{2}}",
        f"{number}.",
        rf"\boxed{{{number}}}",
        f"x = {number}",
        rf"{number}^\circ",
    )


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_numbers_are_equal_in_every_notation(one: int, other: int) -> None:
    for text in ways_to_write(one):
        assert same(read(str(one)), read(text), never), text
        assert same(read(str(other)), read(text), never) == (one == other), text


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_lists_are_equal_in_any_order_and_of_the_same_elements(numbers: list[int], rng: random.Random) -> None:
    shuffled = rng.sample(numbers, len(numbers))
    text = ", ".join(map(str, numbers))
    for other in (",".join(map(str, shuffled)), r"\{" + ", ".join(map(str, shuffled)) + r"\}"):
        assert same(read(text), read(other), never)
    assert not same(read(text), read(", ".join(map(str, numbers[1:]))), never)
    assert not same(read(text), read(", ".join(map(str, [numbers[0] + 1, *numbers[1:]]))), never)
    in_brackets = [read(f"({', '.join(map(str, row))})") for row in (numbers, shuffled)]
    assert same(*in_brackets, never) == (numbers == shuffled), "a tuple has an order"
