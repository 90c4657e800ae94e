"""Signal handlers that the main thread sets for another thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from asyncrl_cli.system.main_thread import handle_in_main_thread


@pytest.fixture
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_set_from_another_thread_runs_in_the_main_thread(restored: None) -> None:
    threads: list[threading.Thread] = []

    def note(*_: object) -> None:
        threads.append(threading.current_thread())

    other = threading.Thread(target=handle_in_main_thread, args=(signal.SIGUSR1, note))
    other.start()
    other.join()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert threads == [threading.main_thread()]
