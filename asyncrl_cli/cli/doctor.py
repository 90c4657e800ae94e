"""`asyncrl doctor`: whether this machine can run asyncrl, what would not work, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, RunsDir
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.orchestrator.checks.finding import Finding

MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}
INDENT = 23
"""Columns before what was found."""


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Import no library: a second instead of a minute.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Start an engine and a trainer on a small model: one more minute.")
    ] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Check versions, devices, memory, disk, clocks, ports, limits, the compiler, and whether vLLM, DeepSpeed and Ray
    work, with a hint for each problem. With --deep, vLLM generates and DeepSpeed makes a step of ZeRO-3.

    Exit code: 0 when a run can work here, also with warnings; 1 when it cannot.
    """
    from asyncrl_cli.doctor.checks import examine

    if quick and deep:
        raise typer.BadParameter("choose one of --quick and --deep", param_hint="--deep")
    if not show_findings(examine(runs_dir, quick, deep), "healthy", as_json):
        raise typer.Exit(1)


def show_findings(findings: Iterable[Finding], verdict: str, as_json: bool) -> bool:
    """Print findings as they come, or all of them as a JSON document under ``verdict``; whether none is a failure."""
    from dataclasses import asdict

    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:  # immediately: the last ones take long
            _show(finding)
    passed = all(finding.status != "failure" for finding in found)
    if as_json:
        echo_json({verdict: passed, "findings": [asdict(finding) for finding in found]})
    return passed


def _show(finding: Finding) -> None:
    """One check: a mark, its name, what was found, and what to do about it."""
    from asyncrl_cli.inspect.pages import paragraph

    hint = [f"-> {finding.hint}"] if finding.hint else []
    first, *more = paragraph("\n".join([finding.found, *hint]), " " * INDENT)
    echo("\n".join([f"{MARKS[finding.status]}  {finding.check} ".ljust(INDENT) + first.lstrip(), *more]))
