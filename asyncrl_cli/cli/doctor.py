"""`asyncrl doctor`: checks whether this machine or a cluster can run asyncrl, with a hint for each problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl_cli.cli.arguments import AsJson, RunsDir
from asyncrl_cli.cli.output import echo, echo_json
from asyncrl_cli.core.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl_cli.checks.finding import Finding

MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}
INDENT = 23
"""The column where the text of a finding begins."""


def doctor(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="With --cluster: the spec to run on the cluster.", show_default=False),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the hosts of a running Ray cluster, and all pairs of them.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="ADDRESS", help="With --cluster: the cluster's address. Default: auto."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Import no large libraries: takes a second instead of a minute.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Start an engine and a trainer on a small model: one more minute.")
    ] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Check versions, devices, memory, disk, clocks, ports, limits, the compiler, and whether vLLM, DeepSpeed and Ray
    work, with a hint for each problem. With --deep, vLLM generates and DeepSpeed makes a step of ZeRO-3.

    With --cluster, check whether the hosts of a Ray cluster can work together: all connections and their speed, token,
    versions, clocks, memory, and the folder of runs. With a spec, also check whether it fits the cluster.

    Exit code: 0 when a run can work here, also with warnings; 1 when it cannot.
    """
    if cluster:
        if quick or deep:
            raise typer.BadParameter("not with --cluster", param_hint="--deep" if deep else "--quick")
        found = _of_cluster(address, runs_dir) if spec is None else _of_spec(spec, address)
    elif spec is not None or address is not None:
        raise typer.BadParameter("needs --cluster", param_hint="SPEC" if spec is not None else "--address")
    elif quick and deep:
        raise typer.BadParameter("choose one of --quick and --deep", param_hint="--deep")
    else:
        from asyncrl_cli.checks.doctor import examine

        found = examine(runs_dir, quick, deep)
    if not show_findings(found, "healthy", as_json):
        raise typer.Exit(1)


def _of_cluster(address: str | None, runs_dir: Path) -> Iterator[Finding]:
    from asyncrl_cli.checks.hosts.examine import examine_cluster

    return examine_cluster(address or "auto", spec=None, runs_dir=runs_dir, replica_bytes=0)


def _of_spec(file: Path, address: str | None) -> Iterator[Finding]:
    """The start checks of a spec on its cluster. ``address`` takes precedence over the spec's address."""
    from asyncrl_cli.checks.start import CLUSTER_CHECKS
    from asyncrl_cli.cli.output import start_checks
    from asyncrl_cli.spec.load import load_spec

    spec = load_spec(file, () if address is None else (f"cluster.address={address}",)).spec
    if spec.cluster.address is None:
        hint = "set cluster.address in the spec, or use --address"
        raise ConfigError("the spec names no cluster", location=str(file), hint=hint)
    with start_checks(spec, file.absolute().parent) as checks:
        yield from checks.findings(CLUSTER_CHECKS)


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
        problems = sorted(
            (finding for finding in results if finding.status != "ok"), key=lambda finding: finding.status == "failure"
        )
        for finding in () if as_json else problems:
            show_finding(finding)
    failures = sum(finding.status == "failure" for finding in results)
    if as_json:
        echo_json({verdict: not failures, "findings": [asdict(finding) for finding in results]})
    elif failures:
        echo(f"\n{len(results)} checks: {failures} failed, {len(problems) - failures} with a warning")
    return not failures


def show_finding(finding: Finding) -> None:
    """Print one check: status, name, finding and hint."""
    from asyncrl_cli.inspect.pages import paragraph

    hint = [f"-> {finding.hint}"] if finding.hint else []
    first, *more = paragraph("\n".join([finding.found, *hint]), " " * INDENT)
    echo("\n".join([f"{MARKS[finding.status]}  {finding.check} ".ljust(INDENT) + first.lstrip(), *more]))
