"""Runs jobs in order on a thread. The caller does not wait for them."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from threading import Event, Thread

log = logging.getLogger(__name__)


class Background:
    """Runs jobs one after another on a daemon thread. Jobs handle their own errors; an unexpected one is logged.

    Invariant: ``submit`` neither waits nor raises. If the queue already has ``limit`` jobs, the new job is dropped.
    """

    def __init__(self, name: str, limit: int = 1000) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(limit)
        self._closed = False
        Thread(target=self._run_jobs, name=name, daemon=True).start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Run ``job`` after the earlier jobs. False if the queue is full or closed; then ``job`` is dropped."""
        if self._closed:
            return False
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return False
        return True

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for the jobs submitted so far; True if all are done."""
        deadline = time.monotonic() + timeout_s
        earlier_jobs_ended = Event()
        try:
            self._queue.put(earlier_jobs_ended.set, timeout=timeout_s)
        except queue.Full:
            return False
        return earlier_jobs_ended.wait(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float) -> bool:
        """Refuse further jobs, and ``wait``."""
        self._closed = True
        all_ended = self.wait(timeout_s)
        if all_ended:
            self._queue.put(None)
        return all_ended

    def _run_jobs(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("unexpected error")
