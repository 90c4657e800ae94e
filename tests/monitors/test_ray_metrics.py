"""The run's numbers in Ray's metrics, and the dashboard that queries them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from threading import Condition
from typing import Any

import pytest

from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.monitors import ray_metrics
from asyncrl_cli.monitors.base import Ending, EvaluationResult, RunInfo
from asyncrl_cli.monitors.console import QuietView
from asyncrl_cli.monitors.ray_metrics import RayMetrics, ray_name
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from tests.journal.recorded_run import make_run

from .mlflow_runs import spec_of

ROOT = Path(__file__).parents[2]
COUNTS = Counts(running=31, finished=3, taken=1000, rejected=5, requeued=6, late=0)
METRICS = {"reward/mean": 0.25, "tokens/trained": 100.0, "tokens/generated": 0.0, "publish/seconds": 0.1}
STARTED = 1_790_000_000.0
SPEC = spec_of({}, stop={"steps": 40}, pipeline={"mode": "async", "max_staleness": 2})
INFO = RunInfo("run-1", Path("run-1"), 40, {})


class Noted:
    """Values passed to Ray, by metric and tags."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        noted = self
        self.values: defaultdict[str, float] = defaultdict(float)
        self.changed = Condition()

        class Metric:
            def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
                assert re.fullmatch(r"asyncrl_[A-Za-z0-9_]+", name) and description
                self._name, self._keys = name, tag_keys

            def _series(self, tags: dict[str, str]) -> str:
                assert tuple(tags) == self._keys and tags["run_id"] == "run-1"
                return self._name + "".join(f" {value}" for key, value in tags.items() if key != "run_id")

        class Gauge(Metric):
            def set(self, value: float, tags: dict[str, str]) -> None:
                with noted.changed:
                    noted.values[self._series(tags)] = value
                    noted.changed.notify_all()

        class Counter(Metric):
            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0, "Ray refuses to add nothing"
                noted.values[f"{self._series(tags)} total"] += value

        monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
        monkeypatch.setattr("ray.util.metrics.Counter", Counter)
        monkeypatch.setattr("ray.nodes", list)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path)


def test_ray_gets_everything_that_is_reported(noted: Noted, run: RunDirectory) -> None:
    reporter = Reporter(Recorder(run, pytest.fail), QuietView(io.StringIO()))
    reporter.join(RayMetrics(run, SPEC))
    for step in (1, 2):
        reporter.stepped(step, step, METRICS, STARTED)
    reporter.status("training", COUNTS)
    reporter.evaluated(EvaluationResult("chain:greedy", 2, 0.75, 0.5, 9.0, 4, 1, 2))
    for kind in ("engine", "engine", "weights"):
        reporter.faulted(kind)
    reporter.engines(1, 2, "no room")
    lasting = HealthFinding("entropy", 2, None, "", "", "", False)
    reporter.health(2, [lasting, replace(lasting, rule="equal_groups", last_step=2)], [lasting])
    reporter.finish(Ending("finished"))
    assert noted.values == {
        "asyncrl_stop_steps": 40,
        "asyncrl_max_staleness": 2,
        "asyncrl_step": 2,
        "asyncrl_version": 2,
        **{ray_name(name): value for name, value in METRICS.items()},
        **{f"asyncrl_buffer_groups_{name}": getattr(COUNTS, name) for name in COUNTS.__slots__},
        "asyncrl_steps total": 2,
        "asyncrl_publishes total": 2,
        "asyncrl_trained_tokens total": 200,
        "asyncrl_eval_accuracy chain:greedy": 0.75,
        "asyncrl_eval_reward_mean chain:greedy": 0.5,
        "asyncrl_eval_tokens_mean chain:greedy": 9.0,
        "asyncrl_faults engine total": 2,
        "asyncrl_faults weights total": 1,
        "asyncrl_health_findings entropy": 1,
        "asyncrl_health_findings equal_groups": 0,
        "asyncrl_engines_serving": 1,
        "asyncrl_engines_wanted": 2,
    }


