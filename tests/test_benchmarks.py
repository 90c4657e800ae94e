"""Every benchmark runs at its smallest size and prints figures: others can repeat the figures that docs quote."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl_cli.sandbox.trial import problem
from asyncrl_cli.spec.inputs import SandboxSpec

FOLDER = Path(__file__).parents[1] / "benchmarks"
LIMIT_S = 900.0
NOT_QUIET = "the run's own steps are not reproduced within"
"""`asyncrl plan` refuses inconsistent times with this message, rightly so on a busy machine."""
SMALLEST = {
    "against_trl.py": f"--steps 6 --asyncrl {Path(sys.executable).with_name('asyncrl')}",
    "async_vs_sync.py": "--steps 12 --modes sync async --group-sizes 8 1",
    "driver_load.py": "--engines 1 --slots 8 --tokens 50 --rate 500 --seconds 2 --warm-up 3",
    "efficiency.py": "--steps 12",
    "first_weights.py": "--repeats 1",
    "gateway.py": "--requests 64 --concurrent 8",
    "gpu_report": "--device cpu --only profile settings edges numerics repeats",
    "journal.py": "--rollouts 256 --tokens 50",
    "journal.py --inspect": "--rollouts 2000",
    "looking.py": "--rollouts 1024",
    "memory.py": "--only quickstart",
    "plan.py": "--steps 20 --only sync",
    "sandboxes.py": "--sandboxes 1 --commands 4",
    "shared_prefixes.py": "--prompts 10 --rounds 1 --models quickstart",
    "soak.py": "--steps 4",
    "staleness.py": "--bounds 0 --seeds 1 --steps 4",
    "trainer.py": "--quick",
    "weight_updates.py": "--steps 6",
    "weights.py": "--sizes 1 --rounds 1",
}
"""Smallest options by program."""


def test_every_benchmark_has_a_smallest_size() -> None:
    programs = {path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    programs |= {path.parent.name for path in FOLDER.glob("*/__main__.py")}
    assert programs == {name.partition(" ")[0] for name in SMALLEST}


@pytest.mark.nightly
@pytest.mark.parametrize("program", SMALLEST)
def test_benchmark_runs_and_prints_figures(program: str, tmp_path: Path) -> None:
    if program == "against_trl.py" and find_spec("trl") is None:
        pytest.skip("TRL is not installed here (make parity)")
    if program == "sandboxes.py" and (missing := problem(SandboxSpec())):
        pytest.skip(missing)
    options = f"{program} {SMALLEST[program]}".split()
    if program == "gpu_report":
        options += ["--out", str(tmp_path / "report")]
    if (FOLDER / options[0]).is_dir():
        options.insert(0, "-m")
    else:
        options[0] = str(FOLDER / options[0])
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment, cwd=tmp_path
    )
    if NOT_QUIET in done.stderr:
        pytest.skip("other work on this machine makes the predicted times wrong")
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout
    if program == "gpu_report":
        printed = Path(printed.strip()).read_text()
    assert len(re.findall(r"\b\d+(?:[.,]\d+)?\b", printed)) > 2 and "nan" not in printed.split(), printed[-3000:]
