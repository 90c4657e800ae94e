"""Keeps secrets out of all output and files.

A spec refers to a secret as ``${env:NAME}``. Written files keep this reference (``spec.load.dump_spec``). Messages may
quote a value, so they pass through ``hide``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SECRET_PART = re.compile(
    r"keys?|pw|auth|authorization|creds?|credentials?|hooks?|private|passphrase|cookies?"
    r"|\w*(?:token|secret|secrets|password|passwords|passwd|pwd|webhook|(?:access|ai|api|ssh)keys?)"
    r"|\w*(?<!by)(?<!com)pass",
    re.IGNORECASE,
)
"""Words in the names of variables and settings that hold secrets. They match API_KEY, but not MONKEY or TOKENIZER.
TOKENS is not one of them, because most settings with this word are numbers of tokens."""
PLAIN_VALUE = re.compile(r"[-+]?[\d_]{1,12}(\.\d*)?(e[-+]?\d{1,3})?|true|false|null", re.IGNORECASE)
"""Numbers and switches, which are not secrets."""
MIN_LENGTH = 6
"""Smallest length of a secret in characters; shorter values occur in ordinary words."""
PATTERNS = (
    # user:password@ and token@ in a URI; only the scheme's last letter, or a long word would be searched quadratically
    (re.compile(r"(\w://)[^\s/?#'\"]+@"), rf"\1{MASK}@"),
    # the path of a webhook is its password
    (re.compile(r"(webhook['\"]?\s*[:=]\s*['\"]?https?://[^\s/'\"]+)/[^\s'\"]+"), rf"\1/{MASK}"),
    (re.compile(r"(\bhttps://hooks\.slack\.com/(?:services|workflows|triggers)/)[^\s'\"]+"), rf"\1{MASK}"),
    (re.compile(r"(\bhttps://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/)[^\s'\"]+"), rf"\1{MASK}"),
    # tokens of Hugging Face, OpenAI and others, GitHub, GitLab, Slack, AWS
    (re.compile(r"\b(hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|xapp-)[\w-]{16,}"), rf"\1{MASK}"),
    (re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"), rf"\1{MASK}"),
    # in a query, and in a header
    (re.compile(r"([?&](?:[\w-]*(?:token|key|secret|password|signature)|sig|auth)=)[^\s&#'\"]+", re.I), rf"\1{MASK}"),
    (re.compile(r"(\bBearer\s+)[\w.~+/=-]{16,}", re.IGNORECASE), rf"\1{MASK}"),
)
OPTION = re.compile(r"(?<![\w-])(?:--?[A-Za-z][\w-]*(?:=|[ \t]+)|[A-Z][A-Z0-9_]*=)")
"""The name of an option or variable in a command. Lower-case names without dashes are prose, or keywords of code."""
OPTION_VALUE = re.compile(r"""(?!['"]?[$*-])(?:'[^'\n]+'|"[^"\n]+"|[^\s'"`]+)""")
"""The value of an option, but no reference, mask or further option."""

_values: dict[str, str] = {}


def remember(name: str, value: str) -> None:
    """Have ``hide`` mask the value of an environment variable that a spec refers to, if it is a secret."""
    # The path check excludes PWD.
    if len(value) >= MIN_LENGTH and is_secret(name) and not PLAIN_VALUE.fullmatch(value) and not os.path.exists(value):
        _values[value] = f"${{env:{name}}}"


def hide(text: str) -> str:
    """Mask tokens and passwords in URIs, and replace secrets from the environment by their references."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, _values[value])
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return _hide_options(text)


def _hide_options(text: str) -> str:
    """Mask ``--password value``, ``--password=value`` and ``PASSWORD=value``."""
    masked_texts, copied_to = [], 0
    for option in OPTION.finditer(text):
        if option.start() < copied_to or not is_secret(option[0]):
            continue
        value = OPTION_VALUE.match(text, option.end())
        if value and len(value[0]) >= MIN_LENGTH and not PLAIN_VALUE.fullmatch(value[0]):
            masked_texts += [text[copied_to : option.end()], MASK]
            copied_to = value.end()
    return "".join([*masked_texts, text[copied_to:]])


def is_secret(name: str) -> bool:
    """True if a variable or setting with this name holds a secret. Other values (paths, model names) stay readable."""
    return any(SECRET_PART.fullmatch(word) for word in NAME_PART.findall(name))


def hide_settings(value: Any, name: str = "") -> Any:
    """Mask settings under keys that name a secret, and ``hide`` the others. Keep references to the environment."""
    if isinstance(value, Mapping):
        return {key: hide_settings(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [
            hide_settings(item, _item_name(name, previous, item))
            for previous, item in zip(["", *value], value, strict=False)
        ]
    if not isinstance(value, str):
        return value
    masked = hide(f"{name}: {value}").removeprefix(f"{name}: ")  # with the name: a webhook keeps its host
    if not is_secret(name) or masked != value or PLAIN_VALUE.fullmatch(value) or value.startswith(("${env:", "env:")):
        return masked
    return MASK if value else value


def _item_name(list_name: str, previous: Any, item: Any) -> str:
    """The name of a list's item: in a list of arguments, an option such as ``--token`` names the next item."""
    is_option = isinstance(previous, str) and OPTION.fullmatch(f"{previous}=") and is_secret(previous)
    return previous if is_option and previous.startswith("-") and not str(item).startswith("-") else list_name


def hide_argument(argument: str) -> str:
    """A command-line argument without secrets; the value of ``key=value`` is treated as in ``hide_settings``."""
    import yaml

    name, equals, text = argument.partition("=")
    try:
        value = yaml.safe_load(text)
        masked = hide_settings(value, name.rpartition(".")[2])
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date such as 2024-13-45
        return name + equals + MASK if is_secret(name.rpartition(".")[2]) else hide(argument)
    if masked == value:
        return hide(argument)
    masked_text = (
        masked if isinstance(masked, str) else yaml.safe_dump(masked, default_flow_style=True, width=10**6).strip()
    )
    return hide(name) + equals + masked_text
