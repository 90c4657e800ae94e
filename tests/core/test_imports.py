"""Imports of large libraries: hidden modules and the garbage collector are restored afterwards."""

from __future__ import annotations

import gc
import importlib.util
import sys
from contextlib import suppress

import pytest

from asyncrl_cli.core.imports import UNUSED, large_imports


@pytest.fixture(autouse=True)
def unused_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNUSED:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_what_no_run_uses_is_not_found_meanwhile() -> None:
    assert importlib.util.find_spec("scipy") is not None
    with large_imports():
        assert importlib.util.find_spec("scipy") is None
        with pytest.raises(ImportError):
            import scipy  # noqa: F401
    assert importlib.util.find_spec("scipy") is not None


def test_what_is_imported_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", gc)
    with large_imports():
        assert sys.modules["scipy"] is gc
    assert sys.modules["scipy"] is gc


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
