"""`asyncrl doctor`: checks whether this machine or a cluster can run asyncrl, with a hint for each problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, RunsDir
from asyncrl_cli.cli.output import echo, echo_json

if TYPE_CHECKING:
    from asyncrl_cli.checks.finding import Finding

MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}
INDENT = 23
"""The column where the text of a finding begins."""


def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Check the hosts of a running Ray cluster.")] = False,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="ADDRESS", help="With --cluster: the cluster's address. Default: auto."),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Check versions, devices, memory, disk, limits, the compiler and the sandbox, with a hint for each problem.

    With --cluster, check whether the hosts of a Ray cluster can work together: connections, token, versions, memory,
    and the folder of runs. `asyncrl train SPEC --dry-run` checks a spec, also on its cluster.

    Exit code: 0 when a run can work here, also with warnings; 1 when it cannot.
    """
    if address is not None and not cluster:
        raise typer.BadParameter("needs --cluster", param_hint="--address")
    if not show_findings(_findings(runs_dir, (address or "auto") if cluster else None), "healthy", as_json):
        raise typer.Exit(1)


def _findings(runs_dir: Path, cluster: str | None) -> Iterator[Finding]:
    from asyncrl_cli.checks.finding import findings_of

    if cluster is not None:
        from asyncrl_cli.checks.hosts import examine_cluster

        return examine_cluster(cluster, spec=None, runs_dir=runs_dir, replica_bytes=0)
    from asyncrl_cli.checks.machine import machine_checks

    return findings_of(machine_checks(runs_dir))


def show_findings(findings: Iterable[Finding], verdict: str, as_json: bool) -> bool:
    """Print passed checks immediately, and at the end warnings, failures and their numbers; or one JSON document.

    Returns True if no finding is a failure; the JSON document has this value under ``verdict``.
    """
    from dataclasses import asdict

    results: list[Finding] = []
    try:
        for finding in findings:
            results.append(finding)
            if not as_json and finding.status == "ok":  # immediately, because the last checks take long
                show_finding(finding)
    finally:  # also after Ctrl-C
        warnings = [finding for finding in results if finding.status == "warning"]
        failures = [finding for finding in results if finding.status == "failure"]
        for finding in () if as_json else (*warnings, *failures):
            show_finding(finding)
    if as_json:
        echo_json({verdict: not failures, "findings": [asdict(finding) for finding in results]})
    elif failures:
        echo(f"\n{len(results)} checks: {len(failures)} failed, {len(warnings)} with a warning")
    return not failures


def show_finding(finding: Finding) -> None:
    """Print one check: status, name, finding and hint."""
    from asyncrl_cli.inspect.pages import paragraph

    hint = [f"-> {finding.hint}"] if finding.hint else []
    top_line, *lines = paragraph("\n".join([finding.found, *hint]), " " * INDENT)
    echo("\n".join([f"{MARKS[finding.status]}  {finding.check} ".ljust(INDENT) + top_line.lstrip(), *lines]))
