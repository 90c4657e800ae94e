"""`asyncrl doctor --cluster` on hosts with separate addresses, files and networks, and the Slurm job on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.hosts import ROOT, Host, Network, until, why_not
from tests.cluster.ray_cluster import RayCluster

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Three hosts with Ray."""
    if reason := why_not():
        pytest.skip(reason)
    with Network(tmp_path_factory.mktemp("shared")) as network:
        yield RayCluster(network).hosts(head=2, second=1, third=1)


def doctor(host: Host, *options: str) -> dict[str, list[dict[str, Any]]]:
    """The findings of `asyncrl doctor --cluster`, by check. Its exit code is 1 if any is a failure."""
    command = host.start("asyncrl", "doctor", "--cluster", "--json", *options)
    code = command.wait(300)
    document = json.loads(command.printed())
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in document["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    failed = any(finding["status"] == "failure" for finding in document["findings"])
    assert document["healthy"] is not failed and code == failed, document
    return found


def test_hosts_that_can_work_together(hosts: list[Host]) -> None:
    found = doctor(hosts[0])
    problems = [one for findings in found.values() for one in findings if one["status"] == "failure"]
    assert not problems
    assert found["cluster"][0]["found"] == "3 nodes at auto"
    for check in ("token", "versions", "host memory", "shared folder"):
        assert [one["status"] for one in found[check]] == ["ok"], found[check]
    assert found["connections"][-1]["found"] == "6 of 6 pairs"
    assert not (hosts[0].network.folder / "runs").exists()


def test_each_fault_is_named_with_its_hosts(hosts: list[Host]) -> None:
    """Two hosts that lose packets, and a folder that is not shared."""
    first, second, third = hosts
    second.lose(third)
    try:
        found = doctor(first, "--runs-dir", "/tmp/runs")
    finally:
        second.find(third)
    (connections,) = found["connections"]
    one, other = (f"{host.name} ({host.address})" for host in (second, third))
    pairs = {f"{a} -> {b}: {b} gave no answer within 5 s" for a, b in ((one, other), (other, one))}
    assert connections["status"] == "failure" and set(connections["found"].split("; ")) == pairs
    assert "firewall" in connections["hint"]

    (folder,) = found["shared folder"]
    assert folder["status"] == "failure"
    for host in (second, third):
        assert f"{host.name} ({host.address}) has no folder /tmp/runs" in folder["found"]
    assert "head" not in folder["found"]


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
printf '%s\\0' "$@" > argv; env -0 > environment; touch started
until [ -e code ]; do sleep 0.1; done
exit "$(cat code)"
"""
"""Stands for srun: writes the task's command to files, which the test runs on every host; ends with the first code."""


@pytest.mark.nightly  # 90 s; `make cluster` runs it
def test_the_slurm_job_starts_ray_on_its_nodes_and_asyncrl_on_the_first(network: Network) -> None:
    """`sbatch job.sbatch train spec.yaml --dry-run`, with stand-ins for Slurm's own commands."""
    hosts = [network.host("one"), network.host("two")]
    folder, tools = network.folder, network.folder / "tools"
    tools.mkdir()
    shutil.copy(ROOT / "templates/slurm/job.sbatch", folder)
    labels = "trainer: {labels: {role: trainer}}, engines: {labels: {role: rollout}}"
    spec = f"extends: {ROOT / 'specs/quickstart.yaml'}\ncluster: {{address: auto, {labels}}}\n"
    (folder / "spec.yaml").write_text(spec)
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\nprintf 'one\\ntwo\\n'\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    venv = folder / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f"PATH={tools}:$PATH\n")
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "one,two"}
    slurm |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8", "ASYNCRL_VENV": str(folder / "venv")}
    job = hosts[0].start("bash", folder / "job.sbatch", "train", "spec.yaml", "--dry-run", "--json", **slurm)
    until(lambda: (folder / "started").exists() or job.code is not None, "srun")
    assert job.code is None, job.printed()
    token = folder / ".ray-token-7"
    assert token.stat().st_mode & 0o777 == 0o600
    argv = (folder / "argv").read_text().split("\0")[:-1]
    environment = dict(entry.split("=", 1) for entry in (folder / "environment").read_text().split("\0")[:-1])
    assert environment["RAY_ADDRESS"] == f"{hosts[0].address}:6379"
    tasks = [host.start(*argv, **environment, SLURM_NODEID=str(index)) for index, host in enumerate(hosts)]
    code = tasks[0].wait(900)
    (folder / "code").write_text(str(code))
    output = tasks[0].printed()
    assert code == 0, output + tasks[1].printed()
    document = json.loads(output[output.index("{\n") : output.rindex("\n}") + 2])
    found = {finding["check"]: finding for finding in document["findings"]}
    assert document["can_run"] and found["cluster"]["found"].startswith("2 nodes at auto, 2 for this run")
    assert found["connections"]["found"] == "2 of 2 pairs" and found["token"]["status"] == "ok"
    assert job.wait(300) == 0
    assert not token.exists()
    assert tasks[1].wait(300) == 0, "Ray ends on all nodes"