def test_a_gauge_is_set_again_and_a_counter_is_not(
    noted: Noted, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray forgets a gauge that is not set for some time."""
    monkeypatch.setattr(ray_metrics, "AGAIN_S", 0.01)
    metrics = RayMetrics(run, SPEC)
    metrics.stepped(1, 1, METRICS)
    metrics.evaluated(EvaluationResult("greedy", 2, 0.75, 0.5, 9.0, 4, 1, 2))
    metrics.evaluated(EvaluationResult("sampled", 2, 0.5, 0.25, 9.0, 4, 1, 2))
    before = {series: value for series, value in noted.values.items() if not series.endswith(" total")}
    noted.values.clear()
    metrics.started(INFO)
    before |= {"asyncrl_stop_steps": 40, "asyncrl_max_staleness": 2}
    with noted.changed:
        assert noted.changed.wait_for(lambda: len(noted.values) >= len(before), 120)
    metrics.finish(Ending("finished"))
    assert noted.values == before


def test_prometheus_targets_are_the_nodes_with_an_agent(
    noted: Noted, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: list[dict[str, Any]] = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "MetricsExportPort": 7001},
        {"Alive": True, "NodeManagerAddress": "10.0.0.2", "MetricsExportPort": 7002},
        {"Alive": True, "NodeManagerAddress": "10.0.0.3", "MetricsExportPort": -1},
        {"Alive": False, "NodeManagerAddress": "10.0.0.4", "MetricsExportPort": 7004},
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    metrics = RayMetrics(run, SPEC)
    metrics.started(INFO)
    file = run.path / "prometheus.json"
    assert [group["targets"] for group in json.loads(file.read_text())] == [["10.0.0.1:7001", "10.0.0.2:7002"]]
    metrics.finish(Ending("finished"))
    assert not file.exists()
    del nodes[:2]
    metrics.started(INFO)
    metrics.finish(Ending("finished"))
    assert not file.exists()


# -- the dashboard


def exported(noted: Noted, run: RunDirectory) -> set[str]:
    """All possible names in Prometheus, including the step metrics in docs/metrics.md."""
    metrics = RayMetrics(run, SPEC)
    metrics.started(INFO)
    metrics.finish(Ending("finished"))
    documented = re.findall(r"`([a-z]+/[a-z0-9_]+)`", (ROOT / "docs/metrics.md").read_text())
    metrics.stepped(1, 1, dict.fromkeys(documented, 1.0))
    metrics.status("training", COUNTS)
    metrics.evaluated(EvaluationResult("greedy", 2, 0.75, 0.5, 9.0, 4, 1, 2))
    metrics.faulted("engine")
    return {f"ray_{series.split()[0]}{'_total' * series.endswith(' total')}" for series in noted.values}


def test_the_dashboard_queries_only_existing_metrics(noted: Noted, run: RunDirectory) -> None:
    dashboard = json.loads((ROOT / "templates/grafana/asyncrl.json").read_text())
    panels, variables = dashboard["panels"], {one["name"]: one for one in dashboard["templating"]["list"]}
    asked = [query["expr"] for panel in panels for query in panel["targets"]]
    names = {name for query in (*asked, variables["run"]["definition"]) for name in re.findall(r"\bray_\w+", query)}
    assert names <= exported(noted, run)
    for name in ("reward_mean", "max_staleness", "buffer_groups_running", "faults_total"):
        assert f"ray_asyncrl_{name}" in names
    assert all('run_id=~"$run"' in query for query in asked)
    for query in asked:
        assert all(query.count(pair[0]) == query.count(pair[1]) for pair in ("()", "{}", "[]"))


# -- on a real Ray

SCRAPED = """
import json, os, stat, subprocess, sys, time, urllib.request
from pathlib import Path
import ray  # before the settings of the cluster are made
from ray._raylet import AuthenticationMode, get_authentication_mode
from asyncrl_cli.monitors.base import Ending, RunInfo
from asyncrl_cli.monitors.ray_metrics import RayMetrics
from asyncrl_cli.orchestrator.cluster import ray_cluster
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.system.reaper import MARK, marked_processes
from asyncrl_cli.spec.sections import ExperimentSpec

def listening():
    import psutil
    pids = [os.getpid(), *marked_processes(os.environ[MARK])]
    sockets = [socket for pid in pids for socket in psutil.Process(pid).net_connections("inet")]
    return sorted({socket.laddr.ip for socket in sockets if socket.status == "LISTEN"})

def answer_to(token):
    import ray
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    program = [sys.executable, "-c", STRANGER, ray.get_runtime_context().gcs_address]
    return subprocess.run(program, env=environment, capture_output=True, text=True).stdout.strip()

STRANGER = '''
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=120)
    print("in")
except Exception as error:
    print(type(error).__name__)
'''
spec = {"model": {"path": "m"}, "task": {"use": "chain_sum"}, "stop": {"steps": 1}}
spec = ExperimentSpec.model_validate(spec | {"pipeline": {"mode": "async", "max_staleness": 2}})
run, text = RunDirectory.create(Path(sys.argv[1]), "scraped"), ""
with ray_cluster(spec, run.path / "logs"):
    metrics = RayMetrics(run, spec)
    metrics.started(RunInfo(run.run_id, run.path, 10, {}))
    metrics.faulted("engine")
    token, temporary = Path(os.environ["RAY_AUTH_TOKEN_PATH"]), Path(os.environ["TMPDIR"])
    private = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (token, temporary)}
    private["folder"] = oct(stat.S_IMODE(token.parent.stat().st_mode))
    assert token.parent in Path(ray._private.worker._global_node.get_session_dir_path()).parents
    right = token.read_text()
    strangers = [answer_to(""), answer_to("0" * 64), answer_to(right)]
    file = run.path / "prometheus.json"
    for step in range(1, 121):
        metrics.stepped(step, step, {"reward/mean": 0.25, "tokens/trained": 100.0})
        if not file.exists():
            break
        for target in json.loads(file.read_text())[0]["targets"]:
            text = urllib.request.urlopen(f"http://{target}/metrics", timeout=120).read().decode()
        if "ray_asyncrl_faults_total" in text:
            break
        time.sleep(1)
    metrics.finish(Ending("finished"))
    addresses = listening()
