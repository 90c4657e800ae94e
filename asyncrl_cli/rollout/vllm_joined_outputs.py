"""Fewer messages from vLLM's core process to its front end (decision 0079). Runs in the core process.

vLLM sends every token in a separate record: one per request and iteration, which the core encodes, and the front end
decodes and handles. The tokens of most rollouts are not read before they end. Here the records of such a request
are joined into one, which is sent when the request ends, or after the seconds that it allows.

Invariants:

* for each request, the front end gets the same tokens, log-probs and experts, in the same order and under the same
  weight version;
* whatever the core has put into its queue before the answer to a call (a pause, the begin of a weight update, an abort)
  is sent before that answer.
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
"""Key in ``SamplingParams.extra_args`` of requests with records that may be joined: the seconds that a token may wait.
Streamed requests do not have it, nor requests with stop strings: vLLM finds these in its front end, and generates until
then."""
LONGEST_HOLD_S = 0.2
"""Seconds that tokens wait at most. Those that wait are lost with a core that is killed, and are generated again."""
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
"""The fields that a waiting record may have; a record with another, such as the end's reason, is sent immediately."""


def join_outputs() -> None:
    """Have vLLM's core send what ``JoinedOutputs`` gives."""
    from vllm.v1.engine.core import EngineCoreProc

    send = EngineCoreProc.process_output_sockets

    def send_joined(core: Any, *args: Any, **named: Any) -> None:
        # The thread that runs this is the only reader of the queue.
        core.output_queue.get = JoinedOutputs(core.output_queue.get, lambda request_id: hold_s(core, request_id)).get
        send(core, *args, **named)

    EngineCoreProc.process_output_sockets = send_joined


def hold_s(core: Any, request_id: str) -> float:
    """Seconds that a request's tokens may wait; 0 without its permission. Of one that has ended it does not matter."""
    request = core.scheduler.requests.get(request_id)
    params = request.sampling_params if request is not None else None
    return 0.0 if params is None else float((params.extra_args or {}).get(HOLD_S, 0.0))


class JoinedOutputs:
    """Reads the core's output queue, and joins the records of a request.

    ``read`` is the ``get`` of that queue: its entries are bytes, or a client's index with ``EngineCoreOutputs``.
    ``hold_s`` returns the seconds that a request's tokens may wait, 0 where its records must not be joined.
    """

    def __init__(self, read: Callable[..., Any], hold_s: Callable[[str], float]) -> None:
        self._read = read
        self._hold_s = hold_s
        self._ready: deque[Any] = deque()
        self._held: dict[str, list[Any]] = {}  # records by request
        self._message: tuple[int, Any] = (0, None)  # the entry of the newest of them
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
            # It may be an answer that says that all tokens before it have been sent.
            self._release()
            self._ready.append(entry)
            return
        client, outputs = entry
        # A message has one weight version, and the tokens of two versions stay apart.
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
        """Send everything that waits."""
        if self._held:
            client, outputs = self._message
            self._ready.append((client, with_records(outputs, [joined(records) for records in self._held.values()])))
            self._held = {}
            self._due = math.inf


def has_records_alone(outputs: Any) -> bool:
    """Whether a message has requests' records with their weight version, and nothing else."""
    others = ("scheduler_stats", "utility_output", "finished_requests", "wave_complete", "start_wave")
    return bool(outputs.outputs) and all(getattr(outputs, name) is None for name in others)


def can_wait(record: Any) -> bool:
    """Whether a record is of a request that has not ended, and has only what can be joined."""
    # Not by their truth: the reason "stop" is false.
    return all(name in JOINED or getattr(record, name) is None for name in record.__struct_fields__)


def joined(records: list[Any]) -> Any:
    """One record of a request for several, in their order: the last one, with the tokens of all."""
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
    """The message with these records instead."""
    from msgspec.structs import replace

    return replace(outputs, outputs=records)
