"""Publishes the run's numbers as Ray metrics. Prometheus, and so Grafana, reads them from Ray's agents.

A step's metric ``area/quantity`` becomes the gauge ``ray_asyncrl_area_quantity`` (Ray adds ``ray_``), counters end in
``_total``, and all have the tag ``run_id``. docs/watching.md lists the metrics that do not belong to a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from threading import Event, Thread
from typing import Any

from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.monitors.base import Ending, EvaluationResult, Monitor, RunInfo
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec

TARGETS = "prometheus.json"
"""File in a run's folder with the addresses that Prometheus asks (its ``file_sd_configs``)."""
AGAIN_S = 5.0
"""Seconds after which a gauge is set again. Ray forgets a gauge that is not set during two of its reports (20 s), and a
step may take longer."""


def ray_name(metric: str) -> str:
    """Return a metric's name for Ray, with only letters, digits and underscores."""
    return "asyncrl_" + re.sub(r"[^A-Za-z0-9]+", "_", metric)


class RayMetrics(Monitor):
    """Sets one run's gauges and counters in the process that drives it."""

    name = "Prometheus"

    def __init__(self, run: RunDirectory, spec: ExperimentSpec) -> None:
        self._run = run
        self._spec = spec
        self._has_own_cluster = spec.cluster.address is None  # users tell Prometheus about clusters that runs join
        self._ray_metrics: dict[str, Any] = {}  # by Ray's name
        self._values: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}  # values and tags, by name and tags
        self._end_event = Event()

    def started(self, run: RunInfo) -> None:
        self._set("stop_steps", self._spec.stop.total)
        self._set("max_staleness", self._spec.pipeline.max_staleness)
        if self._has_own_cluster:
            import ray

            nodes = [node for node in ray.nodes() if node["Alive"] and node.get("MetricsExportPort", -1) > 0]
            targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]
            if targets:
                self._run.write_json(TARGETS, [{"targets": targets, "labels": {"job": "asyncrl"}}])
        Thread(target=self._set_again, name="ray-metrics", daemon=True).start()

    def finish(self, ending: Ending) -> None:
        self._end_event.set()
        if self._has_own_cluster:  # the cluster ends with the run
            (self._run.path / TARGETS).unlink(missing_ok=True)

    def _set_again(self) -> None:
        while not self._end_event.wait(AGAIN_S):
            for (name, _), (value, tags) in tuple(self._values.items()):
                self._ray_metrics[name].set(value, tags)

    def status(self, text: str, counts: Counts | None = None) -> None:
        for state, groups in (asdict(counts) if counts else {}).items():
            self._set(f"buffer/groups_{state}", groups)

    def engines(self, serving: int, wanted_engines: int) -> None:
        self._set("engines/serving", serving)
        self._set("engines/wanted", wanted_engines)

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"step": step, "version": version, **metrics}.items():
            self._set(name, value)
        for tokens in ("trained", "generated"):
            self._add(f"{tokens}_tokens", metrics.get(f"tokens/{tokens}", 0.0))
        self._add("steps", 1)
        if "publish/seconds" in metrics:
            self._add("publishes", 1)

    def evaluated(self, result: EvaluationResult) -> None:
        self._set("eval/accuracy", result.accuracy, kind=result.kind)
        self._set("eval/reward_mean", result.mean_reward, kind=result.kind)
        self._set("eval/tokens_mean", result.mean_length, kind=result.kind)

    def faulted(self, fault_kind: str) -> None:
        self._add("faults", 1, kind=fault_kind)

    def health(self, finding: HealthFinding) -> None:
        self._set("health/findings", float(finding.last_step is None), rule=finding.rule)

    def _set(self, metric: str, value: float, **tags: str) -> None:
        from ray.util.metrics import Gauge

        gauge, tags = self._ray_metric(Gauge, metric, tags)
        gauge.set(value, tags)
        self._values[ray_name(metric), str(tags)] = value, tags

    def _add(self, metric: str, value: float, **tags: str) -> None:
        from ray.util.metrics import Counter

        if value > 0:  # Ray refuses to add 0
            counter, tags = self._ray_metric(Counter, metric, tags)
            counter.inc(value, tags)

    def _ray_metric(self, metric_type: Callable[..., Any], metric: str, tags: Mapping[str, str]) -> tuple[Any, Any]:
        """Ray's metric, made when it is first used, and all its tags."""
        name, tags = ray_name(metric), {"run_id": self._run.run_id, **tags}
        if name not in self._ray_metrics:
            self._ray_metrics[name] = metric_type(name, description=f"asyncrl: {metric}", tag_keys=tuple(tags))
        return self._ray_metrics[name], tags