assert get_authentication_mode() != AuthenticationMode.TOKEN  # another Ray of this process is as its environment says
seen = {"private": private, "strangers": strangers, "addresses": addresses}
print(json.dumps(seen | {"steps": step, "text": text, "left": file.exists()}))
"""


@pytest.mark.stack
def test_prometheus_gets_real_numbers_where_ray_has_its_agent(tmp_path: Path) -> None:
    """Ray's agent needs packages (`asyncrl[prometheus]`). Without them Ray accepts the numbers and drops them silently.

    No other process can use this Ray: it requires its token, and listens on loopback only.
    """
    program = [sys.executable, "-c", SCRAPED, str(tmp_path)]
    # Another Ray in this process has set these variables for its own token; this Ray must not use them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    out = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    seen = json.loads(out.splitlines()[-1])
    assert seen["private"] == {"token": "0o600", "tmp": "0o700", "folder": "0o700"}
    assert seen["strangers"] == ["AuthenticationError", "AuthenticationError", "in"]
    assert seen["addresses"] and set(seen["addresses"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert not seen["left"]
    if find_spec("opencensus") is None:
        assert seen["text"] == ""
        return
    (run,) = (path.name for path in tmp_path.iterdir())
    values = {
        match[1]: float(match[3])
        for match in re.finditer(r"^ray_(asyncrl_\w+)(\{.*\}) (\S+)$", seen["text"], re.MULTILINE)
        if f'run_id="{run}"' in match[2]
    }
    assert values["asyncrl_reward_mean"] == 0.25 and values["asyncrl_max_staleness"] == 2
    assert values["asyncrl_faults_total"] == 1
    assert values["asyncrl_trained_tokens_total"] == 100 * values["asyncrl_steps_total"] <= 100 * seen["steps"]
