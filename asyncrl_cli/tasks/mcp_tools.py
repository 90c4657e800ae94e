"""Tools of MCP servers (Model Context Protocol), through the official package ``mcp``.

The tools are listed at the start. An episode connects to a server when it first calls one of its tools, and disconnects
at its end; so each episode has its own process of a stdio server. Results go to the policy as text and images, a tool's
errors as text. A call that takes too long is such an error, because the policy may have caused it, and an episode that
fails is played again. If a server is lost, so is its state: the episode fails with the cause.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from asyncrl_cli.core.errors import TaskError, first_cause
from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.data.images import checked_image
from asyncrl_cli.spec.inputs import McpServerSpec
from asyncrl_cli.system.reaper import MARK
from asyncrl_cli.tasks.play import SEES_IMAGES, awaited

CLOSE_S = 4.0
"""Seconds to disconnect from all servers; less than an episode has to clean up (``GRACE_S``)."""
CLOSED = -32000
"""MCP's error code for a closed connection."""
TIMED_OUT = -32001
"""The package's error code for a call that takes too long."""

Content = str | list[dict[str, Any]]
"""A tool's result: text, or the parts of a message."""


class ServerLost(Exception):
    """A server cannot be reached, or closed its connection."""


class ToolError(Exception):
    """A tool reported an error."""


class McpServers:
    """A task's MCP servers and their tools."""

    def __init__(self, specs: Mapping[str, McpServerSpec], folder: Path, location: str) -> None:
        """List the tools of each server. ``folder``: working folder of the servers' programs.

        Raises ``TaskError`` below ``location`` if a server cannot be used, or if two tools have the same name.
        """
        self.specs, self._folder, self._location = specs, folder.resolve(), location
        self.definitions: dict[str, tuple[str, dict[str, Any]]] = {}
        """Each tool's server and OpenAI definition, by the tool's name."""
        for server in specs:
            for tool in self._allowed_tools(server):
                other_server, _ = self.definitions.get(tool.name, ("", {}))
                if other_server or not re.fullmatch(r"[\w-]{1,64}", tool.name):
                    problem = (
                        f"is also a tool of {other_server!r}" if other_server else "has a name that a model cannot call"
                    )
                    problem, hint = f"the tool {tool.name!r} {problem}", "exclude it: set allowed_tools"
                    raise TaskError(problem, location=f"{location}.{server}", hint=hint)
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                self.definitions[tool.name] = server, {"type": "function", "function": function}

    def _allowed_tools(self, server: str) -> list[Any]:
        async def listed(printed: TextIO) -> dict[str, Any]:
            async with asyncio.timeout(self.specs[server].timeout_s), self.connected(server, printed) as client:
                page = await client.list_tools()
                tools = list(page.tools)
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
                return {tool.name: tool for tool in tools}

        key = f"{self._location}.{server}"
        with tempfile.TemporaryFile("w+", errors="replace") as printed, ThreadPoolExecutor(1) as thread:
            try:  # in a thread, because this one may have an event loop
                tools = thread.submit(lambda: asyncio.run(listed(printed))).result()
            except Exception as error:
                printed.seek(0)
                last_line = " ".join(printed.read().splitlines()[-1:])
                timed_out = isinstance(first_cause(error), TimeoutError)
                lost = f"the MCP server {server!r} did not list its tools within {self.specs[server].timeout_s:g} s"
                problem = (lost if timed_out else str(_lost(server, error))) + (
                    f"; it printed: {last_line:.200}" if last_line else ""
                )
                hint = "correct its command or url, or start it"
                hint = "pip install 'asyncrl[mcp]'" if isinstance(error, ImportError) else hint
                raise TaskError(problem, location=key, hint=hint) from error
        allowed_names = self.specs[server].allowed_tools or list(tools)
        for name in set(allowed_names) - tools.keys():
            hint = did_you_mean(name, tools, f"it has {', '.join(tools)}")
            raise TaskError(f"{server} has no tool {name!r}", location=f"{key}.allowed_tools", hint=hint)
        return [tools[name] for name in allowed_names]

    @asynccontextmanager
    async def connected(self, server: str, printed: TextIO) -> AsyncIterator[Any]:
        """Connect a client to a server; a program's standard error goes to ``printed``."""
        import httpx2
        from mcp.client import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        spec = self.specs[server]
        async with AsyncExitStack() as stack:
            if spec.url is not None:
                timeout = httpx2.Timeout(spec.timeout_s, read=None)  # streams may be silent; each call has a limit
                http = await stack.enter_async_context(httpx2.AsyncClient(headers=spec.headers, timeout=timeout))
                transport = streamable_http_client(spec.url, http_client=http)
            else:
                env = spec.env | {MARK: os.environ.get(MARK, "")}  # the reaper finds processes by this mark
                program = StdioServerParameters(command=spec.command, args=spec.args, env=env, cwd=self._folder)
                transport = stdio_client(program, errlog=printed)
            yield await stack.enter_async_context(Client(transport, read_timeout_seconds=spec.timeout_s))


