"""Signal handlers in a process where the main thread belongs to a library.

Python sets signal handlers in the main thread alone; an asynchronous Ray actor is constructed and called in another.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None]

_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_kept: list[object] = []
"""Keeps references to objects to which C code has a pointer."""


def handle_in_main_thread(number: int, handler: Handler) -> None:
    """Have the main thread set a signal handler when it next runs Python code.

    From Ray's constructor of an actor it does so before the actor's first call. Until then the signal has the effect
    that it had.
    """

    def install(_: int | None) -> int:
        signal.signal(number, handler)
        return 0

    call = _CALL(install)
    _kept.append(call)
    ctypes.pythonapi.Py_AddPendingCall(call, None)
