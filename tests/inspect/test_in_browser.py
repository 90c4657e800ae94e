"""The report in a headless Chromium: drawn without console messages or further downloads, with working controls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.inspect.report.charts import SERIES
from asyncrl_cli.inspect.report.page import render, summarize
from tests.inspect.browser import Page, browser, installed, page
from tests.inspect.made_runs import SITUATIONS, made_run, vary_metrics

pytestmark = [pytest.mark.slow, pytest.mark.skipif(installed() is None, reason="there is no Chromium")]

DRAWN = "document.querySelectorAll('.chart > .plot-container .main-svg').length > 0"
TICKS = "[...document.querySelectorAll('#chart-0 .xtitle')].map((one) => one.textContent).join()"
TOKEN = "getComputedStyle(document.querySelector('.tokens i[style*=\"--p:0.5\"]')).backgroundColor"
GROUND = "getComputedStyle(document.body).backgroundColor"
FONTS = (
    "[getComputedStyle(document.querySelector('#chart-0 .xtick text')).fontFamily, "
    "getComputedStyle(document.body).fontFamily].map((one) => one.split(',')[0])"
)
ANCHORS = "[...document.querySelectorAll('nav a')].map((one) => document.querySelector(one.hash) !== null)"
INK = "getComputedStyle(document.querySelector('#chart-0 .xtick text')).fill"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        run = made_run(folder, patch, SITUATIONS["tight bound"])
        vary_metrics(run, SERIES)
        (run.path / "spec.yaml").write_text(f"name: {run.run_id}\n")
        (folder / "report.html").write_text(render(summarize(run)))
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser(tmp_path_factory.mktemp("profile")) as address:
        yield address


async def controls(shown: Page) -> dict[str, Any]:
    """What the page shows before and after each control is used."""

    async def click(selector: str) -> None:
        await shown.evaluate(f"document.querySelector('{selector}').click()")

    found = {"drawn": await shown.evaluate(DRAWN), "step": await shown.evaluate(TICKS)}
    await click("#axis [value=tokens]")
    found["tokens"] = await shown.evaluate(TICKS)
    await click("#axis [value=hours]")
    found["hours"] = await shown.evaluate(TICKS)
    found["logprob"] = await shown.evaluate(TOKEN)
    await click(".colouring [value=version]")
    found["version"] = await shown.evaluate(TOKEN)
    found["before"] = await shown.evaluate(GROUND), await shown.evaluate(INK)
    await click("#theme")
    found["after"] = await shown.evaluate(GROUND), await shown.evaluate(INK)
    return found


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)], ids=["desktop", "phone, dark"])
def test_it_is_drawn_and_its_controls_work(chromium: str, report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    async def look() -> None:
        async with page(chromium) as shown:
            await shown.open(report, width, 900, dark)
            found = await controls(shown)
            assert await shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"
            charts = await shown.evaluate("document.querySelectorAll('.chart').length")
            assert charts == await shown.evaluate("document.querySelectorAll('.chart > .plot-container').length") > 15
            fonts, anchors = await shown.evaluate(FONTS), await shown.evaluate(ANCHORS)
            assert fonts[0] == fonts[1], "charts are in the page's font"
            assert len(anchors) > 5 and all(anchors)
        assert found["drawn"] is True
        assert (found["step"], found["tokens"], found["hours"]) == ("step", "trained tokens", "hours since the start")
        assert found["logprob"] != found["version"]
        assert (found["before"][0] == "rgb(20, 23, 27)") is dark
        assert all(before != after for before, after in zip(found["before"], found["after"], strict=True))
        assert shown.errors == []
        assert [address for address in shown.requests if not address.startswith("data:")] == [report.as_uri()]

    asyncio.run(look())
