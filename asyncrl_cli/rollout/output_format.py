"""Passes output formats to vLLM, and recognizes when vLLM refuses one (decision 0074).

A request that continues has its first tokens at the end of its prompt, and its grammar begins in the state after them.
Their count is sent along here, for ``vllm_grammars`` in vLLM's core process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asyncrl_cli.records.generation import RolloutRequest
from asyncrl_cli.rollout import core_main
from asyncrl_cli.rollout.response_text import special_tokens
from asyncrl_cli.rollout.vllm_grammars import PREFIX_TOKENS

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

NEVER = -100.0
"""vLLM's lowest logit bias (nats)."""
ORIGIN = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
"""Time and place in the source that xgrammar's errors begin with."""
MOST_REASON = 500
"""Characters of a reason: xgrammar repeats all of a grammar that it cannot parse."""


class RequestRefused(Exception):
    """No engine can generate a request. ``key`` is the part of it that is wrong; the text says why."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


def hidden_tokens(tokenizer: Any, ends: Collection[int]) -> tuple[int, ...]:
    """The special tokens that do not end a reply. The reply's text does not show them, but xgrammar takes them for the
    text of their names."""
    return tuple(sorted(special_tokens(tokenizer).difference(ends)))


def format_arguments(request: RolloutRequest, hidden: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of vLLM's ``SamplingParams`` for a request's output format; none without one."""
    asked = request.sampling.output_format
    if asked is None:
        return {}
    from vllm.sampling_params import StructuredOutputsParams

    if request.generated and not core_main.in_use():
        raise RuntimeError("this engine's core cannot continue a request that has an output format")
    value: Any = json.loads(asked.source) if asked.kind == "choice" else asked.source
    return {
        "structured_outputs": StructuredOutputsParams(**{asked.kind: value}),
        "extra_args": {PREFIX_TOKENS: request.generated},
        "logit_bias": dict.fromkeys(hidden, NEVER),
    }


@contextmanager
def refusals(request: RolloutRequest) -> Iterator[None]:
    """Raise ``RequestRefused`` where vLLM refuses a request's output format, which it does before it generates."""
    from vllm.exceptions import VLLMValidationError

    asked = request.sampling.output_format
    try:
        yield
    except VLLMValidationError as error:
        if asked is None:
            raise
        raise RequestRefused(asked.key, reason_of(error)) from error


def raise_if_uncompiled(request: RolloutRequest, output: CompletionOutput) -> None:
    """Raise ``RequestRefused`` where vLLM accepted a format, and then could not compile it: it fails such a request
    before its first token, and gives the reason in its log alone."""
    asked = request.sampling.output_format
    if asked is not None and output.finish_reason == "error" and not output.token_ids and not request.prefix:
        raise RequestRefused(asked.key, "the engine cannot compile it; a simpler one may do")


def reason_of(error: BaseException) -> str:
    """The text of vLLM's error, in one line, with that of its cause where it leaves that out."""
    text = str(error)
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text = f"{text.rstrip('.')}: {cause}"
    text = " ".join(ORIGIN.sub("", text).split())
    return text if len(text) <= MOST_REASON else f"{text[:MOST_REASON]}…"
