"""Fewer messages from vLLM's core process to its front end (decision 0010). Runs in the core process.

vLLM sends one record per request and iteration, which the core encodes and the front end decodes and handles. But
nobody reads most rollouts' tokens before the rollout ends. The records of such a request are joined into one, which is
sent when the request ends, or after the delay that the request allows.

Invariants:

* for each request, the front end gets the same tokens, log-probs and experts, in the same order and under the same
  weight version;
* everything that the core put into its queue before it answered a call (a pause, the start of a weight update, an
  abort) is sent before that answer.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

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


def join_outputs() -> None:
    """Send the output of vLLM's core through ``JoinedOutputs``."""
    from vllm.v1.engine.core import EngineCoreProc

    send = EngineCoreProc.process_output_sockets

    def send_joined(core: Any, *args: Any, **named: Any) -> None:
        # Safe without a lock: this thread is the queue's only reader.
        core.output_queue.get = JoinedOutputs(core.output_queue.get, lambda request_id: hold_s(core, request_id)).get
        send(core, *args, **named)

    EngineCoreProc.process_output_sockets = send_joined


def hold_s(core: Any, request_id: str) -> float:
    """Seconds that a request's tokens may wait; 0 if it does not allow any. For an ended request it does not matter."""
    request = core.scheduler.requests.get(request_id)
    params = request.sampling_params if request is not None else None
    return 0.0 if params is None else float((params.extra_args or {}).get(HOLD_S, 0.0))


class JoinedOutputs:
    """Reads the core's output queue, and joins the records of each request.

    ``read`` is the queue's ``get``. Its entries are bytes, or a client's index with ``EngineCoreOutputs``. ``hold_s``
    returns the seconds that a request's tokens may wait; 0: its records must not be joined.
    """

    def __init__(self, read: Callable[..., Any], hold_s: Callable[[str], float]) -> None:
        self._read = read
        self._hold_s = hold_s
        self._ready: deque[Any] = deque()
        self._held: dict[str, list[Any]] = {}  # records by request
        self._message: tuple[int, Any] = (0, None)  # the entry with the newest held record
        self._due = math.inf

    def get(self) -> Any:
        """The next entry to send; waits for it."""
        while not self._ready:
            try:
                entry = self._read(timeout=max(self._due - time.monotonic(), 0.0) if self._held else None)
            except queue.Empty:
                self._release()
            else:
                self._take(entry)
                if self._held and time.monotonic() >= self._due:
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
        if (client, outputs.weight_version) != (self._message[0], getattr(self._message[1], "weight_version", None)):
            self._release()
        now: list[Any] = []
        for record in outputs.outputs:
            held = self._held.get(record.request_id)
            if can_wait(record) and (held is not None or (hold_s := self._hold_s(record.request_id)) > 0):
                if held is None:
                    self._due = min(self._due, time.monotonic() + hold_s)
                    held = self._held[record.request_id] = []
                held.append(record)
                self._message = entry
            else:
                now.append(joined([*self._held.pop(record.request_id, ()), record]))
        if now:
            self._ready.append((client, with_records(outputs, now)))

    def _release(self) -> None:
        if self._held:
            client, outputs = self._message
            self._ready.append((client, with_records(outputs, [joined(records) for records in self._held.values()])))
            self._held = {}
            self._due = math.inf


def has_records_alone(outputs: Any) -> bool:
    """True if a message has only records of requests and their weight version."""
    others = ("scheduler_stats", "utility_output", "finished_requests", "wave_complete", "start_wave")
    return bool(outputs.outputs) and all(getattr(outputs, name) is None for name in others)


def can_wait(record: Any) -> bool:
    """True if the record's request has not ended and all fields of the record can be joined."""
    # Compared with None, because the finish reason "stop" is 0.
    return all(name in JOINED or getattr(record, name) is None for name in record.__struct_fields__)


def joined(records: list[Any]) -> Any:
    """Join a request's records, in their order, into the last one."""
    last = records[-1]
    if len(records) == 1:
        return last
    last.new_token_ids = [token for record in records for token in record.new_token_ids]
    last.events = [event for record in records for event in record.events or ()] or None
    last.prefill_stats = next((record.prefill_stats for record in records if record.prefill_stats is not None), None)
    logprobs = [record.new_logprobs for record in records if record.new_logprobs is not None]
    if logprobs:
        ids, values, ranks = (np.concatenate([part[field] for part in logprobs]) for field in range(3))
        last.new_logprobs = type(logprobs[0])(ids, values, ranks)
    experts = [record.routed_experts for record in records if record.routed_experts is not None]
    if experts:
        last.routed_experts = np.concatenate(experts)
    return last


def with_records(outputs: Any, records: list[Any]) -> Any:
    """Copy a message with other records."""
    from msgspec.structs import replace

    return replace(outputs, outputs=records)
