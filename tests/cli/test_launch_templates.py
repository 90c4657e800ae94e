"""The templates for Slurm and KubeRay: commands, options, fields and placeholders, checked without either of them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl_cli.cli.app import app
from asyncrl_cli.spec.load import load_spec

ROOT = Path(__file__).parents[2]
SLURM, KUBERAY = ROOT / "templates/slurm", ROOT / "templates/kuberay"
GPUS = ("nodes", "gpus-per-node")
PLACEHOLDER = re.compile(r"<[a-z-]+>")


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((KUBERAY / "rayjob.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def start_options() -> set[str]:
    """The options of the installed `ray start`, including those without help."""
    from ray.scripts.scripts import start

    return {option for parameter in start.params for option in parameter.opts}


def test_the_job_uses_options_that_ray_has(start_options: set[str]) -> None:
    from ray.scripts.symmetric_run import symmetric_run

    (command,) = re.findall(r"ray symmetric-run (.*?) -- bash", _job_text(), re.DOTALL)
    used = {word for word in command.replace("\\\n", " ").split() if word.startswith("--")}
    own = {option for parameter in symmetric_run.params for option in parameter.opts}
    assert {"--address", "--min-nodes", "--labels", "--num-cpus", "--num-gpus"} <= used
    assert used <= own | start_options
    assert not used & {"--head", "--node-ip-address", "--port", "--block"}, "`ray symmetric-run` refuses these"
    assert "head=--include-dashboard=false" in _job_text() and "--include-dashboard" not in used, "a head's alone"


def test_ports_are_pinned_and_none_twice(start_options: set[str], job: dict[str, Any]) -> None:
    def check(ports: dict[str, str]) -> None:
        first, last = int(ports.pop("min-worker-port")), int(ports.pop("max-worker-port"))
        fixed = [int(port) for port in ports.values()] + [6379]
        assert len(set(fixed)) == len(fixed) and not any(first <= port <= last for port in fixed)
        assert last - first > 1000, "every worker needs one"

    wanted = {option.lstrip("-") for option in start_options if re.fullmatch(r"--.*(?<!shard)-port", option)}
    # Only the head has them: the ports of Ray, the dashboard and Ray Client. No run uses the last two.
    wanted -= {"port", "dashboard-port", "ray-client-server-port"}
    slurm = dict(re.findall(r"--([a-z-]+-port) (\d+)", _job_text()))
    assert slurm.keys() == wanted
    check(slurm)
    for group in groups(job):
        ports = {name: value for name, value in group["rayStartParams"].items() if name.endswith("-port")}
        # KubeRay sets these two itself, to 52365 and 8080.
        assert ports.keys() | {"dashboard-agent-listen-port", "metrics-export-port"} == wanted
        check(ports | {"dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"})


def test_the_nodes_of_the_job_have_the_gpus_of_the_spec() -> None:
    spec = load_spec(SLURM / "spec.yaml").spec
    nodes, gpus = (int(re.findall(rf"^#SBATCH --{name}=(\d+)$", _job_text(), re.MULTILINE)[0]) for name in GPUS)
    assert spec.trainer.ranks * spec.trainer.gpus_per_rank == gpus
    assert spec.rollout.max_engines * spec.rollout.gpus_per_engine == (nodes - 1) * gpus


STAND_INS = {
    "scontrol": "echo one",
    "getent": "echo 127.0.0.1 STREAM one",
    "ip": "echo local 127.0.0.1 dev lo src 127.0.0.1",
    "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 exec "$@"',
    "ray": 'while [[ $1 != -- ]]; do shift; done; shift; "$@"',
    "asyncrl": 'trap "echo checkpoint; exit 130" USR1; echo "$@"; while :; do read -rt 1 <> <(:) || :; done',
}


def test_a_warning_of_slurm_reaches_the_driver_and_its_exit_code_is_the_jobs(tmp_path: Path) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={tmp_path}:$PATH")
    slurm = {"SUBMIT_DIR": str(tmp_path), "JOB_ID": "7", "JOB_NODELIST": "one", "JOB_NUM_NODES": "1"}
    environment = os.environ | {f"SLURM_{name}": value for name, value in (slurm | {"CPUS_PER_TASK": "8"}).items()}
    command = ["bash", str(SLURM / "job.sbatch"), "resume", "my run"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "resume my run\n"
        job.send_signal(signal.SIGUSR1)
        assert job.stdout.readline() == "checkpoint\n"
        assert job.wait(300) == 130
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".driver", ".ray-token"))]


def test_the_job_uses_existing_asyncrl_commands(job: dict[str, Any]) -> None:
    from typer.main import get_command

    commands = get_command(app).commands  # type: ignore[attr-defined]
    named = re.findall(r"sbatch job\.sbatch (?! )([a-z-]+)", _job_text() + (SLURM / "README.md").read_text())
    named += [*re.findall(r"set -- ([a-z-]+)", _job_text()), shlex.split(job["spec"]["entrypoint"])[1]]
    assert {"train", "resume"} <= set(named) <= commands.keys()


@pytest.mark.parametrize("folder", [SLURM, KUBERAY], ids=lambda folder: folder.name)
def test_the_specs_place_ranks_and_engines_by_labels_that_nodes_get(folder: Path, job: dict[str, Any]) -> None:
    cluster = load_spec(folder / "spec.yaml").spec.cluster
    assert cluster.address == "auto" and cluster.autoscaling is (folder is KUBERAY)
    assert (cluster.trainer.labels, cluster.engines.labels) == ({"role": "trainer"}, {"role": "rollout"})
    assert [group.get("labels") for group in groups(job)] == [None, {"role": "trainer"}, {"role": "rollout"}]
    assert re.findall(r"role=([a-z]+)", _job_text()) == ["rollout", "trainer"]


def test_trainer_nodes_are_fixed_and_engine_nodes_are_not(job: dict[str, Any]) -> None:
    _, trainer, rollout = groups(job)
    assert trainer["minReplicas"] == trainer["replicas"] == trainer["maxReplicas"]
    assert rollout["minReplicas"] <= rollout["replicas"] < rollout["maxReplicas"]
    spec = load_spec(KUBERAY / "spec.yaml").spec
    assert (spec.rollout.min_engines, spec.rollout.max_engines) == (rollout["minReplicas"], rollout["maxReplicas"])
    assert "autoscaler" in str(job) and job["spec"]["rayClusterSpec"]["autoscalerOptions"]["version"] == "v2"


def test_pods_have_room_for_what_the_spec_places_there(job: dict[str, Any]) -> None:
    spec = load_spec(KUBERAY / "spec.yaml").spec
    _, trainer, rollout = (container(group)["resources"]["limits"] for group in groups(job))
    assert spec.trainer.ranks * spec.trainer.threads_per_rank <= int(trainer["cpu"])
    assert spec.trainer.ranks * spec.trainer.gpus_per_rank == int(trainer["nvidia.com/gpu"])
    assert spec.rollout.threads_per_engine <= int(rollout["cpu"])
    assert spec.rollout.gpus_per_engine == int(rollout["nvidia.com/gpu"]), "one engine in each pod"


def test_all_pods_have_the_runs_and_the_task(job: dict[str, Any]) -> None:
    (claim,) = yaml.safe_load_all((KUBERAY / "volume.yaml").read_text())
    for group in groups(job):
        volumes = {volume.pop("name"): volume for volume in group["template"]["spec"]["volumes"]}
        assert volumes["runs"] == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(group)["volumeMounts"]}
        assert mounts == {"runs": "/runs", "task": "/task"} and mounts.keys() == volumes.keys()
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert shlex.split(job["spec"]["entrypoint"])[2:] == ["/task/spec.yaml", "--set", "runs_dir=/runs"]


def test_the_token_is_on_and_has_the_version_that_it_needs(job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "requirements/cpu.lock").read_text()
    assert "RAY_AUTH_MODE=token" in _job_text() and "umask 077" in _job_text()


def test_rays_parameters_of_the_job_are_options_of_ray_start(start_options: set[str], job: dict[str, Any]) -> None:
    for group in groups(job):
        assert {f"--{name}" for name in group["rayStartParams"]} <= start_options


def test_the_readme_explains_every_placeholder_and_every_file() -> None:
    readme = (KUBERAY / "README.md").read_text()
    used = {found for file in KUBERAY.iterdir() if file.name != "README.md" for found in placeholders(file)}
    assert used == set(re.findall(r"^\| `(<[a-z-]+>)` \|", readme, re.MULTILINE))
    for folder in (SLURM, KUBERAY):
        table = "".join(re.findall(r"^\| `.*", (folder / "README.md").read_text(), re.MULTILINE))
        assert all(f"`{file.name}`" in table for file in folder.iterdir() if file.name != "README.md")
    assert not any(placeholders(file) for file in SLURM.iterdir())


def test_images_install_what_is_in_the_repository() -> None:
    for file in KUBERAY.glob("Containerfile.*"):
        text = file.read_text()
        assert "[prometheus]" in text or ",prometheus]" in text, "Ray's job submission"
        for path in re.findall(r"/opt/asyncrl/([a-z/._]+)", text):
            assert (ROOT / path).is_file()
        assert re.search(r"^USER ", text, re.MULTILINE)


def _job_text() -> str:
    return (SLURM / "job.sbatch").read_text()


def placeholders(file: Path) -> set[str]:
    """The placeholders in a file; comments may mention others."""
    lines = (line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
    return set(PLACEHOLDER.findall("\n".join(lines)))


def groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's group and the worker groups."""
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    """The only container in a group's pods."""
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)
