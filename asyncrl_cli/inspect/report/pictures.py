"""The report's charts as pictures, for where no script runs: PNG files, drawn by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.inspect.report.charts import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (8.0, 4.5)
DPI = 120
"""The size of a picture in inches, and its dots per inch."""
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
"""plotly's words for lines, and matplotlib's."""


def draw(charts: Iterable[Chart], folder: Path) -> None:
    """Write each chart to ``folder``, under the small letters of its title. Raises ``OSError``."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        axes = figure.subplots()
        axes.set_title(chart.title)
        for axis, name in ((axes.xaxis, "xaxis"), (axes.yaxis, "yaxis")):
            axis.set_label_text(chart.layout.get(name, {}).get("title", {}).get("text", ""))
        heights: dict[float, float] = {}
        for at, trace in enumerate(chart.data):
            _draw(axes, trace if chart.xs is None else trace | {"x": chart.xs["steps"][at]}, heights)
        for shape in chart.layout.get("shapes", ()):
            axes.axhline(shape["y0"], color=shape["line"]["color"], linestyle=":")
        if chart.key:
            figure.legend(loc="outside lower center", ncols=4, fontsize="small")
        figure.savefig(folder / f"{_file_name(chart.title)}.png")


def _draw(axes: Axes, trace: dict[str, Any], heights: dict[float, float]) -> None:
    """One trace of plotly's; ``heights`` are those that bars are stacked on, by where they stand."""
    x = trace["x"]
    y = [float("nan") if value is None else value for value in trace["y"]]
    match trace["type"], trace.get("mode", ""):
        case "heatmap", _:
            shares = axes.pcolormesh(_edges(x), _edges(y), trace["z"], vmin=0, cmap="plasma")
            axes.figure.colorbar(shares, ax=axes, format="{x:.0%}")
        case "bar", _:
            below = [heights.get(at, 0.0) for at in x]
            width = min((later - at for at, later in pairwise(x)), default=1)
            axes.bar(x, y, width, below, color=trace["marker"]["color"], label=trace["name"])
            heights.update({at: base + height for at, base, height in zip(x, below, y, strict=True)})
        case _, "markers" if "colorbar" in trace["marker"]:
            points = axes.scatter(x, y, s=8, c=trace["marker"]["color"], alpha=trace["marker"]["opacity"])
            axes.figure.colorbar(points, ax=axes, label=trace["marker"]["colorbar"]["title"]["text"])
        case _, mode:
            line = trace["line"]
            style, marker = DASHES[line["dash"]], "o" if "markers" in mode else None
            raw = trace.get("hoverinfo") == "skip"  # values under their running mean, which has the name
            axes.plot(
                *(x, y),
                linestyle="none" if mode == "markers" else style,
                linewidth=line["width"],
                marker=marker,
                markersize=4,
                color=line["color"],
                alpha=trace.get("opacity"),
                label=None if raw else trace["name"],
            )


def _edges(centres: list[float]) -> list[float]:
    """Borders of a heat map's cells, half way between neighbours; the outer cells are as wide on both sides."""
    if len(centres) == 1:
        return [centres[0] - 0.5, centres[0] + 0.5]
    middles = [(left + right) / 2 for left, right in pairwise(centres)]
    return [2 * centres[0] - middles[0], *middles, 2 * centres[-1] - middles[-1]]


def _file_name(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower().replace("'", "")).strip("-")
