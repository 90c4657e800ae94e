"""vLLM's core process: starts it with its imports already made (decision 0044), and joins its messages (decision 0010).

On a CPU the core is forked from the engine's actor, which has imported vLLM. On GPUs vLLM spawns it, and a spawned
process first runs its parent's main module. In a Ray actor that is Ray's own file; ``use_as_main`` puts this module in
its place.

vLLM sends one record per request and iteration, but nobody reads most rollouts' tokens before the rollout ends. The
records of such a request are joined into one, which is sent when the request ends, or after the delay that the request
allows. Invariants: for each request, the front end gets the same tokens, log-probs and experts, in the same order and
under the same weight version; and the core's answer to a call (a pause, a weight update, an abort) is sent after
everything that was in its queue before.
"""

from __future__ import annotations

import gc
import math
import os
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.context import ForkContext, ForkProcess
from operator import attrgetter
from typing import Any

import numpy as np

from asyncrl_cli.core.imports import large_imports
from asyncrl_cli.system.process_tree import die_with

HOLD_S = "asyncrl_hold_s"
"""Key in ``SamplingParams.extra_args``: seconds that a request's tokens may wait to be joined. Streamed requests do not
have it. Nor do requests with stop strings, because vLLM finds these in its front end, and generates until then."""
LONGEST_HOLD_S = 0.2
"""Longest delay. Waiting tokens are lost with a core that is killed, and are then generated again."""
JOINED = frozenset(
    {
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "events",
        "prefill_stats",
        "routed_experts",
        "trace_headers",
        "num_nans_in_logits",
    }
)
"""Fields that a waiting record may have. A record with any other, such as a finish reason, is sent immediately."""


def use_as_main() -> None:
    """Make processes that this process spawns run this module first."""
    sys.modules["__main__"].__spec__ = find_spec(__name__)


def fork_core() -> None:
    """Make vLLM fork its core from this process."""
    import vllm.v1.engine.utils

    join_outputs()
    vllm.v1.engine.utils.get_mp_context = _Forking


class _Core(ForkProcess):
    def run(self) -> None:
        # vllm_worker.py does this when it is imported. Here it was imported before the fork, which loses the setting.
        die_with(os.getppid())
        # The actor's objects must not be freed here: Ray would take locks that another thread held at the fork.
        gc.freeze()
        if "ray" in sys.modules:  # Ray has set this process's title, so vLLM's setproctitle cannot
            from ray._raylet import setproctitle  # type: ignore[attr-defined]  # not in Ray's stub

            setproctitle("VLLM::EngineCore")
        super().run()


class _Forking(ForkContext):
    Process = _Core


def join_outputs() -> None:
    """Send the output of vLLM's core through ``JoinedOutputs``. Imports vLLM's core."""
    from vllm.v1.engine.core import EngineCoreProc

    send = EngineCoreProc.process_output_sockets

    def send_joined(core: Any, *args: Any, **options: Any) -> None:
        # Safe without a lock: this thread is the queue's only reader.
        core.output_queue.get = JoinedOutputs(core.output_queue.get, lambda request_id: hold_s(core, request_id)).get
        send(core, *args, **options)

    EngineCoreProc.process_output_sockets = send_joined


def hold_s(core: Any, request_id: str) -> float:
    """Seconds that a request's tokens may wait; 0 if it does not allow any. For an ended request it does not matter."""
    request = core.scheduler.requests.get(request_id)
    params = request.sampling_params if request is not None else None
    return 0.0 if params is None else float((params.extra_args or {}).get(HOLD_S, 0.0))


