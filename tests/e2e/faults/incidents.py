"""Faults other than a kill: a process that stops for a while, commands next to a run, and what users do between two
drivers.

A fault is `GROUP:NAME moment`. Violations are added to the run's evidence.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from tests.e2e.faults.companions import TrackedRun
from tests.e2e.faults.disturbed import DisturbedRun, Ended, Hung, Kill
from tests.e2e.faults.moments import MOMENTS

STOPPED_S = 30.0
PRUNES = 3
"""Processes of `checkpoint prune` that are killed one after another."""
SECOND_DRIVER_S = 300.0
"""Time limit for one of two drivers to refuse its start, in seconds."""


def inject(run: DisturbedRun, fault: str) -> bool:
    """Inject a fault, which is `PART moment` for a kill. Returns False if the run was complete before the moment."""
    name, moment = fault.split()
    group, _, name = name.rpartition(":")
    if not group:
        return run.inject(name, moment)
    return run.insist(lambda: GROUPS[group](run, name, moment))


def stop_process(run: DisturbedRun, part: str, moment: str) -> None:
    """Stop one process of a part with SIGSTOP, and continue it later if it is still alive."""
    _await(run, moment)
    pid = run.random.choice(run.until(lambda: run.pids(part), f"a process of the {part}"))
    _record(run, f"stopped:{part}", moment)
    os.kill(pid, signal.SIGSTOP)
    try:
        run.pause(STOPPED_S)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def disturb_server(run: DisturbedRun, name: str, moment: str) -> None:
    """Kill MLflow's server and start another one, or stop it for some time."""
    assert isinstance(run, TrackedRun)
    _await(run, moment)
    _record(run, f"server:{name}", moment)
    if name == "killed":
        run.server.stop()
        run.server.start()
        return
    run.server.signal(signal.SIGSTOP)
    try:
        run.pause(STOPPED_S)
    finally:
        run.server.signal(signal.SIGCONT)


COMMANDS: dict[str, tuple[tuple[str, ...], frozenset[int]]] = {
    "replay": (("replay",), frozenset({0})),
    "evaluate": (("evaluate",), frozenset({0, 2})),  # 2: there is no model yet
    "report": (("report",), frozenset({0})),
    "verify": (("checkpoint", "verify"), frozenset({0, 2})),
    "resume": (("resume",), frozenset({2})),
    "prune": (("checkpoint", "prune", "--keep-last", "1"), frozenset({1})),
}
"""Commands on the run's folder during a run, with their allowed exit codes."""


def run_command(run: DisturbedRun, name: str, moment: str) -> None:
    """Run a command on the folder of a run that is being driven."""
    _await(run, moment)
    _record(run, f"beside:{name}", moment)
    command, codes = COMMANDS[name]
    ended = run.runs.run(*command, str(run.folder))
    if ended.code not in codes or "Traceback" in ended.out + ended.err:
        _violation(run, f"`asyncrl {shlex.join(command)}` during a run", ended.code, ended.out + ended.err)


def act_between_drivers(run: DisturbedRun, name: str, moment: str) -> None:
    """Kill the driver, do something to its folder, and resume the run."""
    run.strike("driver", moment)
    run.kills[-1].part = f"between:{name}"
    BETWEEN[name](run)
    if run.code is not None:
        run.resume()


def kill_prune(run: DisturbedRun) -> None:
    """Kill `checkpoint prune` at a random time, several times."""
    for _ in range(PRUNES):
        prune = run.runs.start("checkpoint", "prune", "--keep-last", "1", str(run.folder))
        time.sleep(run.random.uniform(0.3, 1.5))  # not a wait for a state: the moment of the kill is random
        prune.kill()
        prune.communicate()


def resume_twice(run: DisturbedRun) -> None:
    """Start two drivers of the same run: exactly one goes on."""
    drivers = [run.resume_beside() for _ in range(2)]
    deadline = time.monotonic() + SECOND_DRIVER_S
    while all(driver.process.poll() is None for driver in drivers):
        if time.monotonic() > deadline:
            raise Hung(f"two drivers of one run live after {SECOND_DRIVER_S:.0f} s")
        time.sleep(0.05)
    refused, driving = sorted(drivers, key=lambda driver: driver.process.poll() is None)
    text = refused.output.read_text(errors="replace")
    if refused.process.returncode != 2 or "Traceback" in text:
        _violation(run, "the second of two `asyncrl resume`", refused.process.returncode, text)
    run.follow(driving)


def resume_read_only(run: DisturbedRun) -> None:
    """Try to resume a run from a read-only folder."""
    resume = shlex.join(run.runs.command("resume", run.folder))
    folder = shlex.quote(str(run.folder))
    mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mount} && {resume}"],
        check=False,
        cwd=run.runs.folder,
        capture_output=True,
        text=True,
    )
    text = ended.stdout + ended.stderr
    if ended.returncode != 2 or "Traceback" in text or "ead-only" not in text:
        _violation(run, "`asyncrl resume` on a read-only folder", ended.returncode, text)


def change_rows(run: DisturbedRun) -> None:
    """Change the training rows. A resume must refuse them; with the old rows the run goes on."""
    rows = run.runs.folder / "words.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("a", "o"))
    ended = run.runs.run("resume", run.folder)
    rows.write_text(text)
    if ended.code != 2 or "Traceback" in ended.out + ended.err:
        _violation(run, "`asyncrl resume` with changed rows", ended.code, ended.out + ended.err)


BETWEEN: dict[str, Callable[[DisturbedRun], None]] = {
    "prune": kill_prune,
    "two-resumes": resume_twice,
    "read-only": resume_read_only,
    "changed-rows": change_rows,
}
GROUPS: dict[str, Callable[[DisturbedRun, str, str], None]] = {
    "stopped": stop_process,
    "beside": run_command,
    "between": act_between_drivers,
    "server": disturb_server,
}


def _await(run: DisturbedRun, moment: str) -> None:
    for _ in MOMENTS[moment](run):
        run.evidence.take_snapshot(run.journal)
    if run.code is not None:
        raise Ended


def _record(run: DisturbedRun, name: str, moment: str) -> None:
    run.kills.append(Kill(name, moment, time.time(), run.trained()))


def _violation(run: DisturbedRun, subject: str, code: int, text: str) -> None:
    run.evidence.contradictions.append(f"{subject}: exit {code}: {text.strip().splitlines()[-3:]}")
