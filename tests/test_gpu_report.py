"""The report of `make gpu`: no part stops another, and its specs are valid for every number of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl_cli.checks.machine import wanted_gpus
from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sharing import engines_sleep, shares_gpus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("common", "gpu_report")]:
        del sys.modules[name]


def test_a_failed_part_is_reported_and_the_others_still_run(tmp_path: Path) -> None:
    from gpu_report.__main__ import carry_out
    from gpu_report.page import page
    from gpu_report.runs import Bench

    def broken(bench: Bench) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    def fine(bench: Bench) -> dict[str, Any]:
        figures = {"tokens/s": 12345, "equal to the bit": True, "MFU": None, "links": ["GPU0 X"], "versions": []}
        return figures | {"seconds": 0.012345}

    notes: list[str] = []
    kept: list[list[str]] = []
    results = carry_out(
        Bench("cpu", tmp_path),
        {"trainer": broken, "engine": fine},
        notes.append,
        lambda so_far: kept.append(list(so_far)),
    )
    assert kept == [["trainer"], ["trainer", "engine"]], "an interrupted report has all finished parts"
    assert notes == ["trainer ...", "trainer FAILED: RuntimeError: out of memory", "engine ...", "engine done"]
    report = json.loads(json.dumps({"device": "cpu", "gpus": [], "parts": results}))
    text = page(report)
    assert results["engine"]["figures"]["seconds"] == 0.012345, "a figure is not the duration of the part"
    assert "# asyncrl on no GPU" in text and "1 of 2 parts passed" in text
    assert "| The trainer's speed | FAILED |" in text and "RuntimeError: out of memory" in text
    for line in (
        "- tokens/s: 12,345",
        "- equal to the bit: yes",
        "- MFU: –",
        "GPU0 X",
        "- versions: none",
        "- seconds: 0.0123",
    ):
        assert line in text.splitlines()


def test_a_run_that_failed_is_not_tried_again(tmp_path: Path) -> None:
    from gpu_report.runs import Bench

    bench, tries = Bench("cpu", tmp_path), []

    def make() -> Path:
        tries.append(1)
        raise RuntimeError("no room")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            bench.once("timed-sync", make)
    assert len(tries) == 1
    assert bench.once("other", lambda: tmp_path) == bench.once("other", pytest.fail) == tmp_path


@pytest.mark.parametrize("gpus", [0, 1, 2, 5])
def test_all_specs_are_valid_and_use_the_gpus(gpus: int, tmp_path: Path) -> None:
    from gpu_report.parts import _exact_spec, _quickstart, _timed_spec
    from gpu_report.runs import Bench

    device = "cuda" if gpus else "cpu"
    bench = Bench(device, tmp_path)  # type: ignore[arg-type]
    bench.gpus = ("NVIDIA H200",) * gpus
    specs = [
        _quickstart("bfloat16"),
        *(make for mode in ("sync", "async") for make in (_exact_spec(mode), _timed_spec(device, mode))),
        _exact_spec("async", "bfloat16"),
    ]
    for number, made in enumerate(specs):
        path = tmp_path / f"{number}.yaml"
        (tmp_path / "long_tail.py").write_text((ROOT / "benchmarks/long_tail.py").read_text())
        path.write_text(yaml.safe_dump(bench.on_device(made) | {"name": "one", "runs_dir": str(tmp_path)}))
        spec = load_spec(path, ()).spec
        assert wanted_gpus(spec) == gpus
        assert shares_gpus(spec) == (gpus == 1)
        assert engines_sleep(spec) == (gpus == 1 and spec.pipeline.mode == "sync")


def test_exactness_reports_the_gap_of_engines_that_were_refused(tmp_path: Path) -> None:
    from gpu_report import parts
    from gpu_report.runs import Bench

    def refused(name: str, *_: Any, **__: Any) -> Path:
        run = tmp_path / "runs" / name / "run-1"
        run.mkdir(parents=True)
        with closing(open_for_writing(run / FILE)) as journal, journal:
            message = (
                "it does not serve weight version 0: its log-probs of the probe differ from the trainer's by 0.0131"
            )
            row = (1.0, "engine", "engine-0", f"{message} nats; allowed are 0.001")
            journal.execute("INSERT INTO failures (at, kind, part, message) VALUES (?, ?, ?, ?)", row)
        raise RuntimeError("exit code 1")

    bench: Any = Bench("cpu", tmp_path)
    bench.train = refused
    with pytest.raises(RuntimeError, match=r"up to 0\.0131 nats from the trainer's; allowed are 0\.001"):
        parts.exactness(bench)


def test_resume_on_a_gpu_does_not_need_float32(tmp_path: Path) -> None:
    from gpu_report import parts
    from gpu_report.runs import Bench

    bench: Any = Bench("cuda", tmp_path)
    dtypes: list[str] = []

    def train(name: str, spec: dict[str, Any], **_: Any) -> Path:
        dtypes.append(spec["trainer"]["dtype"])
        raise RuntimeError(name)

    bench.train = train
    for part in (parts.kill_and_resume, lambda bench: parts._exact(bench, "async", "bfloat16")):
        with pytest.raises(RuntimeError, match=r"killed|undisturbed-async"):
            part(bench)
    assert dtypes == ["bfloat16"] * 2


def test_the_triton_kernel_multiplies(tmp_path: Path) -> None:
    """Triton's interpreter needs no GPU."""
    pytest.importorskip("triton")
    program = [sys.executable, str(ROOT / "benchmarks/gpu_report/triton_product.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1e-5


def test_metrics_skip_the_incomplete_last_line_of_a_killed_run(tmp_path: Path) -> None:
    from common import metrics

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]


def test_the_peak_of_a_tree_of_processes_is_seen(tmp_path: Path) -> None:
    from gpu_report.peak import tree_memory

    code = "b = bytearray(200 * 2**20); b[::4096] = b'x' * len(b[::4096]); print(1, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    try:
        assert tree_memory(os.getpid()) > tree_memory(process.pid) > 200 * 2**20
    finally:
        process.communicate(b"\n")
    assert tree_memory(process.pid) == 0
