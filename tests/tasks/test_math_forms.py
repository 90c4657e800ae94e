"""Forms of answers in MATH and GSM8K: equal, different and unreadable ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.ready.math_answers import Extract, MathAnswers
from asyncrl_cli.tasks.ready.math_forms import Unreadable, equal_answers, parse_answer

pytestmark = pytest.mark.slow

FORMS = [
    ("1,2,3", ["1, 2, 3", "3,2,1", r"1,2,\text{ and }3", "1, 2 and 3"], ["123", "1,2", "1,2,3,4", "1,2,4"]),
    (r"\$36", ["36", r"\$36", "$36", "36 dollars", "36.00"], ["35", "3.6"]),
    (r"\$1,\!200", ["1200", "1,200", r"\$1,200"], ["1.2", "12"]),
    (r"10,\!080", ["10080", "10,080", "10{,}080", r"10\,080"], ["10", "10.08"]),
    ("1,234", ["1234"], ["1", "1.234", "1,2,3,4"]),
    ("1,234,567.5", ["1234567.5"], ["1234567"]),
    (".5", ["0.5", r"\frac12", "1/2"], ["5"]),
    (r"50\%", ["50", r"50\%", "50%", "0.5", "1/2"], ["5", "500"]),
    (r"5.4\%", ["5.4", "5.4%", "0.054"], ["54"]),
    (r"30^\circ", ["30", r"30^{\circ}", "30°", r"30\text{ degrees}", "30 degrees"], ["3", r"\pi"]),
    (r"\frac{3}{4}", ["0.75", r"\frac34", r"\dfrac{3}{4}", "3/4", r"\tfrac34"], [r"\frac43", "34"]),
    (r"3\frac{1}{5}", ["16/5", "3.2", r"3 \frac{1}{5}", "3 1/5"], ["3/5", "0.6"]),
    (r"-1\frac{1}{2}", ["-3/2", "-1.5"], ["-1/2"]),
    (r"\frac{\sqrt{3}}{2}", [r"\frac{\sqrt3}2", r"\sqrt{3}/2", r"\dfrac{\sqrt 3}{2}"], [r"\sqrt{3}", r"\frac{3}{2}"]),
    (
        r"\frac{1 \pm \sqrt{5}}{2}",
        [r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}"],
        [r"\frac{1+\sqrt{5}}{2}"],
    ),
    (r"\pm 3", ["3,-3", r"\pm3", "-3, 3"], ["3", "-3"]),
    ("3+4i", ["4i+3"], ["3-4i", "7"]),
    (r"\pi", [r"\pi"], ["3.14", "3"]),
    (r"\frac{\pi}{3}", [r"\pi/3", r"\frac\pi3", r"\frac\pi{3}"], [r"\frac{3}{\pi}"]),
    ("x^2+2x+1", ["(x+1)^2", "1+2x+x^{2}"], ["x^2+1"]),
    ("x=5", ["5", "x = 5"], ["6", "x=6", "y=5"]),
    (r"x \in [1,2]", ["[1,2]"], ["(1,2)", "[1,3]"]),
    ("(1,2)", ["(1, 2)", r"\left(1,2\right)"], ["(2,1)", "[1,2]", "12"]),
    ("[0,1)", [r"\left[0,1\right)"], ["[0,1]", "(0,1)"]),
    (r"(-\infty, 2)", [r"(-\infty,2)", "x<2"], [r"(-\infty,2]", r"(2,\infty)"]),
    (
        r"(-\infty,-1)\cup(1,\infty)",
        [r"(1,\infty) \cup (-\infty,-1)", r"\left(-\infty,-1\right)\cup\left(1,\infty\right)"],
        [r"(-\infty,1)\cup(1,\infty)", "(-1,1)", r"(-\infty,-1]\cup(1,\infty)"],
    ),
    (r"\{1,2,3\}", ["1,2,3", r"\{3,2,1\}"], [r"\{1,2\}"]),
    ("(1,2), (3,4)", ["(3,4), (1,2)", r"(1,2) \text{ and } (3,4)"], ["(1,2)", "(2,1),(3,4)", "1,2,3,4"]),
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
    (r"\text{June 20}", ["June 20"], ["June 21", "20"]),
    (r"\text{no solution}", ["no solution"], ["0"]),
    ("1101_2", ["1101_{2}", "1101 base 2"], ["1100_2", "1101_3", "1101", "13"]),
    ("3:2", ["3:2"], ["2:3", "5"]),
    ("10!", ["3628800"], ["10"]),
    (r"\binom{10}{3}", ["120"], ["30"]),
    ("2^{10}", ["1024"], ["20"]),
    (r"6.02 \times 10^{23}", [r"6.02\cdot10^{23}", "6.02e23"], [r"6.02 \times 10^{22}"]),
    (r"\emptyset", [r"\emptyset", r"\varnothing"], ["0", r"\{0\}"]),
    (r"\infty", [r"\infty"], [r"-\infty", "1"]),
    (r"x \le 3", [r"x \leq 3", r"(-\infty,3]"], ["x<3", r"x \ge 3"]),
    ("-1 < x < 3", ["(-1,3)", "-1<x<3"], [r"-1 \le x < 3", "[-1,3]"]),
    (r"x<-2 \text{ or } x>3", [r"(-\infty,-2)\cup(3,\infty)"], ["(-2,3)"]),
    (r"864 \mbox{ inches}^2", ["864", r"864\text{ inches}^2", "864 square inches"], ["864.5", "86"]),
    (r"(-\infty, \infty)", [r"(-\infty,\infty)", r"\mathbb{R}"], [r"(0,\infty)"]),
    (r"\log_2 3", [r"\log_{2}3"], [r"\log_3 2"]),
    (r"0.\overline{3}", [r"\frac13", r"0.\overline{3}"], ["0.3"]),
    ("72", ["72", "72.0", "72."], ["27", "7"]),
    ("-3", ["-3", "−3"], ["3"]),
    ("2280000", ["2,280,000", "2{,}280{,}000", "2 280 000"], ["2,280"]),
    (r"6:15 \text{ p.m.}", ["6:15 p.m.", r"6:15\text{ pm}"], ["6:16 p.m."]),
    ("x = 1, y = 2", ["x=1, y=2", "y=2, x=1"], ["x=2, y=1", "x=1"]),
    (r"\sin x", [r"\sin(x)"], [r"\cos x"]),
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
    ("1/2", ["½", "1⁄2", r"\frac 1 2", r"{1 \over 2}"], ["⅓", "-½"]),
    ("7/2", ["3½", "3 ½"], ["3/½", "½"]),
    ("x^{-2}", ["x⁻²"], ["x²"]),
    (r"\sqrt{12}", ["√12", "2√3", "2*sqrt(3)", "2·√3"], ["√13", "√3"]),
    (r"2\pi", ["2π", "2pi", "2*pi"], ["2p"]),
    ("36", ["€36", "36 €", "£36", r"\mathbf{36}", r"\bm{36}", r"\color{red}{36}", r"\underline{36}", "= 36"], ["€35"]),
    ("11", [r"x\approx11", "≈ 11"], [r"2 \approx 11", r"11.2"]),
    (r"\frac{1}{3}", [r"x = \frac13 \approx 0.33", "0.3333333"], ["0.33", "0.3333"]),
    ("0.0000001", ["10^{-7}", "10^-7", "1e-07", r"1\times10^{-7}"], ["0.0000002", "2e-07", "0"]),
    ("8", ["2**3", "2^(3)", "2³", "5+3"], ["6"]),
    ("(p,q)=(3,2)", ["(3,2)"], ["(q,p)=(3,2)", "(2,3)"]),
    ("11:21", ["V_1:V_2=11:21", "11 : 21"], ["22:42", "21:11"]),
    ("a_3=2, a_{37}=19", [r"a_{37} = 19, \quad a_3 = 2"], ["a_3=19, a_{37}=2"]),
    ("(11,7)or(7,11)", ["(7,11), (11,7)"], ["(7,11)"]),
    (
        r"\begin{pmatrix}1 & 2\end{pmatrix}",
        [r"\left[\begin{array}{cc}1 & 2\end{array}\right]"],
        [r"\begin{pmatrix}2 & 1\end{pmatrix}"],
    ),
    ("y=2x+3", ["2x-y+3=0", "2y = 4x+6"], ["y=2x-3", "2x-y-3=0", "x=2y+3"]),
    (
        "E",
        ["E: a polygenic score", "E. one", "E) one", r"\textbf{(E) }72", r"\text{E: x or y}", "Option E"],
        ["F: E", "E: or F"],
    ),
    ("72", [r"\textbf{(E) }72", r"\textbf{(E)}\ 72"], ["(E) 73"]),
    ("2^{100000}", ["4^{50000}"], ["2^{100000}+1"]),
    (r"\sqrt{2}+\sqrt{3}", [r"\sqrt{5+2\sqrt{6}}", "3.1462644"], ["3.146", r"\sqrt{2}+\sqrt{3}+10^{-20}"]),
    (r"1000000\pi", ["3141592.65"], ["3141593", r"1000001\pi"]),
    (r"\cos(2x)", [r"1-2\sin^2 x"], [r"1-2\sin x"]),
    (
        "72",
        [
            "48+24=72", r"48 + 24 = 72\text{ clips}", r"\frac{144}{2} = 72", r"2^3 \cdot 9 = 72", r"x = 48+24 = 72",
            r"\texttt{72}", r"\emph{72}", r"{\bf 72}", r"\Large 72", r"\colorbox{yellow}{72}", r"\text{Total} = 72",
            r"\mathrm{(C)}\ 72", r"\boldsymbol{(C)}\ 72", "f(3)=72", "72 клипа", r"72\text{元}", "72개", "７２", "٧٢",
            r"72\text{ pièces}", r"72\,\text{км/ч}", "₽72", "72₩", r"72\text{ (clips)}", r"72\text{ \%}",
        ],
        ["72+24=96", "48+24=73", "2x=72", "x^2=72", r"\sin x=72", "72以上", "72万", "72 или больше", "72 тысяч", "7 2"],
    ),
    (
        "5",
        [
            r"5\ \mathrm{m/s}", r"5\,\mathrm{m}", r"5\ \mathrm{m\,s^{-1}}", r"5\ \text{m s}^{-1}", "5°C",
            r"5^\circ\mathrm{C}", r"5\ \text{m}\cdot\text{s}^{-1}", r"5\frac{\mathrm{m}}{\mathrm{s}}",
            r"5\ \mathrm{kg\cdot m/s^2}",
        ],
        [r"5\mathrm{e}", r"5\mathrm{A}", r"5\alpha", "5x", "2=5+3"],
    ),
    (
        r"\frac{1}{3}",
        [r"0.\dot{3}", r"0.\overline 3", r"0.\bar{3}", "0.(3)", r"\frac{2}{6}=\frac13"],
        ["0.3", "0.3(3)"],
    ),
    (r"\frac{1}{7}", [r"0.\dot{1}4285\dot{7}"], [r"0.\dot{1}4285"]),
    (
        "C",
        [r"\mathrm{(C)}\ 12", r"\mathbf{(C)}", r"\mathrm{C}", r"\text{C.}"],
        [r"\mathrm{(D)}\ 12", r"\mathrm{(C)}\ \mathrm{(D)}"],
    ),
    ("5000000", ["5 миллионов", "500万元", "5百万", r"5\,\text{million dollars}"], ["5"]),
    ("1990-05", ["1990-05", "1990 - 05", "1990–05"], ["1985", "1990-5", "05-1990"]),
]  # fmt: skip
"""Answers from the data sets, with correct and with wrong responses."""
TASK = MathAnswers()


def graded(answer: str, response: str) -> float:
    return TASK.reward(Prompt("row", "?", {"answer": answer}), f"Thus the answer is $\\boxed{{{response}}}$.", True)


@pytest.mark.parametrize(("answer", "right", "wrong"), FORMS, ids=[form[0] for form in FORMS])
def test_answers_of_real_data_sets(answer: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in [answer, *right] if graded(answer, text) != 1.0] == []
    assert [text for text in wrong if graded(answer, text) != 0.0] == []
    assert [text for text in right if graded(text, answer) != 1.0] == [], "the comparison is symmetric"


SIMILAR = {
    "5": ["y^2=5", "5.000001", r"5\text{ hundredths}"],
    r"6 \times 10^{-23}": [r"1 \times 10^{-23}"],
    "0.0000001": ["0.0000002"],
    r"\text{east}": [r"\text{seat}"],
    "(1,x)": ["1x"],
    r"3+4\text{i}": ["7"],
    r"5\mathrm{e}^2": ["5"],
    r"6:15 \text{ a.m.}": [r"6:15 \text{ p.m.}"],
    "1,1,2": ["1,2", "1,2,2"],
    r"\pm 1": ["1,1"],
    "12": ["12xy", "12ab", "12_3"],
    "2": ["2 ab", "2 dozen", r"2\text{ or more}", r"2\text{ more}", "2?", r"2 \pm 1", r"x \ne 2"],
    "10": ["10m"],
    "6ab": ["6cd"],
    r"\frac12": [r"\frac{1}{2}bh"],
    r"2\pi": [r"2\pi rh"],
    "5 billion": ["5 million"],
    "7": ["7 thousand", "3 4", r"3 \ldots 4"],
    "9": ["3 squared"],
    "a_1": ["a_2"],
    "3 pm": ["3 am", "3"],
    r"5\text{ east}": [r"5\text{ west}"],
    "10 north": ["10"],
    r"\angle ABC": [r"\angle CAB"],
    r"\overline{AB}": [r"\overline{BA}"],
    "x'": ["x"],
    "A'B": ["AB"],
    "1/2004!": ["1/2006!"],
    "0": ["1/2004!"],
    "1/3^50": ["2/3^50"],
    "x/3^{50}": ["2x/3^{50}"],
    "x<1/3^{50}": ["x<2/3^{50}"],
    "[0,1/3^{50}]": ["[0,2/3^{50}]"],
    r"\begin{pmatrix}0.0000001\\1\end{pmatrix}": [r"\begin{pmatrix}0.0000002\\1\end{pmatrix}"],
    "10^{60}": [r"10^{60}+1"],
    "e^{-1000}": ["e^{-1001}"],
    r"e^{\pi\sqrt{163}}": ["262537412640768744"],
    "9" * 600: ["9" * 599 + "8"],
    "123456789.1": ["123456789"],
    "x^2=-1": ["x^2=-2"],
    "0=0": ["1=1"],
    "1/0": ["2/0"],
    "2024-01-15": ["2024-15-01", "2008"],
    "10.5.2024": ["5.10.2024"],
    "2019-2020": ["-1"],
    "5-10": ["10-15"],
    "1985": ["1990-05", "(1990-05)", "1990 - 05", r"\text{1990-05}"],
    "-1": ["3-4", "3–4", "3-4 years", "x=3-4"],
    "2.4": ["12/05"],
    "1977": ["1990-05-08"],
    "1/3": ["10:30"],
    "12:30": ["24:60", "2/5"],
    "555-1234": ["1234-1913"],
    "(555) 123-4567": ["(555) 4567-123"],
    "v1.2.3": ["v1.3.2"],
    "A": ["A, B", "A: 5 or B: 6", "(A) and (B)", "A: Paris (B) London", "not A"],
    "A: Paris": ["C: Paris"],
    "(A) 72": ["(B) 72"],
    "4": [r"3 \to 4", r"3 \lor 4", "3 → 4", "3 # 4", r"3 \unknown 4"],
}
"""Answers, with responses that look alike and have another value."""


@pytest.mark.parametrize(
    ("answer", "response"), [(answer, response) for answer, others in SIMILAR.items() for response in others]
)
def test_similar_answers_with_other_values_are_not_equal(answer: str, response: str) -> None:
    assert graded(answer, response) == graded(response, answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        # a list needs no box
        ("1,2,3", "The answer is 1, 2 and 3.", 1.0),
        ("1,2,3", "So the answer is: $1$, $2$, $3$", 1.0),
        ("1,2,3", "Answer: 3,2,1\nI hope this helps.", 1.0),
        ("1,2,3", "#### 1, 2, 3", 1.0),
        ("1,2,3", "The answer is 123.", 0.0),
        ("1,2,3", "The answer is 1, 2 and 4.", 0.0),
        # prose is searched for its last expression
        ("18", "She makes $18 every day.", 1.0),
        (r"\frac{1}{2}", r"so it is $\frac{2}{4}$ in all.", 1.0),
        ("0.0000001", "I get 0.0000002", 0.0),
        ("41", "The answer is 41. Wait, 42 was a guess", 0.0),
        ("5", "The answer is 5. Wait, 7. Final: 7", 0.0),
        ("7", "The answer is 5. Wait, 7. Final: 7", 1.0),
        ("5", "The answer is 5.\n\nHmm, 7.", 0.0),
        ("9", "The answer is 9 (3*3).", 1.0),
        ("9", "The answer is 9, since 3*3 = 9.", 1.0),
        ("15", "The answer is $15 per day. No other way is cheaper.", 1.0),
        ("no", "Answer: No, it is not.", 1.0),
        ("no solution", "The answer is no solution.", 1.0),
        ("5", "The answer is 5 apples, and the change is 3.", 1.0),
        ("3", "The answer is 5 apples, and the change is 3.", 0.0),
        ("7", "The answer is 6, not 7.", 0.0),
        ("7", "The answer is not 7.", 0.0),
        ("7", "So the answer is either 6 or 7.", 0.0),
        ("B", "The correct answer is **B**.", 1.0),
        ("40", "#### The answer is 40", 1.0),
        ("4", "The score is 3-4.", 0.0),
        ("18", "She earns 18 million dollars.", 0.0),
        ("18", "Total: 9 + 9 = 18 clips", 1.0),
        # other scripts
        ("18", "Ответ: 18 клипов.", 1.0),
        ("3,4", "Ответ: 3, 4", 1.0),
        ("4", "Ответ: 3, 4", 0.0),
        ("да", "**Ответ:** да", 1.0),
        ("B", "答案是B。", 1.0),
        ("18", "所以，答案是 18 个苹果。谢谢！", 1.0),
        ("18", "答案不是18。", 0.0),
        ("18", "18ではありません。", 0.0),
        ("18", "정답은 18이 아닙니다.", 0.0),
        ("18", "Ответ: не 18", 0.0),
        ("18", "Ответ: 18 или 20", 0.0),
        ("20", "答案是18或20", 0.0),
        ("18", "La respuesta no es 18.", 0.0),
        ("20", "Respuesta: 18 o 20", 0.0),
        # a mark that is cut off counts
        ("7", r"First \boxed{5}. Wait, so it is \boxed{7", 0.0),
        ("7", "<answer>5</answer> Hm. <answer>7", 0.0),
        ("7", "<answer>7", 1.0),  # `</answer>` may be a stop string
        ("5", "\\boxed{5}\n####", 0.0),
        ("5", r"\boxed{5} <answer>", 0.0),
        ("5", r"\boxed{5}. The answer is", 0.0),
        # of several marks the last one
        ("20", r"\boxed{18}. The answer is 20.", 1.0),
        ("20", r"The answer is 18. So \boxed{20}", 1.0),
        ("18", r"<answer>18</answer> so \boxed{20}", 0.0),
        ("20", r"\boxed{18} <answer>20</answer>", 1.0),
        ("5", r"\boxed{5}. No, the answer is not 5.", 0.0),
        ("18", r"The answer is \boxed{18}. This answer is correct.", 1.0),
        ("18", r"\boxed{18} is the final answer.", 1.0),
        # thoughts
        ("18", r"<think>I get \boxed{18}.</think> The answer is 20.", 0.0),
        ("20", r"<think>I get \boxed{18}.</think> The answer is 20.", 1.0),
        ("18", r"<think>I get \boxed{18}.", 0.0),
        ("18", r"\boxed{18}</think><think>", 0.0),
        ("18", r"<seed:think>\boxed{18}</seed:think>20", 0.0),
        ("18", r"[THINK]\boxed{18}[/THINK] The answer is 20.", 0.0),
        ("20", r"◁think▷ I get \boxed{18}. ◁/think▷20", 1.0),
        ("20", r"<|begin_of_thought|>\boxed{18}<|end_of_thought|><|begin_of_solution|>20<|end_of_solution|>", 1.0),
        ("20", r"<thought>\boxed{18}</thought>20", 1.0),
        ("20", r"<reasoning>\boxed{18}</reasoning><answer>20</answer>", 1.0),
        ("20", r"<unused94>thought \boxed{18}<unused95>20", 1.0),
        ("20", r"<|channel>thought \boxed{18}<channel|>20", 1.0),
        ("20", r"<|START_THINKING|>\boxed{18}<|END_THINKING|><|START_RESPONSE|>20<|END_RESPONSE|>", 1.0),
        ("20", r"<|channel|>analysis<|message|>\boxed{18}<|end|><|start|>assistant<|channel|>final<|message|>20", 1.0),
        ("20", r"analysisI get \boxed{18}.assistantfinal20", 1.0),
        ("20", r"Here is my thought process: \boxed{18}. Here is my response: 20", 1.0),
        ("18", r"◁think▷ \boxed{18}", 0.0),
        ("18", r"<|begin_of_thought|>\boxed{18}", 0.0),
        ("18", r"<thought>\boxed{18}", 0.0),
        ("18", r"<unused94>thought \boxed{18}", 0.0),
        ("18", r"<|channel>thought \boxed{18}", 0.0),
        ("18", r"<|channel|>analysis<|message|>\boxed{18}<|end|><|start|>assistant<|channel|>final", 0.0),
        ("18", r"<|channel|>final<|message|>20<|channel|>analysis<|message|>\boxed{18}", 0.0),
        ("18", r"analysisI get \boxed{18}", 0.0),
        ("4", r"Analysis of the data gives \boxed{4}", 1.0),
        # an empty box is the answer
        ("18", r"Put the answer in \boxed{18} or \boxed{}", 0.0),
        ("18", r"\boxed{18} or \boxed{...}", 0.0),
        # several in a row are a list
        ("3,4", r"\boxed{3} and \boxed{4}", 1.0),
        ("3,4", r"$\boxed{3}$, $\boxed 4$", 1.0),
        ("x=3,y=4", r"\boxed{x=3}, \boxed{y=4}", 1.0),
        ("3,4", r"x = \boxed{3}, y = \boxed{4}", 1.0),
        ("4", r"\boxed{3}\boxed{4}", 0.0),
        ("4", "<answer>3</answer> or <answer>4</answer>", 0.0),
        ("4", r"\boxed{3} and \boxed{4", 0.0),
        ("4", "\\boxed{4}\n\n\\boxed{4}", 1.0),
        ("4", r"\boxed{3}. That is wrong: \boxed{4}", 1.0),
        # forms of marks
        ("42", r"\fbox{42}", 1.0),
        ("5", r"$\boxed 5$", 1.0),
        ("72", "**72**", 1.0),
        ("72", "`72`", 1.0),
        ("72", "So she earns *72* dollars.", 1.0),
        ("72", "<answer>72</answer>", 1.0),
        ("72", r"<ANSWER>\boxed{72}</ANSWER>", 1.0),
        ("72", "**Final Answer**: 72", 1.0),
        ("72", "### Final Answer\n72", 1.0),
        ("72", "Therefore, the answer is\n\\[\n72\n\\]", 1.0),
        ("B", "The correct option is B", 1.0),
        ("B", "Answer: B. Paris", 1.0),
        ("B", "The answer is B) Paris.", 1.0),
        ("B", "The answer is A or B.", 0.0),
        # hedges
        ("2", "2 or 3", 0.0),
        ("3", r"\boxed{2 \text{ or } 3}", 0.0),
        ("3", "<answer>2 or 3</answer>", 0.0),
        ("2", "It is 3, not 2.", 0.0),
        # truths of files
        (["3", "-3"], r"\boxed{-3}", 1.0),
        (["3", -3], r"\boxed{-3}", 1.0),
        (["3", "-3"], r"\boxed{3, -3}", 0.0),
        ('["3", "-3"]', r"\boxed{-3}", 1.0),
        ("[1, 2]", r"\boxed{[1,2]}", 1.0),
        ("[1, 2]", r"\boxed{1}", 0.0),
        (18.0, r"\boxed{18}", 1.0),
        (1e-07, r"\boxed{10^{-7}}", 1.0),
        (1e-07, r"\boxed{0}", 0.0),
        (r"We add: $\boxed{5}$ apples.", r"\boxed{5}", 1.0),
        ("3 * 4 is 12.\n#### 12", "First 3, then 4.\n#### 12", 1.0),
        ("#### 1,234", "It is 1234.", 1.0),
        ("$5", "5 dollars #### 5 dollars", 1.0),
        (12, "12.0", 1.0),
        ("x^2+1", "we get $1 + x^2$", 1.0),
        # no answer, or another one
        ("42", "", 0.0),
        ("42", "42 #### 41", 0.0),
    ],
)
def test_one_expression_of_a_response_decides(answer: object, response: str, reward: float) -> None:
    assert TASK.reward(Prompt("row", "?", {"answer": answer}), response, True) == reward


NO_ANSWERS = ["-", "?", "—", "...", "N/A", "null", "None", "#N/A", "[null]", "[NaN]", '["", null]', '["?"]', "#### -"]


@pytest.mark.parametrize(
    "answer", ["", "nan", "-inf", "NaT", "[]", "####", r"\boxed{5", ["2", "nan"], [""], *NO_ANSWERS]
)
def test_rows_without_a_readable_answer_are_refused(answer: object) -> None:
    with pytest.raises(Unreadable, match="field 'answer' is not a readable answer"):
        TASK.check_prompt(Prompt("row", "?", {"answer": answer}))


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{(10^{10})!}",
        r"\boxed{9!!!!!!}",
        r"\boxed{10^{-10^{9}}}",
        r"\boxed{9^{9^{9^{9^9}}}}",
        r"\boxed{x<9^{9^{9^9}}}",
        r"\boxed{" + "x^" * 1000 + "x}",
        r"\boxed{3} " * 50_000,
        "#### a\n" * 50_000,
        "answer is " * 50_000,
        "<answer>1</answer>" * 50_000,
        "a _b " * 50_000,
        "[THINK]" * 50_000 + "[/THINK]",
    ],
    ids=lambda response: response[:20],
)
def test_hostile_responses_are_judged_without_their_computation(response: str) -> None:
    for task in (TASK, MathAnswers(timeout_s=1)):
        assert task.reward(Prompt("row", "?", {"answer": "12"}), response, True) == 0.0


def test_a_truncated_tag_is_wrong() -> None:
    extracts: tuple[Extract, ...] = ("any", "answer_tag")
    for extract in extracts:
        task = MathAnswers(extract=extract)
        assert task.reward(Prompt("row", "?", {"answer": "7"}), "<answer>7", False) == 0.0


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
        ("12", "2 apples, then 12 pears.", "last_number", 1.0),
        ("12", "twelve", "last_number", 0.0),
        ("12", r"\boxed{13} no \boxed{\frac{24}{2}}", "boxed", 1.0),
        ("12", "12", "boxed", 0.0),
        ("12", r"\boxed{12", "boxed", 0.0),
        ("1/2", "<answer>0.5</answer> 3", "answer_tag", 1.0),
        ("12", "12", "answer_tag", 0.0),
    ],
)
def test_an_extract_reads_its_mark_and_a_heading_is_no_answer(
    answer: str, response: str, extract: Extract, reward: float
) -> None:
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
        parse_answer(text)


# -- whatever the text

PIECES = st.sampled_from([
    "1", "23", "456", "0.5", ",", ", ", "(", ")", "[", "]", "{", "}", r"\{", r"\}", r"\frac", r"\text{ cm}", "x", "=",
    "+", "-", "/", " ", r"\pm", r"\cup", "%", r"\$", "^", "and", r"\\", r"\begin{pmatrix}", r"\end{pmatrix}", "A",
    "Monday", r"\boxed{", "$", "<", r"\overline{3}", "e5", "^\\circ", ";", ".",
])  # fmt: skip
TEXTS = st.lists(PIECES, max_size=9).map("".join) | st.text(max_size=20)


def never(one: str, other: str) -> bool:
    return False


@given(TEXTS, TEXTS)
def test_reading_never_crashes_and_comparison_is_symmetric(one: str, other: str) -> None:
    answers = []
    for text in (one, other):
        try:
            answers.append(parse_answer(text))
        except Unreadable:
            continue
        assert equal_answers(answers[-1], answers[-1], never)
    if len(answers) == 2:
        assert equal_answers(*answers, never) == equal_answers(*reversed(answers), never)


def ways_to_write(number: int) -> Iterator[str]:
    commas = f"{number:,}"
    yield from (str(number), f"{number}.0", f"{number}.", f"${number}$", f"{number} dollars", f"x = {number}", commas)
    yield from (commas.replace(",", space) for space in (r"{,}", r",\!", r"\,"))
    yield from (rf"\${commas}", rf"{number}\text{{ cm}}^2", rf"\frac{{{2 * number}}}{{2}}", rf"\boxed{{{number}}}")
    yield rf"{number}^\circ"


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_numbers_are_equal_in_every_notation(one: int, other: int) -> None:
    for text in ways_to_write(one):
        assert equal_answers(parse_answer(str(one)), parse_answer(text), never), text
        assert equal_answers(parse_answer(str(other)), parse_answer(text), never) == (one == other), text


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_lists_are_equal_in_any_order_and_of_the_same_elements(numbers: list[int], rng: random.Random) -> None:
    shuffled = rng.sample(numbers, len(numbers))
    text = ", ".join(map(str, numbers))
    for other in (",".join(map(str, shuffled)), r"\{" + ", ".join(map(str, shuffled)) + r"\}"):
        assert equal_answers(parse_answer(text), parse_answer(other), never)
    assert not equal_answers(parse_answer(text), parse_answer(", ".join(map(str, numbers[1:]))), never)
    assert not equal_answers(
        parse_answer(text), parse_answer(", ".join(map(str, [numbers[0] + 1, *numbers[1:]]))), never
    )
    in_brackets = [parse_answer(f"({', '.join(map(str, row))})") for row in (numbers, shuffled)]
    assert equal_answers(*in_brackets, never) == (numbers == shuffled), "a tuple has an order"


SENTENCES = [
    "Ответ: {}", "Итого {} клипов.", "答案是{}。", "答案：{}", "答えは{}です。", "정답은 {}입니다.", "답: {}",
    "الجواب هو {}",
    "उत्तर {} है।", "Η απάντηση είναι {}.", "Απάντηση: {}", "התשובה היא {}.", "คำตอบคือ {}", "Відповідь: **{}**",
    "Đáp án là {}.", "Respuesta: {}", "Die Antwort ist {}.", "答案是 ${}$。", "x = {}", "<thought>7</thought>{}",
    "<answer>{}</answer>", r"\boxed{{{}\text{{ км}}}}", r"\boxed{{{}元}}", r"\boxed{{\texttt{{{}}}}}",
    r"\boxed{{{}\ \mathrm{{m/s}}}}", r"\boxed{{9-9={}}}",
]  # fmt: skip


@given(
    st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.sampled_from(SENTENCES), st.sampled_from("0٠۰०๐০０")
)
def test_a_number_counts_in_every_script_and_no_other_number_does(one: int, other: int, form: str, zero: str) -> None:
    digits = str.maketrans("0123456789", "".join(chr(ord(zero) + digit) for digit in range(10)))
    response = form.format(str(one).translate(digits))
    assert TASK.reward(Prompt("row", "?", {"answer": one}), response, True) == 1.0
    assert TASK.reward(Prompt("row", "?", {"answer": other}), response, True) == (one == other)
