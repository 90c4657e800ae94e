"""Checks every use of vLLM against the releases that the extra `gpu` allows.

Usage: python -m tests.contracts.releases [VERSION ...]

The wheels are downloaded without dependencies (about 330 MB each) and read, not installed. Exit code 1: some use does
not fit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tests.contracts import vllm_contract
from tests.contracts.check import problem
from tests.contracts.source import Package
from tests.contracts.uses import all_uses

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def allowed(published: Sequence[str]) -> list[str]:
    """The published versions that the extra `gpu` allows, oldest first."""
    extra = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["gpu"]
    (vllm,) = (requirement for text in extra if (requirement := Requirement(text)).name == "vllm")
    return sorted(vllm.specifier.filter(published), key=Version)


def published() -> list[str]:
    """The versions of vLLM that pip finds, without pre-releases."""
    done = _pip("index", "versions", "vllm")
    (line,) = (line for line in done.splitlines() if line.startswith("Available versions:"))
    return line.partition(":")[2].replace(",", " ").split()


def fetch(version: str, folder: Path) -> Package:
    """The source of one release, unpacked into a separate folder."""
    _pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}")
    (wheel,) = folder.glob(f"vllm-{version}-*.whl")
    target = folder / version
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
    return Package(target)


def misfits(package: Package) -> list[str]:
    """Return the uses that do not fit a release of vLLM, with their places in our code."""
    uses = [use for use in all_uses()[0] if use.library == "vllm"]
    wrong = [f"{use}\n    {what}" for use in uses if (what := problem(use, package))]
    return wrong + list(vllm_contract.problems(package))


def _pip(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip {' '.join(arguments)} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def main() -> int:
    versions = sys.argv[1:] or allowed(published())
    failed = False
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            wrong = misfits(fetch(version, Path(folder)))
        print(f"vllm {version}: {'fits' if not wrong else f'{len(wrong)} uses do not fit'}", *wrong, sep="\n")
        failed = failed or bool(wrong)
    return int(failed or not versions)


if __name__ == "__main__":
    sys.exit(main())
