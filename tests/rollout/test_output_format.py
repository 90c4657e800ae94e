"""What vLLM gets of an output format, how an engine refuses one, and grammars that continue."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.records.generation import OutputFormat, RolloutRequest, Sampling, Segment
from asyncrl_cli.rollout import core_main
from asyncrl_cli.rollout.output_format import (
    MOST_REASON,
    RequestRefused,
    format_arguments,
    hidden_tokens,
    raise_if_uncompiled,
    reason_of,
    refusals,
)
from asyncrl_cli.rollout.vllm_grammars import PREFIX_TOKENS, continue_grammars, prefix_of
from asyncrl_cli.train.model.tokenizer import character_tokenizer


def request(asked: OutputFormat | None, generated: int = 0) -> RolloutRequest:
    arrays = np.zeros(generated, np.int32), np.zeros(generated, np.float32)
    prefix = (Segment("serve-0/0", 0, 0, *arrays),) if generated else ()
    return RolloutRequest("serve-0/0", (5, 6), Sampling(1.0, 50, output_format=asked), prefix)


REGEX = OutputFormat("regex", "a+", "guided_regex")


def test_reasons_are_in_one_line_with_their_cause_and_without_places_in_xgrammar() -> None:
    error = ValueError("Failed to transform regex: [10:11:12] /project/cpp/a.cc:83: Regex parsing error\n   at 4")
    assert reason_of(error) == "Failed to transform regex: Regex parsing error at 4"
    error = ValueError("Invalid grammar specification.")
    error.__cause__ = RuntimeError("[10:11:12] /project/cpp/b.cc:820: no rule")
    assert reason_of(error) == "Invalid grammar specification: no rule"
    error.__cause__ = RuntimeError("x" * 10_000)
    assert len(reason_of(error)) == MOST_REASON + 1


def test_hidden_tokens_are_the_special_ones_that_end_nothing() -> None:
    tokenizer = character_tokenizer(64)
    pad, eos, unk = (tokenizer.convert_tokens_to_ids(name) for name in ("<pad>", "<eos>", "<unk>"))
    assert hidden_tokens(tokenizer, {eos}) == tuple(sorted((pad, unk)))
    assert hidden_tokens(tokenizer, {eos, unk}) == (pad,)


def test_a_request_that_the_engine_could_not_compile_is_refused_before_its_first_token_alone() -> None:
    failed: Any = SimpleNamespace(finish_reason="error", token_ids=[])
    with pytest.raises(RequestRefused, match="cannot compile"):
        raise_if_uncompiled(request(REGEX), failed)
    raise_if_uncompiled(request(None), failed)
    raise_if_uncompiled(request(REGEX, generated=3), failed)
    raise_if_uncompiled(request(REGEX), SimpleNamespace(finish_reason="error", token_ids=[1]))  # type: ignore[arg-type]
    raise_if_uncompiled(request(REGEX), SimpleNamespace(finish_reason="stop", token_ids=[]))  # type: ignore[arg-type]


def test_the_prefix_is_what_the_grammar_holds_for() -> None:
    class Reasoner:
        def is_reasoning_end(self, ids: list[int]) -> bool:
            return 9 in ids

        def extract_content_ids(self, ids: list[int]) -> list[int]:
            return ids[ids.index(9) + 1 :] if 9 in ids else []

    def prefix(ids: list[int], count: int | None, reasoner: Any = None, inside: bool = False) -> list[int]:
        extra = None if count is None else {PREFIX_TOKENS: count}
        asked = SimpleNamespace(prompt_token_ids=ids, sampling_params=SimpleNamespace(extra_args=extra))
        return prefix_of(SimpleNamespace(_get_reasoner=lambda _: reasoner, enable_in_reasoning=inside), asked)

    assert prefix([1, 2, 3], None) == prefix([1, 2, 3], 0) == []
    assert prefix([1, 2, 3], 2) == [2, 3]
    assert prefix([1, 2, 3], 2, Reasoner()) == []
    assert prefix([1, 2, 9, 3], 3, Reasoner()) == [3]
    assert prefix([1, 9, 2, 3], 2, Reasoner()) == [2, 3]
    assert prefix([1, 2, 9, 3], 3, Reasoner(), inside=True) == [2, 9, 3]


@pytest.mark.stack
def test_the_arguments_that_vllm_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert format_arguments(request(None), (0,)) == {}
    for kind, source in (("json", "{}"), ("regex", "a+"), ("choice", '["a"]'), ("grammar", 'root ::= "a"')):
        arguments = format_arguments(request(OutputFormat(kind, source, "x")), (0, 2))  # type: ignore[arg-type]
        expected = json.loads(source) if kind == "choice" else source
        assert getattr(arguments["structured_outputs"], kind) == expected
        assert (arguments["extra_args"], arguments["logit_bias"]) == ({PREFIX_TOKENS: 0}, {0: -100.0, 2: -100.0})
    with pytest.raises(RuntimeError, match="cannot continue"):
        format_arguments(request(REGEX, generated=3), ())
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", sys.modules["__main__"].__spec__)
    core_main.use_as_main()
    assert format_arguments(request(REGEX, generated=3), ())["extra_args"] == {PREFIX_TOKENS: 3}


@pytest.mark.stack
def test_only_what_vllm_finds_wrong_with_a_format_is_a_refusal() -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(RequestRefused, match="no such thing") as refused, refusals(request(REGEX)):
        raise VLLMValidationError("no such thing")
    assert refused.value.key == "guided_regex"
    with pytest.raises(VLLMValidationError), refusals(request(None)):
        raise VLLMValidationError("no such thing")
    with pytest.raises(KeyError), refusals(request(REGEX)):
        raise KeyError("a bug")


@pytest.mark.stack
def test_a_grammar_that_continues_allows_what_it_would_have_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's own manager and xgrammar's grammars, without a model."""
    import torch
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
    from vllm.v1.structured_output.request import StructuredOutputRequest

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", StructuredOutputManager._create_grammar)
    continue_grammars()
    tokenizer = character_tokenizer(64)
    settings = SimpleNamespace(disable_any_whitespace=False)
    config: Any = SimpleNamespace(structured_outputs_config=settings, model_config=None, speculative_config=None)
    manager = object.__new__(StructuredOutputManager)
    manager.backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=len(tokenizer))
    manager.reasoner_cls, manager.enable_in_reasoning = None, False

    def allowed(prefix: list[int]) -> Any:
        asked = StructuredOutputsParams(regex="(ab|ac[d-f]{2})+!")
        params = SamplingParams(structured_outputs=asked, extra_args={PREFIX_TOKENS: len(prefix)})
        made: Any = SimpleNamespace(
            request_id="a",
            prompt_token_ids=[*tokenizer.encode("any prompt"), *prefix],
            sampling_params=params,
            structured_output_request=StructuredOutputRequest.from_sampling_params(params),
        )
        grammar = manager._create_grammar(made)
        mask = manager.backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(mask, 0)
        return grammar, mask

    ids = tokenizer.encode("abacdfab!")
    whole, _ = allowed([])
    masks = set()
    for count in range(len(ids)):
        mask = manager.backend.allocate_token_bitmask(1)
        whole.fill_bitmask(mask, 0)
        assert torch.equal(allowed(ids[:count])[1], mask)
        masks.add(tuple(mask[0].tolist()))
        assert whole.accept_tokens("a", [ids[count]])
    assert len(masks) > 3
    with pytest.raises(ValueError, match="do not fit its grammar"):
        allowed(tokenizer.encode("abx"))
