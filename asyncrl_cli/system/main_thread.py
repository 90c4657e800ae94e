"""Signal handlers in a process where the main thread belongs to a library.

Python sets signal handlers only in the main thread, and Ray runs an asynchronous actor in another thread.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None]

_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_callbacks: list[object] = []
"""Keeps objects alive to which C code has a pointer."""


def handle_in_main_thread(signal_number: int, handler: Handler) -> None:
    """Have the main thread set a signal handler when it next runs Python code.

    If an actor's constructor calls this, the handler is set before the actor's first call.
    """

    def install(_: int | None) -> int:
        signal.signal(signal_number, handler)
        return 0

    call = _CALL(install)
    _callbacks.append(call)
    ctypes.pythonapi.Py_AddPendingCall(call, None)
