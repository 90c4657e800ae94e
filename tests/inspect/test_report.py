"""The report: its texts and charts. It is a single file, and no text of a run becomes markup."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.pages import duration
from asyncrl_cli.inspect.report import charts
from asyncrl_cli.inspect.report import samples as samples_module
from asyncrl_cli.inspect.report.answers import HEALTH_LINES, healthy
from asyncrl_cli.inspect.report.charts import SERIES, STALENESS, Curves, Points, curve_charts, curves, smoothed
from asyncrl_cli.inspect.report.held_out import evaluation_files, held_out_prompts
from asyncrl_cli.inspect.report.page import embedded, render, summarize
from asyncrl_cli.inspect.report.samples import samples
from asyncrl_cli.journal.history import step_spans
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.runs.directory import RunDirectory
from tests.inspect.made_runs import SITUATIONS, made_run, vary_metrics
from tests.journal.recorded_run import STARTED, EpisodeRun, RecordedRun, make_run, settings

pytestmark = pytest.mark.slow

HTML_TEXT = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }}"


class Elements(HTMLParser):
    """Every element with its attributes, and the text in each kind of it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "input", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes what it should not"

    def handle_data(self, data: str) -> None:
        for tag in self._open[-1:]:
            self.text[tag] = self.text.get(tag, "") + data


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with HTML and script in every text that a run can have."""
    run = made_run(tmp_path, monkeypatch, SITUATIONS["slow engines"])
    vary_metrics(run, SERIES)
    (run.path / "spec.yaml").write_text(f"name: {json.dumps(HTML_TEXT)}\nstop: {{steps: 12}}\n")
    journal = open_for_writing(run.path / FILE)
    journal.execute(
        "UPDATE groups SET uid = ?, prompt = ?, fields = ?, crc = NULL",
        (HTML_TEXT, json.dumps(HTML_TEXT), json.dumps({"answer": HTML_TEXT})),
    )
    journal.execute("INSERT INTO failures (at, kind, part, message) VALUES (0, 'engine', 'engine-0', ?)", (HTML_TEXT,))
    for step, accuracy in ((0, 0.25), (10, 0.75)):
        journal.execute("INSERT INTO evaluations VALUES (?, 'greedy', 1790000100, ?, 0, 0, 8, 0, 0)", (step, accuracy))
    journal.close()
    (run.path / "evaluations").mkdir()
    for step, reward in ((0, 0.0), (10, 1.0)):
        head = {"kind": "greedy", "step": step, "samples": 1, "pass_at": []}
        row = {"uid": "a", "prompt": HTML_TEXT, "response": HTML_TEXT, "answer": HTML_TEXT, "reward": reward}
        run.write_text(f"evaluations/step-{step:06d}-greedy.jsonl", f"{json.dumps(head)}\n{json.dumps(row)}\n")
    head = {"kind": "sampled", "step": 10, "pass_at": [0.5, 0.625, 0.75]}
    run.write_text("evaluations/step-000010-sampled.jsonl", json.dumps(head))
    return run


def charts_of(page: str) -> dict[str, Any]:
    return dict(json.loads(page.split('id="data">')[1].split("</script>")[0]))


def test_the_page_is_one_file_and_text_of_a_run_stays_text(run: RunDirectory) -> None:
    page = render(summarize(run))
    found = Elements(page)
    tags = [tag for tag, _ in found.elements]
    assert tags.count("script") == 3 and "img" not in tags and "link" not in tags
    for _, attributes in found.elements:
        assert not attributes.keys() & {"src", "onerror", "onload"}
        assert (attributes.get("href") or "#").startswith("#")
    anchors = {attributes["href"] for tag, attributes in found.elements if tag == "a"}
    assert len(anchors) > 6 and anchors <= {f"#{attributes.get('id')}" for _, attributes in found.elements}
    policy = next(a["content"] for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
    assert HTML_TEXT in found.text["td"], "a fault"
    assert found.text["p"].count(HTML_TEXT) >= 2, "a prompt and its reference"
    assert found.text["div"].count(HTML_TEXT) == 4, "a held-out prompt, its reference and its answers"
    assert "Held-out pass@k (sampled)" in page
    assert HTML_TEXT in found.text["pre"].replace('\\"', '"'), "the spec"


def test_page_of_an_unhealthy_run_says_so_first_and_gives_no_advice_on_speed(run: RunDirectory) -> None:
    summary = summarize(run)
    found = Elements(render(summary))
    wall_time = duration(run.state.updated - STARTED)
    assert summary.headline.startswith("finished, 12 of 1,000 steps, started ")
    assert summary.headline.endswith(f", {wall_time} in all") and summary.headline in found.text["p"]
    questions = found.text["dt"]
    assert questions.split("?")[:-1] == [
        *("Is it healthy", "Did it learn", "What limited its speed", "Was it ever too stale", "What failed")
    ]
    answers = found.text["dd"]
    assert re.match(r"No: .*, since step \d+\. Usual cause: .*\. Remedy: .* \(\w+\)\.", answers)
    assert "held-out accuracy (greedy) rose from 0.250 (0.071 to 0.591, 8 prompts) at step 0" in answers
    assert re.search(r"But .*, since step \d+\.", answers), "the accuracy rose before"
    assert "No advice: the training has been unhealthy since step" in answers
    assert "would take" not in answers
    assert "No: all 24 groups kept the bound of 2 versions" in answers
    assert "Faults: 1 × engine; the first: engine-0: </script>" in answers


def test_page_of_a_healthy_run_gives_advice_on_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarize(made_run(tmp_path, monkeypatch, SITUATIONS["slow engines"]))
    answers = {answer.question: answer for answer in summary.answers}
    assert answers["Is it healthy?"].answer == "Yes: no rule was broken in 12 steps."
    limit = answers["What limited its speed?"].answer
    assert limit.startswith("The engines limit the speed: with twice as many, steps would take 50% less time.")
    assert answers["What failed?"].answer == "Nothing: no part had a fault."


def finding(rule: str, first: int, last: int | None = None, stops_learning: bool = True) -> HealthFinding:
    return HealthFinding(rule, first, last, f"{rule} seen", "a cause", "a key", stops_learning)


def test_health_in_words() -> None:
    ended, slow, broken = finding("a", 1, 3), finding("b", 4, None, stops_learning=False), finding("c", 5)
    assert healthy([], 0, has_ended=True).answer == "The run ended before its first step."
    past = healthy([ended], 9, has_ended=True)
    assert (past.tone, past.details) == ("plain", ("Steps 1 to 3: a seen (a).",))
    now = healthy([ended, slow, broken], 9, has_ended=True)
    assert now.tone == "bad" and now.answer.startswith("No: c seen, since step 5."), "what stops learning comes first"
    assert [text[:12] for text in now.details] == ["B seen, sinc", "Steps 1 to 3"]
    many = healthy([finding("a", step, step) for step in range(1, 40)], 50, has_ended=True)
    assert len(many.details) == HEALTH_LINES + 1 and many.details[-1].startswith("And 27 more")


def test_every_chart_is_a_plotly_figure_with_an_element_on_the_page(run: RunDirectory) -> None:
    from plotly.graph_objects import Figure

    page = render(summarize(run))
    drawn = charts_of(page)
    assert len(drawn) >= 8
    assert set(drawn) == {a["id"] for _, a in Elements(page).elements if a.get("class") == "chart"}
    for chart in drawn.values():
        Figure(data=chart["data"], layout=chart["layout"])  # raises for properties that a figure does not have
        for trace in chart["data"]:
            assert all(len(xs) == len(trace["y"]) for xs in trace.get("meta", {}).values())


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, phase="starting")
    RecordedRun(run.path / FILE, monkeypatch, settings(), lambda _: 3.0)
    (run.path / "manifest.json").unlink()
    text = Elements(render(summarize(run))).text["dd"]
    assert text.count("The run ended before its first step.") == 4 and "process died" in text
    assert "yet" not in text and "fault" not in text


JSON = st.recursive(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists)


@given(JSON)
@example(HTML_TEXT)
def test_embedded_json_closes_no_script(value: Any) -> None:
    text = embedded(value)
    assert "<" not in text and json.loads(text) == value


# -- charts


@pytest.mark.parametrize("points", [3, 7, 100])
def test_curves_are_means_of_steps_in_a_row(points: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path, monkeypatch, SITUATIONS["slow trainer"], steps=7)
    journal = open_for_writing(run.path / FILE)
    rewards = [0.0, 1.0, math.nan, 3.0, 4.0, 5.0, 6.0]
    for step, reward in enumerate(rewards):
        metrics = {"reward/mean": reward, "tokens/trained": 10.0} | ({"train/loss": 1.0} if step == 3 else {})
        journal.execute("UPDATE batches SET metrics = ? WHERE step = ?", (json.dumps(metrics), step))
    journal.execute("INSERT INTO evaluations VALUES (4, 'greedy', 1790003600, 0.5, 0, 0, 8, 0, 0)")
    journal.close()
    with snapshot(run.path / FILE) as connection:
        spans = list(step_spans(connection, 1))
        monkeypatch.setattr(charts, "POINTS", points)
        found = curves(connection, spans, [], 2)
    size = -(-7 // points)
    parts = [np.array(rewards[at : at + size]) for at in range(0, 7, size)]
    expected = [np.nanmean(part) if np.isfinite(part).any() else None for part in parts]
    assert found.series["reward/mean"] == expected
    assert set(found.series) == {"reward/mean", "train/loss"}
    assert found.axis["steps"] == [min(at + size, 7) for at in range(0, 7, size)]
    assert found.axis["tokens"] == [10 * step for step in found.axis["steps"]]
    held_out = found.accuracy["greedy", 8]
    assert {name: list(values) for name, values in held_out.axis.items()} == {
        "steps": [4],
        "tokens": [40],
        "hours": [1],
    }
    assert held_out.values == (0.5,)
    for chart in curve_charts(found):
        json.dumps(chart.figure.to_plotly_json(), allow_nan=False)


# -- rollouts to read


def test_samples_are_different_rollouts_of_different_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / FILE, monkeypatch, settings(max_staleness=2), lambda g: 3.0 + 4 * (g % 3), 4)
    for _ in range(12):
        run.step()
    with snapshot(tmp_path / FILE) as connection:
        found = samples(connection, None)
        staleness = dict(
            connection.execute(
                "SELECT g.step + 1, max(b.version - r.oldest) FROM rollouts r JOIN groups g ON g.id = r.group_id "
                "JOIN batches b ON b.step = g.step GROUP BY 1"
            )
        )
    of_kind = {kind: [one for one in found if one.kind == kind] for kind in samples_module.KINDS}
    assert [len({(one.step - 1) // 4 for one in some}) for some in of_kind.values()] == [3, 3, 3, 3]
    assert len({one.rollout_id.split("-")[0] for one in found}) == len(found) == 12, "no group is shown twice"
    assert {one.reward for one in of_kind["best"]} == {1.0} and {one.reward for one in of_kind["worst"]} == {0.0}
    assert all(one.staleness == staleness[one.step] for one in of_kind["stalest"])
    assert max(one.staleness for one in found) > 0
    for one in found:
        assert one.reference == "7"
        assert [token.text for token in one.shown_tokens] == ["5 ", "6 ", "7 ", "1 "]
        assert [token.logprob for token in one.shown_tokens] == [0.0, -0.25, -0.5, -0.75]
        assert one.shown_tokens[1].surprise == pytest.approx(1 - math.exp(-0.25))
        versions = [token.version for token in one.shown_tokens]
        assert [token.age for token in one.shown_tokens] == [
            sorted(set(versions)).index(version) for version in versions
        ]


def test_held_out_prompts_show_learned_and_wrong_answers(tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    run = RunDirectory(tmp_path)
    rewards = {"always": (1, 1), "learned": (0, 1), "never": (0, 0), "lost": (1, 0), "new": (None, 0)}
    for index, step in enumerate((0, 10)):
        rows = [
            {
                "uid": uid,
                "prompt": [{"role": "user", "content": uid}],
                "response": f"{uid} {step}",
                "reward": both[index],
            }
            for uid, both in rewards.items()
        ]
        lines = [json.dumps(row) for row in ({"kind": "greedy", "step": step}, *rows)]
        run.write_text(f"evaluations/step-{step:06d}-greedy.jsonl", "\n".join([*lines, '{"uid": "half a li']))
    prompts = held_out_prompts(evaluation_files(tmp_path))
    assert [held_out.prompt for held_out in prompts] == ["user: learned", "user: never", "user: lost"]
    assert prompts[0].answers == ((0, "learned 0", False), (10, "learned 10", True))


def test_damaged_files_of_evaluations_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    run = RunDirectory(tmp_path)
    run.write_text("evaluations/a.jsonl", "no json\n")
    run.write_text("evaluations/b.jsonl", '{"kind": "greedy", "step": "x"}\n')
    run.write_text("evaluations/c.jsonl", '{"kind": "sampled", "step": 3, "pass_at": [0.5, 0.75]}\n')
    (tmp_path / "evaluations/d.jsonl").mkdir()
    assert [(file.step, file.pass_at) for file in evaluation_files(tmp_path)] == [(3, (0.5, 0.75))]


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM groups",
        "DELETE FROM rollouts",
        "DELETE FROM publishes",
        "DELETE FROM batches",
        "UPDATE groups SET ended_at = NULL",
        "UPDATE groups SET state = 'rejected'",
        "UPDATE batches SET metrics = '{}'",
        "UPDATE batches SET metrics = '{\"reward/mean\": NaN}'",
        "UPDATE evaluations SET prompts = 0, accuracy = 1.5",
    ],
)
def test_a_damaged_journal_still_has_a_report(run: RunDirectory, damage: str) -> None:
    journal = open_for_writing(run.path / FILE)
    journal.execute(damage)
    journal.close()
    run.write_text(
        "spec.yaml", "model: 3\ntask: {mix: 5}\nrollout: {engines: {}}\ntrainer: []\nalgorithm: {correction: 1}\n"
    )
    charts_of(render(summarize(run)))


# -- data of charts


@given(st.lists(st.none() | st.floats(-1, 1), max_size=120))
def test_a_running_mean_is_a_mean_of_neighbours(values: list[float | None]) -> None:
    found = smoothed(values)
    if len(values) < 20:
        assert found is None
        return
    assert found is not None and len(found) == len(values)
    known = [value for value in values if value is not None]
    for value, mean in zip(values, found, strict=True):
        assert (mean is None) is (value is None)
        assert mean is None or min(known) - 1e-9 <= mean <= max(known) + 1e-9


def course(**changes: Any) -> Curves:
    steps = 30
    axis = dict.fromkeys(("steps", "tokens", "hours"), tuple(float(at) for at in range(steps)))
    varied = {name: tuple(at / steps + len(name) for at in range(steps)) for name in SERIES}
    return replace(Curves(axis, varied, {}, {}, max_staleness=2), **changes)


def test_the_bound_is_drawn_and_the_largest_staleness_is_seen_beneath_the_mean() -> None:
    (figure,) = [chart.figure for chart in curve_charts(course()) if chart.title == STALENESS]
    (shape,) = figure.layout.shapes
    assert (shape.y0, shape.y1, shape.label.text) == (2, 2, "bound 2")
    widest, mean = (trace.line.width for trace in figure.data)
    assert widest > 2 * mean and figure.data[0].name == "max"


def test_evaluations_on_other_prompts_are_not_joined() -> None:
    def points(*steps: int) -> Points:
        at = tuple(map(float, steps))
        return Points({"steps": at}, (0.5,) * len(at), ((0.4, 0.6),) * len(at))

    evaluations = {("greedy", 128): points(10, 20, 30), ("greedy", 512): points(0, 40), ("sampled", 512): points(0, 40)}
    chart = curve_charts(course(accuracy=evaluations))[1]
    assert chart.title == "Held-out accuracy"
    assert [trace.mode for trace in chart.figure.data] == ["lines+markers", "markers", "markers"]
    assert [trace.name for trace in chart.figure.data] == [
        "greedy, 128 prompts",
        "greedy, 512 prompts",
        "sampled, 512 prompts",
    ]
    assert list(chart.figure.data[0].error_y.array) == pytest.approx([0.1] * 3)


def test_the_context_of_an_episode_has_no_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = EpisodeRun(tmp_path / FILE, monkeypatch, settings(), lambda _: 3.0)
    for _ in range(2):
        run.step()
    monkeypatch.setattr(samples_module, "TOKENS_SHOWN", 6)
    with snapshot(tmp_path / FILE) as connection:
        one = samples(connection, None)[0]
    assert [token.version is None for token in one.shown_tokens] == [True] * 3 + [False] * 2 + [True]
    assert one.left_out == 3 and [token.surprise for token in one.shown_tokens[:3]] == [0.0] * 3