@dataclass(frozen=True)
class McpTool:
    """A tool in one episode, for ``ToolEnvironment``; ``definition`` is in OpenAI's format."""

    session: McpSession
    server: str
    name: str
    definition: dict[str, Any]

    def __call__(self, arguments: str) -> Content:
        """Call the tool; returns text, and images for a model that sees them.

        Raises ``ValueError`` if the arguments are no JSON object or an image is broken, ``ToolError`` and
        ``ServerLost``.
        """
        values = json.loads(arguments or "{}")
        if not isinstance(values, dict):
            raise ValueError("the arguments are not a JSON object")
        result = awaited(self.session.call(self.server, self.name, values))
        texts = [item.text if item.type == "text" else f"[{item.type}]" for item in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        if result.is_error:
            raise ToolError("\n".join(texts))
        if not SEES_IMAGES.get() or not any(item.type == "image" for item in result.content):
            return "\n".join(texts)
        message_parts: list[dict[str, Any]] = []
        for item, text in zip(result.content, texts, strict=True):
            if item.type == "image":
                message_parts.append({"type": "image", "image": checked_image(base64.b64decode(item.data))})
            elif message_parts and message_parts[-1]["type"] == "text":
                message_parts[-1]["text"] += f"\n{text}"
            else:
                message_parts.append({"type": "text", "text": text})
        return message_parts


class McpSession:
    """One episode's connections. Each has a task of asyncio, because anyio must close a scope in the task that opened
    it."""

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers
        self._clients: dict[str, asyncio.Future[Any]] = {}
        self._holders: list[asyncio.Task[None]] = []
        self._episode_end = asyncio.Event()
        self.tools = {
            name: McpTool(self, server, name, definition) for name, (server, definition) in servers.definitions.items()
        }

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool. Raises ``ToolError`` if the server refuses the call, and ``ServerLost``."""
        from mcp.shared.exceptions import MCPError

        if server not in self._clients:
            self._clients[server] = asyncio.get_running_loop().create_future()
            self._holders.append(asyncio.create_task(self._hold(server, self._clients[server])))
        limit_s = self._servers.specs[server].timeout_s
        try:
            async with asyncio.timeout(limit_s):
                client = await asyncio.shield(self._clients[server])
            return await client.call_tool(tool, arguments, read_timeout_seconds=limit_s)
        except MCPError as error:
            if error.code == TIMED_OUT:
                message = f"the tool {tool!r} of the MCP server {server!r} did not answer within {limit_s:g} s"
                raise ToolError(message) from error
            raise _lost(server, error) if error.code == CLOSED else ToolError(error.message) from error
        except TimeoutError as error:
            raise ServerLost(f"the MCP server {server!r} did not accept a connection within {limit_s:g} s") from error
        except Exception as error:
            raise _lost(server, error) from error

    async def _hold(self, server: str, connected: asyncio.Future[Any]) -> None:
        try:
            async with self._servers.connected(server, sys.stderr) as client:
                connected.set_result(client)
                await self._episode_end.wait()
        except Exception as error:
            if not connected.done():
                connected.set_exception(error)

    async def close(self) -> None:
        """Disconnect within ``CLOSE_S``."""
        self._episode_end.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*self._holders, return_exceptions=True)


def _lost(server: str, error: BaseException) -> ServerLost:
    error = first_cause(error)  # anyio raises exception groups
    return ServerLost(f"the MCP server {server!r} cannot be used: {type(error).__name__}: {error}")
