"""The measured processor time equals the work, and belongs to the processes that do it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from asyncrl_cli.system.processors import ProcessorTime

WORK = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
"""A program that uses 0.3 s of processor time and then waits."""


def test_the_work_of_children_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.system.processors.READ_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        own = time.process_time()
        processors = ProcessorTime()
        child.stdout.readline()
        times = psutil.Process(child.pid).cpu_times()
        child_s, own_s = times.user + times.system, time.process_time() - own
        used = processors.read()
        assert 0.1 < used <= child_s + own_s + 0.1
        assert processors.read() < 0.1, "a second reading adds nothing"
        child.communicate()
    assert processors.read() >= 0, "a process that has ended keeps what it had used"


def test_two_reads_have_a_minimum_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    processors = ProcessorTime()
    monkeypatch.setattr(processors, "total", lambda: 1e6)
    assert processors.read() == 0.0
    monkeypatch.setattr("asyncrl_cli.system.processors.READ_S", 0.0)
    assert processors.read() > 0
    assert processors.read() == 0.0
