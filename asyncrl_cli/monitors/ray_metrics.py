"""Publishes the run's numbers as Ray metrics. Prometheus, and so Grafana, reads them from Ray's agents.

Names: a step's metric ``area/quantity`` becomes the gauge ``ray_asyncrl_area_quantity`` (Ray adds ``ray_``), counters
end in ``_total``, and all metrics have the tag ``run_id``. docs/watching.md lists the metrics that do not belong to a
step.

Ray forgets a gauge that is not set during two of its reports (20 s), and a step may take longer. So a thread sets each
gauge again while the run is driven.

Calls return immediately: Ray only notes a number (two microseconds). The first error is shown. Later numbers are still
sent, because an agent may come back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from threading import Event, Lock, Thread
from typing import Any

from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.monitors.base import Ending, EvaluationResult, Monitor, RunInfo
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec

TARGETS = "prometheus.json"
"""File in a run's folder with the addresses that Prometheus asks (its ``file_sd_configs``)."""
COUNTERS = {"tokens/trained": "trained_tokens", "tokens/generated": "generated_tokens"}
"""A step's metrics that are also added up over steps."""
AGAIN_S = 5.0
"""Seconds after which a gauge is set again; Ray reports the last value to its agent every 10 s."""


def ray_name(metric: str) -> str:
    """Return a metric's name for Ray, with only letters, digits and underscores."""
    return "asyncrl_" + re.sub(r"[^A-Za-z0-9]+", "_", metric)


class RayMetrics(Monitor):
    """Sets one run's gauges and counters in the process that drives it. Raises nothing, but warns once."""

    name = "Prometheus"

    def __init__(self, run: RunDirectory, spec: ExperimentSpec, warn: Callable[[str], None]) -> None:
        self._run = run
        self._limits = {"stop_steps": spec.stop.total, "max_staleness": spec.pipeline.max_staleness}
        self._own_cluster = spec.cluster.address is None  # users tell Prometheus about clusters that runs join
        self._warn = warn
        self._made: dict[str, Any] = {}
        self._metrics: dict[str, str] = {}  # asyncrl's metric by Ray's name
        self._values: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}  # values and tags, by name and tags
        self._lock = Lock()
        self._ended = Event()
        self._warned = False

    def started(self, run: RunInfo) -> None:
        with self._tried():
            for name, value in self._limits.items():
                self._set(name, value)
            if self._own_cluster:
                self._write_targets()
        Thread(target=self._keep, name="ray-metrics", daemon=True).start()

    def finish(self, ending: Ending) -> None:
        self._ended.set()
        if self._own_cluster:  # the cluster ends with the run
            with self._tried():
                (self._run.path / TARGETS).unlink(missing_ok=True)

    def _write_targets(self) -> None:
        """Write the addresses of this cluster's metrics agents to the run's folder, if there are any."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"] and node.get("MetricsExportPort", -1) > 0]
        if nodes:
            targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]
            self._run.write_json(TARGETS, [{"targets": targets, "labels": {"job": "asyncrl"}}])

    def _keep(self) -> None:
        """Set every gauge repeatedly until the run has ended."""
        while not self._ended.wait(AGAIN_S):
            with self._tried():
                for (name, _), (value, tags) in self._values.items():
                    self._made[name].set(value, tags)

    def doing(self, text: str, counts: Counts) -> None:
        with self._tried():
            for state, groups in asdict(counts).items():
                self._set(f"buffer/groups_{state}", groups)

    def engines(self, serving: int, wanted: int) -> None:
        with self._tried():
            self._set("engines/serving", serving)
            self._set("engines/wanted", wanted)

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        with self._tried():
            self._set("step", step)
            self._set("version", version)
            for name, value in metrics.items():
                self._set(name, value)
            for name, counter in COUNTERS.items():
                self._add(counter, metrics.get(name, 0.0))
            self._add("steps", 1)
            if "publish/seconds" in metrics:
                self._add("publishes", 1)

    def evaluated(self, result: EvaluationResult) -> None:
        with self._tried():
            self._set("eval/accuracy", result.accuracy, kind=result.kind)
            self._set("eval/reward_mean", result.mean_reward, kind=result.kind)
            self._set("eval/tokens_mean", result.mean_length, kind=result.kind)

    def faulted(self, kind: str) -> None:
        with self._tried():
            self._add("faults", 1, kind=kind)

    def health(self, finding: HealthFinding) -> None:
        with self._tried():
            self._set("health/findings", float(finding.last_step is None), rule=finding.rule)

    def _set(self, metric: str, value: float, **tags: str) -> None:
        from ray.util.metrics import Gauge

        gauge, tags = self._of(Gauge, metric, tags)
        gauge.set(value, tags)
        self._values[self._name(metric), str(tags)] = value, tags

    def _add(self, metric: str, value: float, **tags: str) -> None:
        from ray.util.metrics import Counter

        if value > 0:  # Ray refuses to add 0
            counter, tags = self._of(Counter, metric, tags)
            counter.inc(value, tags)

    def _of(self, kind: Callable[..., Any], metric: str, tags: dict[str, str]) -> tuple[Any, dict[str, str]]:
        """Ray's metric, made when it is first used, and all its tags."""
        name = self._name(metric)
        if name not in self._made:
            self._made[name] = kind(name, description=f"asyncrl: {metric}", tag_keys=("run_id", *tags))
        return self._made[name], {"run_id": self._run.run_id, **tags}

    def _name(self, metric: str) -> str:
        name = ray_name(metric)
        while self._metrics.setdefault(name, metric) != metric:  # they differ only in characters that Ray refuses
            name += "_"
        return name

    @contextmanager
    def _tried(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                self._warn(f"metrics for Prometheus are not complete: {type(error).__name__}: {error}")
