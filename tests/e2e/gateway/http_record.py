"""A proxy server that records the HTTP exchanges between a program and the gateway.

Neither the program nor its requests are changed. ``reply_of`` reads the gateway's answer in any of the three APIs;
``conversation_of`` reads the request.

The module is copied into the folder of a run's spec and imported by the run's processes, so it imports no other module
of the tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp import web

BODY_BYTES = 2**26
PER_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
"""Headers that belong to one connection."""
LIMITS = ("context_length_exceeded", "max_calls_exceeded", "max_sampled_tokens_exceeded")
"""Error codes that a program must expect: limits of the task and of the model."""


@dataclass
class Exchange:
    """A request and its answer: the text of both. ``complete``: the program read the answer to its end."""

    method: str
    path: str
    asked: str
    status: int = 0
    answer: str = ""
    complete: bool = False

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """The proxy between programs and the gateway: one for all sessions of a process."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[str, list[Exchange]]] = {}
        self._port = 0

    async def start(self) -> None:
        """Listen on a free port of the loopback interface until the process ends."""
        self._http = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_route("*", "/{rest:.*}", self._forward)
        server = web.AppRunner(app, handler_cancellation=True)
        await server.setup()
        site = web.TCPSite(server, "127.0.0.1", 0)
        await site.start()
        self._port = server.addresses[0][1]

    @asynccontextmanager
    async def session(self, base_url: str):  # type: ignore[no-untyped-def]
        """Another base URL for the same session, and its exchanges, in the order of the requests."""
        url = urlsplit(base_url)
        _, _, name = url.path.removesuffix("/v1").rpartition("/")
        exchanges: list[Exchange] = []
        name = unquote(name)
        self._records[name] = (f"{url.scheme}://{url.netloc}", exchanges)
        try:
            yield f"http://127.0.0.1:{self._port}{url.path}", exchanges
        finally:
            del self._records[name]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.split("/")
        gateway, exchanges = self._records[parts[2] if len(parts) > 2 else ""]
        body = await request.read()
        exchange = Exchange(request.method, request.path, body.decode(errors="replace"))
        exchanges.append(exchange)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in PER_HOP}
        async with self._http.request(
            request.method, gateway + request.path_qs, data=body, headers=headers, allow_redirects=False
        ) as answered:
            exchange.status = answered.status
            kept = {name: value for name, value in answered.headers.items() if name.lower() not in PER_HOP}
            answer = web.StreamResponse(status=answered.status, headers=kept)
            with suppress(ConnectionResetError):  # a program may close the connection
                await answer.prepare(request)
                async for piece in answered.content.iter_any():
                    exchange.answer += piece.decode(errors="replace")
                    await answer.write(piece)
                await answer.write_eof()
                exchange.complete = True
            return answer


@dataclass(frozen=True)
class Reply:
    """The gateway's answer to one call. ``text`` is the text of the reply, ``calls`` are the names and arguments of
    tools; ``usage`` are the token counts of prompt and reply, None if the program did not ask for them."""

    text: str
    calls: tuple[tuple[str, str], ...]
    usage: tuple[int, int] | None


def is_call(exchange: Exchange) -> bool:
    """Whether it requests a reply of the model."""
    return exchange.method == "POST" and exchange.path.endswith(("/chat/completions", "/responses", "/messages"))


def limit_of(exchange: Exchange) -> str | None:
    """The limit because of which a request was refused."""
    if exchange.status != 400:
        return None
    return next((code for code in LIMITS if code in exchange.answer), None)


def reply_of(exchange: Exchange) -> Reply:
    """Read the answer of a call that succeeded. Raises ``ValueError`` or ``KeyError`` if it is invalid."""
    streamed = exchange.answer.lstrip().startswith(("event:", "data:"))
    if exchange.path.endswith("/chat/completions"):
        return _of_chat(_chunks(exchange.answer) if streamed else [json.loads(exchange.answer)])
    if exchange.path.endswith("/responses"):
        return _of_response(_last_response(exchange.answer) if streamed else json.loads(exchange.answer))
    return _of_message(_message(exchange.answer) if streamed else json.loads(exchange.answer))


def conversation_of(exchange: Exchange) -> list[Any]:
    """The tools, and the items of the conversation in order, without cache markers."""
    asked = json.loads(exchange.asked)
    head = [asked.get("tools"), asked.get("system"), asked.get("instructions")]
    return [_unmarked(item) for item in [head, *(asked.get("messages") or asked.get("input") or ())]]


def _unmarked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unmarked(inner) for key, inner in value.items() if key != "cache_control"}
    return [_unmarked(inner) for inner in value] if isinstance(value, list) else value


def _chunks(answer: str) -> list[Any]:
    lines = (line.removeprefix("data:").strip() for line in answer.splitlines() if line.startswith("data:"))
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    for event in events:
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            raise ValueError(f"an error in the stream: {json.dumps(event)[:500]}")
    return events


def _of_chat(parts: Sequence[Mapping[str, Any]]) -> Reply:
    text, calls = "", {}
    for part in (choice.get("message") or choice["delta"] for chunk in parts for choice in chunk["choices"]):
        text += part.get("content") or ""
        for position, call in enumerate(part.get("tool_calls") or ()):
            name, arguments = calls.get(index := call.get("index", position), ("", ""))
            function = call["function"]
            calls[index] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
    usage = next((part["usage"] for part in parts if part.get("usage")), None)
    counts = None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])
    return Reply(text, tuple(calls.values()), counts)


def _last_response(answer: str) -> Any:
    ends = ("response.completed", "response.incomplete")
    (response,) = (event["response"] for event in _chunks(answer) if event["type"] in ends)
    return response


def _of_response(response: Mapping[str, Any]) -> Reply:
    items = response["output"]
    texts = (part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = ((item["name"], item["arguments"]) for item in items if item["type"] == "function_call")
    usage = response["usage"]
    return Reply("".join(texts), tuple(calls), (usage["input_tokens"], usage["output_tokens"]))


def _message(answer: str) -> Any:
    message: dict[str, Any] = {}
    for event in _chunks(answer):
        if event["type"] == "message_start":
            message = {**event["message"], "content": []}
        elif event["type"] == "content_block_start":
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
        elif event["type"] == "message_delta":
            message["usage"] = {**message["usage"], **{k: v for k, v in event["usage"].items() if v is not None}}
    return message


def _of_message(message: Mapping[str, Any]) -> Reply:
    blocks = message["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    uses = (block for block in blocks if block["type"] == "tool_use")
    calls = tuple((use["name"], use.get("json") or json.dumps(use["input"])) for use in uses)
    return Reply(text, calls, (message["usage"]["input_tokens"], message["usage"]["output_tokens"]))
