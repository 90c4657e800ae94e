"""Any change to a real client's request is answered in its API's format, and never with an internal error."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.gateway_stand_ins import key_of, served
from tests.gateway.test_golden import FILES

REQUESTS = [
    (re.sub(r"/sessions/[^/]+", "/sessions/0", path), body)
    for file in FILES
    for exchange in json.loads(file.read_text())["exchanges"]
    for method, path, body in [exchange["request"]]
    if method == "POST" and body and "embeddings" not in path
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=6,
)
Post = Callable[[str, str], httpx.Response]


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    """Send a body to a path of a running gateway."""
    with asyncio.Runner() as runner:
        serving = served()
        there = runner.run(serving.__aenter__())
        there.session("0")

        def send(path: str, body: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key_of('0')}"}
            return runner.run(there.http.post(path, content=body, headers=headers))

        yield send
        runner.run(serving.__aexit__(None, None, None))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Containers and keys of all values within a JSON value."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from places(child)


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_changed_request_gets_an_answer_or_an_error_in_the_apis_format(post: Post, data: st.DataObject) -> None:
    path, body = deepcopy(data.draw(st.sampled_from(REQUESTS), label="request"))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(list(places(body))), label="place")
        change = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
        if change == "remove":
            del container[key]
        elif change == "repeat" and isinstance(container, list):
            container.append(deepcopy(container[key]))
        else:
            container[key] = data.draw(JSON, label="value")
        if not body:
            break
    answer = post(path, json.dumps(body))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error"), answer.text
