"""A run's tokenizer (``load_tokenizer``, which applies ``model.chat_template``), and a tokenizer made in code.

The made tokenizer has one token per character, and needs no hub. Invariant: ``decode(encode(text)) == text`` for every
text of printable ASCII and newlines. Nothing is merged, added, normalised or cleaned up; any other character becomes
``<unk>``. Special tokens come first, so characters keep their ids when a special token is renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.files import LFS_HINT, POINTER, read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


TEMPLATE_BYTES = 2**20
"""Larger files of chat templates are refused."""
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The characters with a token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}[{{ message['content'] }}]{% else %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": '
    "{% set arguments = call.function.arguments %}{{ arguments if arguments is string else arguments | tojson }}"
    "}</tool_call>{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}"
)
"""Messages follow each other unchanged. An assistant message ends with the end token, as it was generated.

A tool's result is in brackets, and tool calls have the hermes form, which vLLM and gateway/parsers.py read. A longer
conversation's rendering begins with the shorter one's.
"""


def character_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer of 99 tokens: ``<pad>``, ``<eos>``, ``<unk>``, newline and printable ASCII."""
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


def load_tokenizer(folder: str | Path, chat_template: str | None) -> Any:
    """Load the tokenizer of a model's folder or hub id; ``chat_template``: the spec's ``model.chat_template``.

    Raises ``ConfigError``, and the error of transformers if there is no tokenizer.
    """
    from transformers import AutoTokenizer

    return with_chat_template(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), chat_template)


def with_chat_template(tokenizer: Any, chat_template: str | None) -> Any:
    """Give the tokenizer one template: the file ``chat_template``, or its own. Raises ``ConfigError``."""
    from jinja2 import TemplateSyntaxError

    from asyncrl_cli.data.chat_template import syntax_tree

    if chat_template is None:
        if isinstance(templates := tokenizer.chat_template, dict):
            if "default" not in templates:
                fault = f"the tokenizer has several chat templates ({', '.join(templates)}), and none named `default`"
                raise ConfigError(fault, location="model.chat_template", hint="save one to a file, and name the file")
            tokenizer.chat_template = templates["default"]
        return tokenizer
    try:
        template = read_regular(chat_template, TEMPLATE_BYTES)
        if template.startswith(POINTER):
            raise ConfigError(f"{chat_template} is a Git LFS pointer", location="model.chat_template", hint=LFS_HINT)
        tokenizer.chat_template = template.decode()
        syntax_tree(tokenizer.chat_template)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        # No error class with a fixed hint: an actor's error is pickled, and made again from its message alone.
        raise ConfigError(
            f"{chat_template} is not a chat template: {line}{error}",
            location="model.chat_template",
            hint="give a file with a Jinja template, or leave it out to use the tokenizer's own",
        ) from error
    return tokenizer


def templates_texts(tokenizer: Any) -> bool:
    """True if the tokenizer has a chat template other than ``CHAT_TEMPLATE``, which adds nothing to a user's text."""
    return tokenizer.chat_template not in (None, CHAT_TEMPLATE)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars inside the block: they would disturb a live view."""
    from transformers.utils import logging

    were_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_enabled:
            logging.enable_progress_bar()
