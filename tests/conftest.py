"""Settings of all tests: signals have their default handlers, Hypothesis has no deadline, and no process remains."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

# If a shell started the tests in the background, SIGINT is ignored; under nohup, SIGHUP. Processes that tests
# start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example that takes long on a busy machine is not a failure.
settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")

SESSION = "ASYNCRL_TEST_SESSION"
"""Environment variable that processes inherit from the tests of one pytest process; each of xdist's has its own."""
GRACE_S = 30.0
"""Seconds that processes have to end."""
LIBRARIES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"torch/_inductor/compile_worker")
"""Processes of libraries that end with the pytest process."""
LONG = (
    "e2e/test_quickstart.py",
    "e2e/test_runs.py",
    "e2e/gateway/test_episodes.py",
    "e2e/gateway/test_serve.py",
    "e2e/test_ends.py",
    "e2e/test_experiments.py",
    "e2e/faults/test_elastic_engines.py",
    "e2e/saved_model/test_saved_model.py",
    "e2e/faults/test_killed_parts.py",
    "e2e/gateway/test_bugfix.py",
    "e2e/test_outside_faults.py",
    "e2e/test_data.py",
    "e2e/faults/test_stalls.py",
    "e2e/test_weights.py",
    "cluster/test_runs.py",
    "train/test_trainer_checkpoints.py",
    "cluster/test_weights_between_hosts.py",
    "cluster/test_preflight.py",
    "train/test_step.py",
    "cluster/test_hosts.py",
    "checks/test_doctor.py",
    "rollout/test_segments.py",
    "train/test_adapters_and_references.py",
    "cli/test_track.py",
    "train/test_shards.py",
    "train/test_engine.py",
)
"""Files that take between half a minute and three minutes, the longest first."""


# Collecting the tests imports torch and transformers; the garbage collector would take a third of it (decision 0044).
gc.disable()


def pytest_collection_finish() -> None:
    """Enable the garbage collector, and have torch use one thread in the processes of pytest."""
    gc.enable()
    if torch := sys.modules.get("torch"):
        # More processes than cores: waiting threads would take more time than the work itself (decision 0041).
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first: processes take the tests by file, and no process should begin a long file at the end."""
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name each reason for skipped tests once: one that this machine cannot meet may skip hundreds of them."""
    # The last part of `longrepr` is the reason, after the file and the line.
    reasons = Counter(str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail if a process outlives the tests. The first session fixture to start is the last one to end."""
    os.environ[SESSION] = token = secrets.token_hex(8)
    yield
    entry, deadline = f"{SESSION}={token}".encode(), time.monotonic() + GRACE_S
    while (left := _processes_with(entry)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "tests left processes behind:\n" + "\n".join(left)


def _processes_with(entry: bytes) -> list[str]:
    """The other processes with this entry in their environment: pid, command line and the test that started them."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes()
        except OSError:  # it belongs to another user, or has ended
            continue
        if entry in environment and not any(library in command for library in LIBRARIES):
            tests = [value for value in environment if value.startswith(b"PYTEST_CURRENT_TEST=")]
            shown = b" ".join([*command.split(b"\0"), *tests]).decode(errors="replace")
            found.append(f"{process.name} {shown}")
    return found


@contextmanager
def not_writable(folder: Path) -> Iterator[None]:
    """Makes a folder read-only. Root may write anywhere, so the process becomes another user meanwhile."""
    mode, me = folder.stat().st_mode, os.geteuid()
    folder.chmod(0o555)
    try:
        if me == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(me)
        folder.chmod(mode)


@pytest.fixture
def archive() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="archive-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
