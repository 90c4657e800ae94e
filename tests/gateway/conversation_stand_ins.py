"""A model with replies from a hash, a byte-level tokenizer, and a reader of the segments that sessions report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from asyncrl_cli.data.tokenizer import character_tokenizer
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.gateway.parsers import Tools
from asyncrl_cli.gateway.session import CallOptions, OnPart, Reply, Session
from asyncrl_cli.gateway.transcript import OnSegments
from asyncrl_cli.records.generation import Rollout, RolloutRequest, Segment, TokenSequence
from asyncrl_cli.records.prompt import Message
from asyncrl_cli.records.token_prefix import TokenPrefix
from asyncrl_cli.rollout.continuation import split_by_version

CALC: dict[str, Any] = {
    "type": "function",
    "function": {"name": "calc", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}

CHATML = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "# Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.last and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ message.content }}"
    '{%- for call in message.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", '
    "\"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if quiet %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""Like Qwen3's: tools in the system turn, results of tools together in a user's turn, a last reply that is rendered
differently from earlier ones, and a variable."""


@cache
def byte_tokenizer() -> Any:
    """A token for every byte and for some pairs, and ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("a", "b"), ("Ġ", "t"), ("Ã", "©"), ("1", "+"), ("ab", "c")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    backend = Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHATML,
    )


@cache
def byte_chat() -> ChatFormat:
    return ChatFormat(byte_tokenizer())


@cache
def character_chat() -> ChatFormat:
    return ChatFormat(character_tokenizer(4096))


def end_of(chat: ChatFormat) -> int:
    """The one end token of these models."""
    (end,) = chat.end_tokens
    return end


async def inline(work: Callable[[], Any]) -> Any:
    return work()


async def ask_chat(
    session: Session,
    messages: Sequence[Message],
    tools: Tools | None,
    options: CallOptions,
    on_part: OnPart | None = None,
    **more: Any,
) -> list[Reply]:
    """``more``: the variables of the template, and whether the reply continues the last message."""
    return await session.answer([await session.render_chat(messages, tools, inline, **more)], options, on_part)


async def ask_text(
    session: Session, prompt: str | Sequence[int], options: CallOptions, on_part: OnPart | None = None
) -> list[Reply]:
    rendered = session.render_text(prompt, inline) if isinstance(prompt, str) else session.render_ids(prompt)
    return await session.answer([await rendered], options, on_part)


@dataclass
class HashModel:
    """The tokens and the end of a reply are determined by a hash of the prompt and the seed; it often has a tool call.

    Tokens come in several deliveries, the last ones with the complete reply. Log-probs and versions depend on a token's
    index in its sequence, so versions never decrease. ``requests`` has every request with its reply; ``sampled``
    has the positions (prompt, seed, index) of all tokens that were sampled, not reused.
    """

    chat: ChatFormat
    requests: list[tuple[RolloutRequest, Rollout]] = field(default_factory=list)
    sampled: list[tuple[tuple[int, ...], int | None, int]] = field(default_factory=list)

    async def generate(self, request: RolloutRequest, on_segments: OnSegments | None = None) -> Rollout:
        before, sampling = TokenSequence.join(request.prefix), request.sampling
        rng = random.Random(str((request.prompt_ids, sampling.seed)))
        ids = self.chat.encode(f'<tool_call>{{"name": "calc", "arguments": {{"e": "{rng.random()}é"}}}}</tool_call>')
        if rng.random() < 0.5:
            # Not at a tokenizer's boundaries: pieces may end within a character.
            ids = [rng.randrange(self.chat.vocabulary - 3) for _ in range(rng.randint(0, 12))]
        ids = [*ids, end_of(self.chat)][: sampling.max_tokens]
        done = len(before.ids)
        assert ids[:done] == before.ids.tolist()
        assert done < len(ids), "a request for no tokens"
        versions = [(len(request.prompt_ids) + index) // 10 for index in range(len(ids))]
        versions[:done] = before.versions.tolist()
        logprobs = np.asarray([-0.25 * (index % 9) for index in range(len(ids))], np.float32)
        starts = [(v, i) for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]

        def segments(start: int, end: int) -> list[Segment]:
            return split_by_version(request.rollout_id, start, ids[start:end], logprobs[start:end], starts)

        reported = done
        while reported < len(ids) and rng.random() < 0.7:
            await asyncio.sleep(0)
            upto = rng.randint(reported + 1, len(ids))
            self.sampled += [(request.prompt_ids, sampling.seed, index) for index in range(reported, upto)]
            if on_segments is not None:
                on_segments(segments(reported, upto))
            reported = upto
        await asyncio.sleep(0)
        self.sampled += [(request.prompt_ids, sampling.seed, index) for index in range(reported, len(ids))]
        rollout = Rollout(
            rollout_id=request.rollout_id,
            prompt_ids=request.prompt_ids,
            ids=np.asarray(ids, np.int32),
            logprobs=logprobs,
            versions=np.asarray(versions, np.int32),
            text="",
            finish_reason="stop" if ids[-1] in self.chat.end_tokens else "length",
        )
        self.requests.append((request, rollout))
        return rollout


@dataclass
class Record:
    """Stores segments as the journal does."""

    sequences: dict[str, TokenPrefix] = field(default_factory=dict)

    def add(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            prefix = self.sequences.setdefault(segment.rollout_id, TokenPrefix())
            assert segment.start <= prefix.end, "a gap"
            prefix.add(segment)

    def recorded(self) -> Mapping[int, tuple[Segment, ...]]:
        return {int(name.partition(".")[2] or 0): tuple(prefix.segments) for name, prefix in self.sequences.items()}


def rollout_of(session: Session) -> Rollout:
    rollout = session.rollout()
    assert rollout is not None
    return rollout


def tokens_of(rollout: Rollout) -> Iterator[tuple[str, list[int], list[float], list[int]]]:
    """Each sequence of a rollout, for comparison."""
    for one in rollout.sequences:
        yield one.rollout_id, one.ids.tolist(), one.logprobs.tolist(), one.versions.tolist()


def sampled_runs(rollout: Rollout) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each run of sampled tokens in a rollout's sequences, with all tokens before it."""
    for sequence in rollout.sequences:
        ids, edges = sequence.ids.tolist(), np.flatnonzero(np.diff(sequence.sampled, prepend=False, append=False))
        for start, end in edges.reshape(-1, 2).tolist():
            yield tuple(ids[:start]), tuple(ids[start:end])
