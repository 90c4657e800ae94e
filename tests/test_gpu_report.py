"""The report of `make gpu`: no part stops another, and its specs are valid for every number of GPUs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.checks.machine import wanted_gpus
from asyncrl_cli.journal.schema import FILE, open_for_writing
from asyncrl_cli.spec.sharing import engines_sleep, shares_gpus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FLASH_ATTENTION = [f"flash_attention_{version}" for version in (2, 3, 4)]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("against_trl", "common", "gpu_report", "trainer")
    ]:
        del sys.modules[name]


PROGRAMS = {
    "trainer": """raise SystemExit("out of memory")""",
    "engine": """import time; time.sleep(1000)""",
    "kill": """
from gpu_report.report import *
from pathlib import Path
import sys
path = Path(sys.argv[1])
append(path, Row("kill", "a case", "ok", 1.0, {"tokens/s": 12345, "rows": {"s": 0.5}}))
append(path, Row("kill", "another", "not run", 0.0, {"error": "unknown key"}))
figures = {"equal to the bit": True, "MFU": None, "links": ["GPU0 X"], "versions": [], "seconds": 0.012345}
append(path, Row("kill", "", "ok", 2.04, figures))
""",
}
"""Stand-ins for parts: one fails, one hangs, and one reports cases and figures."""


def test_a_part_that_fails_or_hangs_is_reported_and_the_others_still_run(tmp_path: Path) -> None:
    from gpu_report.__main__ import carry_out
    from gpu_report.report import rows_of
    from gpu_report.runs import Bench

    titles = {name: name.title() for name in PROGRAMS}
    bench = Bench("cpu", tmp_path, titles)

    def command(name: str) -> list[str]:
        return [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n{PROGRAMS[name]}",
            str(bench.csv),
        ]

    assert not carry_out(bench, {"trainer": 60.0, "engine": 0.5, "kill": 60.0}, command)
    rows = {(row.part, row.case): row for row in rows_of(bench.csv)}
    assert rows["trainer", ""].figures == {"error": "the process ended with 1"}
    assert rows["engine", ""].figures == {"error": "not done after 0.5 s"}
    assert rows["kill", ""].figures["seconds"] == 0.012345, "a figure is not the duration of the part"
    text = (tmp_path / "report.md").read_text()
    assert "# asyncrl on no GPU" in text and "1 of 3 parts passed" in text
    for line in (
        "| Trainer | FAILED |",
        "| Kill | ok | 2 |",
        "- a case: tokens/s 12,345, rows (s 0.5)",
        "- another: not run: unknown key",
        "- equal to the bit: yes",
        "- MFU: –",
        "GPU0 X",
        "- versions: none",
        "- seconds: 0.0123",
    ):
        assert any(found.startswith(line) for found in text.splitlines()), line
    assert not carry_out(Bench("cpu", tmp_path / "late", titles), {"kill": 60.0}, pytest.fail, end=0.0)


def test_a_variant_that_this_version_does_not_know_is_reported_as_not_run(tmp_path: Path) -> None:
    from gpu_report.report import rows_of
    from gpu_report.runs import Bench
    from gpu_report.specs import spec_of, timed_spec
    from gpu_report.steps import variants

    are_fused = [variant.name.endswith("fused kernels") for variant in variants(1, 2)]
    assert are_fused == sorted(are_fused), "liger-kernel changes all later models of a process"
    bench = Bench("cpu", tmp_path)
    bench.part = "settings"
    settings = timed_spec("cpu", "async")
    assert bench.case("future", lambda: vars(spec_of(settings, "trainer.not_yet_made=true"))) is None
    assert bench.case("broken", lambda: {"s": 1 / 0}) is None
    assert bench.case("fine", lambda: {"s": 1.0}) == {"s": 1.0}
    assert [(row.case, row.result) for row in rows_of(bench.csv)] == [
        ("future", "not run"),
        ("broken", "failed"),
        ("fine", "ok"),
    ]
    assert "trainer.not_yet_made: unknown key" in rows_of(bench.csv)[0].figures["error"]


def test_a_run_that_failed_is_not_made_again_by_a_later_part(tmp_path: Path) -> None:
    from gpu_report.runs import Bench

    calls = []

    def make() -> Path:
        calls.append(1)
        raise RuntimeError("no room")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            Bench("cpu", tmp_path).once("timed-sync", make)
    with pytest.raises(KeyboardInterrupt):  # the part's limit
        Bench("cpu", tmp_path).once("timed-async", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(RuntimeError, match="an earlier part was ended"):
        Bench("cpu", tmp_path).once("timed-async", make)
    assert len(calls) == 1
    assert Bench("cpu", tmp_path).once("other", lambda: tmp_path) == tmp_path
    assert Bench("cpu", tmp_path).once("other", pytest.fail) == tmp_path


@pytest.mark.parametrize("gpus", [0, 1, 2, 5])
def test_all_specs_are_valid_and_use_the_gpus(gpus: int, tmp_path: Path) -> None:
    from gpu_report.runs import Bench
    from gpu_report.specs import alone, exact_spec, quickstart_spec, qwen_spec, spec_of, timed_spec

    device: Any = "cuda" if gpus else "cpu"
    bench = Bench(device, tmp_path)
    bench.gpus = ("NVIDIA H200",) * gpus
    specs = [
        quickstart_spec("bfloat16"),
        *(settings for mode in ("sync", "async") for settings in (exact_spec(mode), timed_spec(device, mode))),
        exact_spec("async", "bfloat16"),
    ]
    for settings in specs:
        spec = spec_of(bench.on_device(settings))
        assert wanted_gpus(spec) == gpus
        assert shares_gpus(spec) == (gpus == 1)
        assert engines_sleep(spec) == (gpus == 1 and spec.pipeline.mode == "sync")
    assert wanted_gpus(spec_of(alone(qwen_spec(device, tmp_path), device))) == (2 if gpus else 0)


def test_settings_follow_the_memory_of_the_card(tmp_path: Path) -> None:
    from gpu_report.runs import Bench
    from gpu_report.specs import alone, qwen_spec, resolved, spec_of, timed_spec, with_offload

    bench = Bench("cuda", tmp_path)
    bench.gpus = ("NVIDIA H200",)
    spec = spec_of(bench.on_device(timed_spec("cuda", "async")))
    small, large = (resolved(spec, gigabytes * 10**9)[0] for gigabytes in (25, 141))
    assert small.trainer.recomputes and not large.trainer.recomputes
    assert small.rollout.running_rollouts < large.rollout.running_rollouts
    qwen = alone(qwen_spec("cuda", tmp_path), "cuda")
    qwen["trainer"] |= {"gradient_checkpointing": True, "tokens_per_microbatch": 18432}
    offloads = [with_offload(qwen, gigabytes * 10**9)["trainer"]["offload"] for gigabytes in (80, 141)]
    assert offloads == ["optimizer", "none"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10))))
def test_busy_time_is_the_union_of_spans(spans: list[tuple[int, int]]) -> None:
    from gpu_report.steps import busy_time

    busy, gaps = busy_time([(begin, begin + length) for begin, length in spans])
    assert busy == len({moment for begin, length in spans for moment in range(begin, begin + length)})
    if spans:
        assert busy + sum(gaps) == max(map(sum, spans)) - min(begin for begin, _ in spans)


async def test_an_engine_is_kept_full(tmp_path: Path) -> None:
    from gpu_report.engine_full import ROUNDS, rate

    open_requests: set[str] = set()
    most_open, ids = 0, []

    async def generate(request_id: str) -> int:
        nonlocal most_open
        ids.append(request_id)
        open_requests.add(request_id)
        most_open = max(most_open, len(open_requests))
        await asyncio.sleep(0)
        open_requests.remove(request_id)
        return 8

    figures = await rate(generate, requests=5, prefix="p")
    assert len(ids) == len(set(ids)) == 5 * ROUNDS and most_open == 5
    assert figures["tokens/s"] * figures["seconds"] == pytest.approx(5 * 8 * (ROUNDS - 1))


def test_trl_gets_the_same_update_and_on_a_gpu_its_own_vllm(tmp_path: Path) -> None:
    from against_trl import grpo_settings, samples_per_step
    from gpu_report.runs import Bench
    from gpu_report.specs import spec_of, timed_spec

    bench = Bench("cuda", tmp_path)
    bench.gpus = ("NVIDIA H200",)
    spec = bench.on_device(timed_spec("cuda", "async"))
    settings, checked = grpo_settings(spec, "cuda", 64, steps=8), spec_of(spec)
    assert samples_per_step(spec) == 512 == 64 * settings["gradient_accumulation_steps"]
    assert settings["learning_rate"] == checked.trainer.optimizer.learning_rate
    assert settings["max_completion_length"] == checked.rollout.max_response_tokens
    assert settings["epsilon_high"] == checked.algorithm.clip_high and settings["beta"] == 0
    assert settings["use_vllm"] and settings["vllm_mode"] == "colocate" and settings["bf16"]
    assert settings["vllm_gpu_memory_utilization"] == checked.rollout.gpus_per_engine
    assert settings["model_init_kwargs"]["attn_implementation"] in ("sdpa", *FLASH_ATTENTION)
    on_cpu = grpo_settings(timed_spec("cpu", "async"), "cpu", 64, steps=8)
    assert on_cpu["use_cpu"] and not on_cpu["bf16"] and "use_vllm" not in on_cpu
    if find_spec("trl"):
        from trl import GRPOConfig

        assert settings.keys() | on_cpu.keys() <= {field.name for field in fields(GRPOConfig)}


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


def test_the_triton_kernel_multiplies(tmp_path: Path) -> None:
    """Triton's interpreter needs no GPU."""
    pytest.importorskip("triton")
    program = [sys.executable, str(ROOT / "benchmarks/gpu_report/triton_product.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1e-5


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
