"""Engines without a trainer: the limit of the wait for an engine."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.serving import while_engines_serve
from tests.orchestrator.stand_ins import client_over


def test_an_evaluation_ends_when_no_engine_serves_and_not_while_one_does() -> None:
    async def test() -> None:
        client = client_over(2)
        client.engines[0].serving = False
        watching = asyncio.ensure_future(while_engines_serve(client, 0.2, lambda: "engine-1 waits for room"))
        assert not (await asyncio.wait({watching}, timeout=0.6))[0], "the other one serves"
        client.engines[1].serving = False
        with pytest.raises(RunError, match="no engine has served for 0 s: engine-1 waits for room") as error:
            await watching
        assert "pipeline.stall_minutes" in error.value.hint

    asyncio.run(test())
