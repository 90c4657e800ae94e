"""The OpenAPI document is correct: schemathesis tests everything in it with valid and invalid requests."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from gateway_stand_ins import KEY, in_time, served

NOT_IN_A_SCHEMA = "positive_data_acceptance"
"""An excluded check: requests that match the schema may still be refused, because a schema cannot state how many tokens
a prompt may have, or which model exists."""


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.nightly)])
def test_schemathesis_finds_no_fault(tmp_path: Path, examples: int) -> None:
    async def test() -> None:
        async with served(max_body_mb=1) as there:
            there.session("0")  # one of the ids that schemathesis tries
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{there.gateway.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {KEY}"),
                *("--exclude-checks", NOT_IN_A_SCHEMA),
                *("--max-examples", str(examples), "--request-timeout", "60", "--seed", "0", "--no-color"),
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await process.communicate()
            assert process.returncode == 0, output.decode()
            assert b"16 selected / 16 total" in output, output.decode()
            assert (await there.http.get("/health")).status_code == 200

    in_time(test, seconds=550)


def test_the_document_names_what_clients_need() -> None:
    async def test() -> None:
        async with served() as there:
            document = (await there.http.get("/openapi.json", headers={"authorization": ""})).json()
            for prefix in ("/v1", "/sessions/{session_id}/v1"):
                operation = document["paths"][f"{prefix}/chat/completions"]["post"]
                assert operation["security"] == [{"HTTPBearer": []}, {"APIKeyHeader": []}]
                assert {"200", "400", "401", "404", "410", "413", "503"} <= operation["responses"].keys()
                assert "422" not in operation["responses"]
                assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
            assert "security" not in document["paths"]["/health"]["get"]
            schemas = document["components"]["schemas"]
            assert {"messages", "tools", "max_completion_tokens", "return_token_ids"} <= schemas["ChatRequest"][
                "properties"
            ].keys()
            assert "HTTPValidationError" not in schemas

    in_time(test)
