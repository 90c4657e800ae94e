"""The report as one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SMALL = "On CPUs everything is small and short: this says that the parts work, and not how fast or how well they learn."
TITLES = {
    "environment": "Environment",
    "doctor": "`asyncrl doctor`",
    "numerics": "Numerics and the output head",
    "repeats": "Repeated passes",
    "quickstart": "Quickstart in bfloat16",
    "exactness": "Staleness 0 against `sync`, float32",
    "publish": "Publishing weights",
    "trainer": "The trainer's speed",
    "engine": "The engines' speed",
    "ratio": "`async` against `sync`",
    "resume": "Kill and resume",
    "memory": "Memory against the estimate",
    "model": "Your own model",
}


def page(report: Mapping[str, Any]) -> str:
    """A summary of all parts, then a section for each, with complete error messages."""
    gpus = ", ".join(report["gpus"]) or "no GPU"
    parts: Mapping[str, Mapping[str, Any]] = report["parts"]
    passed = sum(bool(part["ok"]) for part in parts.values())
    lines = [
        f"# asyncrl on {gpus}",
        "",
        f"Device `{report['device']}`. {passed} of {len(parts)} parts passed. `report.json` has the same figures.",
        *([SMALL] if report["device"] == "cpu" else []),
        "",
        "| part | result | seconds |",
        "|-|-|-|",
        *(
            f"| {TITLES[name]} | {'ok' if part['ok'] else 'FAILED'} | {part['seconds']:g} |"
            for name, part in parts.items()
        ),
    ]
    for name, part in parts.items():
        lines += ["", f"## {TITLES[name]}", "", *_section(part)]
    return "\n".join(lines) + "\n"


def _section(part: Mapping[str, Any]) -> Iterator[str]:
    if not part["ok"]:
        yield from ("```", part["error"], "", part["traceback"].rstrip(), "```")
        return
    for name, value in part["figures"].items():
        if isinstance(value, Mapping):
            yield f"- {name}: " + ", ".join(f"{key} {_text(one)}" for key, one in value.items())
        elif isinstance(value, list) and value and isinstance(value[0], str):
            yield from (f"- {name}:", "", "```", *value, "```", "")
        else:
            yield f"- {name}: {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)
