"""A tokenizer with one token for each character, made in code: no hub is needed.

Invariant: ``decode(encode(text)) == text`` for every text of printable ASCII and newlines. Nothing is
merged, added, normalised or cleaned up; a character outside that set becomes ``<unk>``. The special tokens
come first, so that the ids of characters do not move when a special token is renamed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that have a token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Messages stand one behind the other; an assistant's ends with the end token, as when it was generated."""


def character_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of 99 tokens: ``<pad>``, ``<eos>``, ``<unk>``, newline and printable ASCII."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNK, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="right",
        chat_template=CHAT_TEMPLATE,
    )
