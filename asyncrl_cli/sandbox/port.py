"""The port inside a sandbox that leads to the gateway, seen from inside.

A socket that listens is handed to the worker, which accepts its connections. Without gVisor this is the port itself.
gVisor hands no sockets out: there it is a Unix socket outside of gVisor, and a thread of the supervisor copies bytes
between the port and that.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from asyncrl_cli.sandbox.wire import packed

BACKLOG = 128
LISTENING = b"listening"
MOST_CONNECTIONS = 100
"""Connections that are copied at a time; others wait."""
PIECE = 2**16
STACK = 2**18


def listen(port: int) -> socket.socket:
    """A socket that listens at a port of 127.0.0.1."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(BACKLOG)
    return listening


def hand_over(control: socket.socket, listening: socket.socket) -> None:
    """Give a socket that listens to the worker."""
    socket.send_fds(control, [packed([LISTENING])], [listening.fileno()])
    listening.close()


def copy_to(path: str, listening: socket.socket) -> None:
    """From now on, in threads, copy bytes between connections and a Unix socket."""
    threading.stack_size(STACK)
    threading.Thread(target=_accept, args=(path, listening), daemon=True).start()


def _accept(path: str, listening: socket.socket) -> None:
    free = threading.BoundedSemaphore(MOST_CONNECTIONS)
    while True:
        free.acquire()
        near, _ = listening.accept()
        threading.Thread(target=_connected, args=(path, near, free), daemon=True).start()


def _connected(path: str, near: socket.socket, free: threading.BoundedSemaphore) -> None:
    try:
        with near, socket.socket(socket.AF_UNIX) as far, suppress(OSError):
            far.connect(path)
            back = threading.Thread(target=_copy, args=(far, near), daemon=True)
            back.start()
            _copy(near, far)
            back.join()
    finally:
        free.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(PIECE):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one of them has ended; so do both
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
