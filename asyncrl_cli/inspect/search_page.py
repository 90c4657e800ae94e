"""The page of `asyncrl plan --search`: allocations of GPUs, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from asyncrl_cli.inspect.pages import Page, number, paragraph, table
from asyncrl_cli.inspect.plan_page import outcome_document
from asyncrl_cli.plan.search import Found


def search_page(gpus: int, found: Found, guesses: Sequence[str]) -> Page:
    """The best allocations of ``gpus``."""
    header = ("engines", "GPUs each", "ranks", "S", "slots", "step s", "tokens/s", "trainer trains", "engines idle",
              "rank's memory", "cache tokens")  # fmt: skip
    rows = [
        (
            str(one.allocation.engines),
            str(one.allocation.engine_gpus),
            str(one.allocation.ranks),
            str(one.allocation.max_staleness),
            str(one.allocation.slots),
            f"{one.outcome.step_s:.1f}",
            number(round(one.outcome.trained_tokens)),
            f"{one.outcome.share('training'):.0%}",
            f"{one.outcome.engines_idle:.0%}",
            "-" if one.trainer_memory is None else f"{one.trainer_memory:.0%}",
            "-" if one.kv_tokens is None else number(one.kv_tokens),
        )
        for one in found.best
    ]
    lines = [
        f"{found.simulated} allocations of {gpus} GPUs simulated, {found.too_large} do not fit into memory; the best:",
        "",
        *table(header, rows, left=()),
    ]
    if found.best:
        lines += ["", *(f"--set {setting}" for setting in found.best[0].allocation.settings())]
    lines += [line for guess in guesses for line in paragraph(f"guess    {guess}")]
    document = {
        "gpus": gpus,
        "simulated": found.simulated,
        "too_large": found.too_large,
        "best": [
            {
                "allocation": asdict(one.allocation),
                "set": list(one.allocation.settings()),
                "outcome": outcome_document(one.outcome),
                "trainer_memory_share": one.trainer_memory,
                "cache_tokens": one.kv_tokens,
            }
            for one in found.best
        ],
        "guesses": list(guesses),
    }
    return Page(document, lines)
