"""Keeping secrets out of what is shown and written.

A spec names a secret as ``${env:NAME}``. What is written keeps that reference (``spec.load.dump_spec``); messages,
which may quote a value, go through ``hide``.
"""

from __future__ import annotations

import os
import re

MASK = "***"
SECRET_NAME = re.compile(r"key|token|secret|pass|pw|auth|cred|hook|private", re.IGNORECASE)
"""Environment variables whose values are secrets. Others (paths, model names) are of use in a message."""
SHORTEST = 6
"""Characters; shorter values occur in ordinary words."""
PATTERNS = (
    # user:password@ and token@ in a URI
    (re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s/?#'\"]+@"), rf"\1{MASK}@"),
    # the path of a webhook is its password
    (re.compile(r"(webhook['\"]?\s*[:=]\s*['\"]?https?://[^\s/'\"]+)/[^\s'\"]+"), rf"\1/{MASK}"),
    # tokens of Hugging Face, OpenAI and others, GitHub
    (re.compile(r"\b(hf_|sk-|gh[opsu]_)[\w-]{16,}"), rf"\1{MASK}"),
)

_values: dict[str, str] = {}


def remember(name: str, value: str) -> None:
    """The value of an environment variable that a spec refers to: if it is a secret, ``hide`` knows it from now on."""
    if len(value) >= SHORTEST and SECRET_NAME.search(name) and not os.path.exists(value):  # PWD is no secret
        _values[value] = f"${{env:{name}}}"


def hide(text: str) -> str:
    """The text without passwords in URIs, without tokens, and with references in place of secrets from the
    environment."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, _values[value])
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return text
