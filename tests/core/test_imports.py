"""Imports of large libraries: hidden modules and the garbage collector are restored afterwards."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from asyncrl_cli.core.imports import MALLOC, UNUSED, large_imports, missing_package


@pytest.fixture(autouse=True)
def unused_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNUSED:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_unused_packages_are_hidden_within_the_block() -> None:
    assert importlib.util.find_spec("scipy") is not None
    with large_imports():
        assert importlib.util.find_spec("scipy") is None
        with pytest.raises(ImportError):
            import scipy  # noqa: F401
    assert importlib.util.find_spec("scipy") is not None


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_is_off_and_then_as_before(collecting: bool) -> None:
    try:
        (gc.enable if collecting else gc.disable)()
        with suppress(ZeroDivisionError), large_imports():
            assert not gc.isenabled()
            _ = 1 / 0
        assert gc.isenabled() is collecting
        assert not set(UNUSED) & set(sys.modules)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("module", "package"),
    [("numpy", "numpy>="), ("yaml", "pyyaml>="), ("uvicorn.config", "uvicorn"), ("peft", "[lora]")],
)
def test_a_missing_dependency_is_named_with_the_command_that_installs_it(module: str, package: str) -> None:
    found = missing_package(ModuleNotFoundError("", name=module))
    assert found is not None and "is not installed" in found.message
    assert package in found.message + found.hint and "-m pip install" in found.hint


@pytest.mark.parametrize("name", ["my_module", "asyncrl_cli.no_such", None])
def test_other_missing_modules_keep_their_traceback(name: str | None) -> None:
    assert missing_package(ModuleNotFoundError("", name=name)) is None


HEAP = """
import ctypes, os, warnings
from asyncrl_cli.core.imports import MALLOC, set_environment

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]

def grown():
    before = libc.sbrk(0)
    libc.malloc(2**20)
    return libc.sbrk(0) - before

assert grown() == 0  # a block of 1 MiB lies outside the heap
set_environment({MALLOC: str(2**22), "PYTHONWARNINGS": "ignore::FutureWarning"})
assert grown() > 0
assert os.environ[MALLOC] == str(2**22)
with warnings.catch_warnings(record=True) as shown:
    warnings.warn("ours", FutureWarning)
    warnings.warn("another", UserWarning)
assert [str(warning.message) for warning in shown] == ["another"]
"""


def test_an_environment_that_is_set_later_works_as_one_at_the_start() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in (MALLOC, "PYTHONWARNINGS")}
    subprocess.run([sys.executable, "-c", HEAP], check=True, env=clean)