class JoinedOutputs:
    """Reads the core's output queue, and joins the records of each request.

    ``read_queue`` is the queue's ``get``. Its entries are bytes, or a client's index with ``EngineCoreOutputs``.
    ``hold_s`` returns the seconds that a request's tokens may wait; 0: its records must not be joined.
    """

    def __init__(self, read_queue: Callable[..., Any], hold_s: Callable[[str], float]) -> None:
        from vllm.v1.engine import EngineCoreOutput

        self._read_queue = read_queue
        self._hold_s = hold_s
        self._ready: deque[Any] = deque()
        self._waiting_records: dict[str, list[Any]] = {}  # records by request
        self._newest_entry: tuple[int, Any] = (0, None)  # the entry with the newest held record
        self._due = math.inf
        self._other_fields = attrgetter(*(name for name in EngineCoreOutput.__struct_fields__ if name not in JOINED))

    def get(self) -> Any:
        """The next entry to send; waits for it."""
        while not self._ready:
            try:
                entry = self._read_queue(
                    timeout=max(self._due - time.monotonic(), 0.0) if self._waiting_records else None
                )
            except queue.Empty:
                self._release()
            else:
                self._take(entry)
                if self._waiting_records and time.monotonic() >= self._due:
                    self._release()
        return self._ready.popleft()

    def _take(self, entry: Any) -> None:
        if isinstance(entry, bytes) or not has_records_alone(entry[1]):
            # It may answer a call, and the caller relies on having all earlier tokens by then.
            self._release()
            self._ready.append(entry)
            return
        client, outputs = entry
        # A message has one weight version: tokens of two versions must not be joined.
        if (client, outputs.weight_version) != (
            self._newest_entry[0],
            getattr(self._newest_entry[1], "weight_version", None),
        ):
            self._release()
        sendable: list[Any] = []
        for record in outputs.outputs:  # no call for each record: this is the cost of every token (decision 0010)
            waiting = self._waiting_records.get(record.request_id)
            for value in self._other_fields(record):
                if value is not None:  # the finish reason "stop" is 0
                    break
            else:
                if waiting is not None:
                    waiting.append(record)
                    continue
                if (hold_s := self._hold_s(record.request_id)) > 0:
                    self._due = min(self._due, time.monotonic() + hold_s)
                    self._waiting_records[record.request_id] = [record]
                    continue
            sendable.append(record if waiting is None else joined([*waiting, record]))
            self._waiting_records.pop(record.request_id, None)
        if self._waiting_records:
            self._newest_entry = entry
        if sendable:
            self._ready.append((client, with_records(outputs, sendable)))

    def _release(self) -> None:
        if self._waiting_records:
            client, outputs = self._newest_entry
            self._ready.append(
                (client, with_records(outputs, [joined(records) for records in self._waiting_records.values()]))
            )
            self._waiting_records = {}
            self._due = math.inf


def has_records_alone(outputs: Any) -> bool:
    """True if a message has only records of requests and their weight version."""
    other_fields = ("scheduler_stats", "utility_output", "finished_requests", "wave_complete", "start_wave")
    return bool(outputs.outputs) and all(getattr(outputs, name) is None for name in other_fields)


def joined(records: list[Any]) -> Any:
    """Join a request's records, in their order, into the last one."""
    newest_record = records[-1]
    if len(records) == 1:
        return newest_record
    newest_record.new_token_ids = [token for record in records for token in record.new_token_ids]
    newest_record.events = [event for record in records for event in record.events or ()] or None
    newest_record.prefill_stats = next(
        (record.prefill_stats for record in records if record.prefill_stats is not None), None
    )
    logprobs = [record.new_logprobs for record in records if record.new_logprobs is not None]
    if logprobs:
        ids, values, ranks, _ = zip(*logprobs, strict=True)
        newest_record.new_logprobs = type(logprobs[0])(_concatenated(ids), _concatenated(values), _concatenated(ranks))
    experts = [record.routed_experts for record in records if record.routed_experts is not None]
    if experts:
        newest_record.routed_experts = np.concatenate(experts)
    return newest_record


def _concatenated(arrays: Sequence[Any]) -> Any:
    """Concatenate arrays of one dtype along the first axis. ``numpy.concatenate`` takes 2.5 times as long for arrays of
    one number."""
    return np.frombuffer(b"".join(arrays), arrays[0].dtype).reshape(-1, *arrays[0].shape[1:])


def with_records(outputs: Any, records: list[Any]) -> Any:
    """Copy a message with other records."""
    from msgspec.structs import replace

    return replace(outputs, outputs=records)


if __name__ == "__mp_main__":
    with large_imports():
        join_outputs()
