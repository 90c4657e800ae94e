"""TensorBoard, Weights & Biases and the user's own monitors, which a run's reporter calls."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import yaml

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.monitors.base import Ending, EvaluationResult
from asyncrl_cli.monitors.console import QuietView
from asyncrl_cli.monitors.extras import load_monitors
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.spec.sections import TrackingSpec

DOCS = Path(__file__).parents[2] / "docs"


class Warnings:
    """A quiet console that stores its warnings."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> None:
        self.lines.append(text)


def report(tracking: dict[str, Any], folder: Path, search_path: Path, steps: range = range(1, 4)) -> tuple[Any, ...]:
    """Report a small run. Returns its folder, the monitors' closing texts, and the warnings."""
    run = RunDirectory(folder / "run-1")
    (run.path / "logs").mkdir(parents=True, exist_ok=True)
    run.write_text("spec.yaml", yaml.safe_dump({"seed": 3, "stop": {"steps": 3}, "tracking": tracking}))
    recorder, warnings = Recorder(run, pytest.fail), Warnings()
    reporter = Reporter(recorder, QuietView(warnings))
    for monitor in load_monitors(TrackingSpec.model_validate(tracking), search_path):
        reporter.join(monitor)
    for step in steps:
        reporter.status("training", Counts(4, 1, step, 0, 0, 0))
        reporter.stepped(step, step, {"reward/mean": step / 4, "train/loss": float("nan")}, 1e9 + step)
    reporter.evaluated(EvaluationResult("chain:sampled", 3, 0.5, 0.25, 9.0, 4, 1, 3, 2, (0.5, 0.75), {"accuracy": 2.0}))
    reporter.finish(Ending("finished"))
    assert recorder.close() == ""
    return run, reporter.notes, warnings.lines


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="asyncrl[tensorboard] is not installed")
def test_tensorboard_has_steps_and_evaluations(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    run, notes, warnings = report({"tensorboard": True}, tmp_path, tmp_path, range(1, 3))
    report({"tensorboard": True}, tmp_path, tmp_path, range(3, 4))  # the run was resumed
    assert warnings == [] and notes == {"TensorBoard": f"tensorboard --logdir {run.path}/tensorboard"}
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()

    def values(name: str) -> list[tuple[int, float]]:
        return [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(name)]

    assert values("reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert values("eval/chain/sampled_pass_at_2")[-1] == (3, 0.75)
    assert values("eval/chain/sampled_accuracy")[-1] == (3, 0.5), "not the task's metric of this name"
    assert set(events.Tags()["tensors"]) == {
        *("version", "reward/mean", "eval/chain/sampled_accuracy", "eval/chain/sampled_tokens_mean"),
        *("eval/chain/sampled_reward_mean", "eval/chain/sampled_pass_at_1", "eval/chain/sampled_pass_at_2"),
        "eval/chain/sampled/task/accuracy",
    }, "values that are not numbers are omitted"


def records(path: Path) -> Iterator[bytes]:
    """The records of a W&B file: 7 bytes, then LevelDB's log, blocks of 32 KiB of parts with (crc, length, kind)."""
    data, at, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


WANDB = """
import sys
from pathlib import Path
from tests.monitors.test_extras import report
tracking = {"wandb": {"project": "tests", "mode": "offline"}, "responses_every": 1}
evaluation = Path(sys.argv[1], "run-1/evaluations/step-000000-greedy.jsonl")
evaluation.parent.mkdir(parents=True)
evaluation.write_text('{"kind": "greedy", "step": 0}\\n{"prompt": "1+1", "response": "2", "reward": 1.0}\\n')
_, notes, warnings = report(tracking, Path(sys.argv[1]), Path(sys.argv[1]))
print(notes["W&B"], warnings)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="asyncrl[wandb] is not installed")
def test_weights_and_biases_offline_has_steps_evaluations_and_the_spec(tmp_path: Path) -> None:
    """In a separate process, because the library's process runs until it exits."""
    from wandb.proto.wandb_internal_pb2 import Record

    program = [sys.executable, "-c", WANDB, str(tmp_path)]
    done = subprocess.run(program, cwd=DOCS.parent, capture_output=True, text=True, check=True, timeout=120)
    (folder,) = (tmp_path / "run-1/wandb").glob("offline-run-*")
    assert done.stdout == f"wandb sync {folder} []\n"
    (file,) = folder.glob("*.wandb")
    found = [Record.FromString(record) for record in records(file)]
    (started,) = [record.run for record in found if record.HasField("run")]
    assert (started.project, started.run_id) == ("tests", "run-1")
    assert "3" in [item.value_json for item in started.config.update if item.key == "seed"]
    rows = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    steps = [row for row in rows if "reward/mean" in row]
    assert [(row["step"], row["reward/mean"]) for row in steps] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    (evaluation,) = [row for row in rows if "eval/chain/sampled_pass_at_2" in row]
    assert (evaluation["step"], evaluation["eval/chain/sampled_pass_at_2"]) == (3, 0.75)
    (table,) = folder.glob("files/media/table/responses/greedy_*.json")
    assert json.loads(table.read_text())["data"] == [[0, "1+1", "2", 1.0, "{}", None, None, None]]
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [0]


# -- the user's monitors


def test_the_example_of_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received = Queue[Any]()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    page = (DOCS / "watching.md").read_text()
    code = next(block for block in page.split("```python\n")[1:] if "(Monitor)" in block).split("```")[0]
    (tmp_path / "my_monitors_example.py").write_text(code)
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SLACK_WEBHOOK", f"http://127.0.0.1:{server.server_port}/")
        _, notes, warnings = report({"monitors": ["my_monitors_example:Slack"]}, tmp_path, tmp_path)
        server.shutdown()
    assert (notes, warnings) == ({"Slack": "Slack has it"}, [])
    assert received.get_nowait() == {"text": "run-1 finished"}


BROKEN = """
from asyncrl_cli.monitors.base import Monitor
class Broken(Monitor):
    def stepped(self, step, version, metrics):
        raise KeyError("loss")
class NeedsMore(Monitor):
    def __init__(self, path): pass
class Other: pass
"""


def test_a_users_monitor_that_raises_is_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "my_broken_monitors.py").write_text(BROKEN)
    _, notes, warnings = report({"monitors": ["my_broken_monitors:Broken"]}, tmp_path, tmp_path)
    assert warnings == [
        "! the monitor Broken is switched off: KeyError: 'loss'; the run continues (see logs/driver.log)\n"
    ]
    assert notes == {}
    assert 'raise KeyError("loss")' in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_monitors:A", "no module 'no_such_monitors'"),
        ("my_broken_monitors:Gone", "module my_broken_monitors"),
        ("my_broken_monitors:Other", "is not a subclass of asyncrl_cli.monitors.base.Monitor"),
        ("my_broken_monitors:NeedsMore", "() failed: TypeError"),
    ],
)
def test_invalid_monitors_are_refused_before_the_start(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "my_broken_monitors.py").write_text(BROKEN)
    with pytest.raises(ConfigError) as refused:
        load_monitors(TrackingSpec(monitors=[name]), tmp_path)
    assert message in refused.value.message
    assert refused.value.location == "tracking.monitors.0" and refused.value.hint


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_extra_is_named_before_the_start(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.monitors.extras.find_spec", lambda _: None)
    tracking = TrackingSpec.model_validate({package: True if package == "tensorboard" else {}})
    with pytest.raises(ConfigError) as refused:
        load_monitors(tracking, Path())
    assert refused.value.location == f"tracking.{package}"
    assert refused.value.hint == f"pip install 'asyncrl[{package}]'"


def test_without_a_key_weights_and_biases_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.monitors.extras.find_spec", lambda _: object())
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    tracking = TrackingSpec.model_validate({"wandb": {}})
    with pytest.raises(ConfigError, match="has no API key"):
        load_monitors(tracking, tmp_path)
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    assert load_monitors(tracking, tmp_path)
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert [monitor.name for monitor in load_monitors(tracking, tmp_path)] == ["W&B"]
