"""Grammars of requests that continue (decision 0074). Runs in vLLM's core process.

vLLM begins a request's grammar at the end of its prompt. The prompt of a request that continues ends with the reply's
first tokens, which another engine sampled under the same grammar: here it begins in the state after them.
"""

from __future__ import annotations

from typing import Any

PREFIX_TOKENS = "asyncrl_prefix_tokens"
"""Key in ``SamplingParams.extra_args``: how many of a prompt's last tokens belong to the reply."""


def continue_grammars() -> None:
    """Have vLLM advance each new grammar over the tokens that its request has already."""
    from vllm.v1.structured_output import StructuredOutputManager

    create = StructuredOutputManager._create_grammar

    def created(manager: Any, request: Any) -> Any:
        grammar = create(manager, request)
        prefix = prefix_of(manager, request)
        # vLLM fails the request with this error, as it does where a grammar cannot be compiled.
        if not grammar.accept_tokens(request.request_id, prefix):
            raise ValueError("the tokens that a request continues from do not fit its grammar")
        return grammar

    StructuredOutputManager._create_grammar = created


def prefix_of(manager: Any, request: Any) -> list[int]:
    """The tokens at a prompt's end that belong to the reply, without its reasoning, for which no grammar holds."""
    count = (request.sampling_params.extra_args or {}).get(PREFIX_TOKENS, 0)
    tokens = request.prompt_token_ids
    before, prefix = tokens[: len(tokens) - count], tokens[len(tokens) - count :]
    reasoner = manager._get_reasoner(request)
    if reasoner is None or manager.enable_in_reasoning or reasoner.is_reasoning_end(before):
        return list(prefix)
    return list(reasoner.extract_content_ids(prefix))
