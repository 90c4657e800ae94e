"""An MCP server for tests: over standard input and output, or with a port over HTTP."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import CallToolResult, ImageContent, TextContent

server = MCPServer("tests")
calls = itertools.count(1)
DOT = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC")
"""A PNG file of one red pixel."""


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Count the calls of this process."""
    return str(next(calls))


@server.tool()
def surroundings() -> str:
    """Show the folder, and two variables."""
    return f"{Path.cwd().name} {os.environ.get('GIVEN')} {os.environ.get('NOT_GIVEN')} {os.getpid()}"


@server.tool()
def token(context: Context) -> str:
    """Show the request's token."""
    return str((context.headers or {}).get("authorization"))


@server.tool()
def picture() -> CallToolResult:
    """Draw."""
    image = ImageContent(type="image", data=base64.b64encode(DOT).decode(), mime_type="image/png")
    return CallToolResult(content=[TextContent(type="text", text="a"), TextContent(type="text", text="dot"), image])


@server.tool()
def broken_picture() -> CallToolResult:
    """Draw badly."""
    return CallToolResult(content=[ImageContent(type="image", data="AAAA", mime_type="image/png")])


@server.tool()
async def slow() -> str:
    """Never answer."""
    await asyncio.sleep(600)
    return ""


@server.tool()
def end() -> str:
    """End the process."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
