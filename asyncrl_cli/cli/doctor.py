"""`asyncrl doctor`: whether this machine can run it, what would not work, and the mend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, RunsDir
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.pipeline.findings import Finding

MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}
INDENT = 23
"""Columns before what was found."""


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Import nothing: takes a second instead of a minute.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Start an engine and a trainer on a small model: takes a minute more.")
    ] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Look at versions, devices, memory, disk, clocks, ports, limits, compiler, and whether vLLM, DeepSpeed and Ray can
    be used; tell what would not work, and the mend. With --deep vLLM generates and DeepSpeed makes a step of ZeRO-3.

    Ends with 0 when a run can work here, warnings or not, and with 1 when it cannot.
    """
    from dataclasses import asdict

    from asyncrl_cli.pipeline.doctor import examine

    if quick and deep:
        raise typer.BadParameter("choose one of --quick and --deep", param_hint="--deep")
    findings = []
    for finding in examine(runs_dir, quick, deep):
        findings.append(finding)
        if not as_json:  # at once: the last ones take long
            show_finding(finding)
    healthy = all(finding.status != "failure" for finding in findings)
    if as_json:
        echo_json({"healthy": healthy, "findings": [asdict(one) for one in findings]})
    if not healthy:
        raise typer.Exit(1)


def show_finding(finding: Finding) -> None:
    """One check: a mark, its name, what was found, and what to do about it."""
    from asyncrl_cli.observe.pages import paragraph

    mend = [f"-> {finding.mend}"] if finding.mend else []
    first, *more = paragraph("\n".join([finding.found, *mend]), " " * INDENT)
    echo("\n".join([f"{MARKS[finding.status]}  {finding.check} ".ljust(INDENT) + first.lstrip(), *more]))
