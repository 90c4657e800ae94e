"""A tokenizer with one token for each character, made in code: no hub is needed.

Invariant: ``decode(encode(text)) == text`` for every text of printable ASCII and newlines. Nothing is
merged, added, normalised or cleaned up; a character outside that set becomes ``<unk>``. The special tokens
come first: the ids of characters do not move when a special token is renamed.

``load_tokenizer`` is the only way to a run's tokenizer: it applies ``model.chat_template``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.train.model.image_models import VISION_TOKENS, VisionTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that have a token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}[{{ message['content'] }}]{% else %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": '
    "{% set arguments = call.function.arguments %}{{ arguments if arguments is string else arguments | tojson }}"
    "}</tool_call>{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}"
)
"""Messages follow each other unchanged; an assistant's ends with the end token, as when it was generated.

A tool's result is in brackets, and tool calls have the hermes form, as vLLM and gateway/parsers.py read them. The
rendering of a conversation begins with its beginning's rendering.
"""

CONTENT_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] or [] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)


def image_template(mark: str) -> str:
    """``CHAT_TEMPLATE`` for messages that may have images, each written as ``mark``."""
    parts = CONTENT_PARTS.replace("IMAGE", mark)
    return CHAT_TEMPLATE.replace("{{ message['content'] }}", parts).replace("{{ message['content'] or '' }}", parts)


def character_tokenizer(max_length: int, images: VisionTokens | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of 99 tokens: ``<pad>``, ``<eos>``, ``<unk>``, newline and printable ASCII; tokens of ``images``
    follow."""
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
        chat_template=CHAT_TEMPLATE if images is None else image_template(images.mark),
        **({} if images is None else {"extra_special_tokens": dict(images.names)}),
    )


def load_tokenizer(folder: str | Path, chat_template: str | None) -> Any:
    """The tokenizer of a model's folder or hub id; ``chat_template``: the spec's ``model.chat_template``, if any.

    Raises ``ConfigError``, and what transformers raises where there is no tokenizer.
    """
    from transformers import AutoTokenizer

    return with_chat_template(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), chat_template)


def with_chat_template(tokenizer: Any, chat_template: str | None) -> Any:
    """The tokenizer, its template replaced by the file ``chat_template``. Raises ``ConfigError``."""
    from jinja2 import TemplateSyntaxError

    from asyncrl_cli.data.chat_template import syntax_tree

    if chat_template is None:
        return tokenizer
    try:
        tokenizer.chat_template = Path(chat_template).read_text()
        syntax_tree(tokenizer.chat_template)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        # The hint is not in the class: an actor's error is pickled, and made again from its message alone.
        raise ConfigError(
            f"{chat_template} is not a chat template: {line}{error}",
            location="model.chat_template",
            hint="give a file with a Jinja template, or leave it out to use the tokenizer's own",
        ) from error
    return tokenizer


def templates_texts(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template that writes more than a user's text; ``CHAT_TEMPLATE`` does not."""
    plain = {CHAT_TEMPLATE, *(image_template(tokens.mark) for tokens in VISION_TOKENS.values())}
    return tokenizer.chat_template is not None and tokenizer.chat_template not in plain


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars, which would run through a live view, off while it loads or saves."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
