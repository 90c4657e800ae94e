"""Where the content of a reply that calls tools may end, by the name of its tool parser.

``LAYOUTS[name]`` has every text at which that parser may stop to read content: what begins a call, and marks that it
drops. What stands before the first of them is the beginning of the content, whatever follows, except for spaces right
before it. So it can be sent while the reply is generated. The replies of a format that is not here come at their end.
"""

from __future__ import annotations

HERMES = "hermes"

_QWEN3 = ("<tool_call>", "<function=", "</think>")
_GLM = ("<tool_call>", "<think>", "</think>")
_LLAMA = ("<|python_tag|>", "{")
_DEEPSEEK_V3 = ("<｜tool▁calls▁begin｜>",)

LAYOUTS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V3,
    "deepseek_v32": ("<｜DSML｜function_calls>", "<｜DSML｜invoke name="),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": ("<|tool_call|>", "<tool_call>"),
    "granite-20b-fc": ("<function_call>",),
    HERMES: ("<tool_call>",),
    "jamba": ("<tool_calls>",),
    "kimi_k2": ("<|tool_calls_section_begin|>", "</think>"),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "longcat": ("<longcat_tool_call>",),
    "mimo": _QWEN3,
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</think>"),
    "mistral": ("[TOOL_CALLS]", "[THINK]", "[/THINK]", "<think>", "</think>"),
    "phi4_mini_json": ("functools",),
    "qwen3_coder": _QWEN3,
    "qwen3_json": ("<tool_call>",),
    "qwen3_xml": _QWEN3,
    "seed_oss": ("<seed:tool_call>", "<function=", "</seed:think>"),
    "step3": ("<｜tool_calls_begin｜>",),
}
