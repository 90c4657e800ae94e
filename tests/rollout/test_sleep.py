"""An engine that releases its GPU memory: calls that must wait, and calls that continue afterwards."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.rollout import engine as engine_module
from asyncrl_cli.rollout.engine import Engine
from tests.orchestrator.stand_ins import request, spec, turns

IMPORTS_VLLM = pytest.mark.slow
"""Tests that import vLLM for the classes of its requests, which takes seconds."""
SPEC = spec()
TOKENIZER = SimpleNamespace(decode=lambda *_, **__: "", eos_token_id=1, all_special_ids=[1], added_tokens_decoder={})


class Vllm:
    """A stand-in for vLLM's engine that can sleep. Calls that would use its memory are refused while it sleeps."""

    def __init__(self) -> None:
        self.asleep = False
        self.calls: list[str] = []
        self.engine_core = self
        self.output_processor = SimpleNamespace(request_states={})
        self.held = asyncio.Event()
        self.held.set()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level} {mode}")
        self.asleep = True

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append("wake_up")
        self.asleep = False
        return True

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.touch("pause")

    async def abort(self, request_ids: list[str]) -> None:
        assert request_ids == []

    async def resume_scheduler_async(self) -> None:
        self.touch("resume")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[bool]:
        # With a GPU: none of these calls uses its memory; weights are mapped and pinned in host memory.
        assert method in ("sample_by_position", "prepare_weights", "weights_prepared")
        return [True]

    async def start_weight_update(self) -> None:
        self.touch("start")

    async def update_weights(self, request: Any) -> None:
        self.touch("update")

    async def finish_weight_update(self, version: str) -> None:
        self.touch("finish")

    async def generate(self, prompt: Any, params: Any, **options: Any) -> Any:
        self.touch(f"generate under {prompt['cache_salt']}")
        await self.held.wait()
        span = SimpleNamespace(start=0, end=1, version="3")
        output = SimpleNamespace(
            token_ids=[5],
            finish_reason="stop",
            weight_versions=[span],
            logprobs=SimpleNamespace(logprobs=[-1.0]),
            routed_experts=None,
        )
        yield SimpleNamespace(outputs=[output], num_cached_tokens=0, metrics=None)

    def touch(self, call: str) -> None:
        assert not self.asleep, f"{call} while its memory belongs to others"
        self.calls.append(call)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    vllm = Vllm()
    monkeypatch.setattr(engine_module, "start_vllm", lambda *_, **__: vllm)
    monkeypatch.setattr(engine_module, "end_tokens", lambda *_: frozenset({1}))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: TOKENIZER)
    return vllm


@IMPORTS_VLLM
async def test_requests_and_aborts_wait_until_the_engine_is_awake(vllm: Vllm) -> None:
    engine = Engine(SPEC, "")
    await engine.serve_own(3)
    await engine.wake_up()  # requests of an engine that is awake
    await engine.sleep()
    rollout = asyncio.ensure_future(engine.generate(request("1-0")))
    abort = asyncio.ensure_future(engine.abort())
    await turns(20)
    assert vllm.calls == ["version 3", "sleep 1 keep"], "running requests are kept, and nothing else happens"
    abort.cancel()
    await engine.wake_up()
    assert (await rollout).ids.tolist() == [5]
    assert vllm.calls[2:] == ["wake_up", "generate under 3"]


@IMPORTS_VLLM
async def test_weights_are_loaded_after_the_sleep(vllm: Vllm) -> None:
    engine = Engine(SPEC, "")
    await engine.sleep()
    engine._layout = ()
    update = asyncio.ensure_future(engine.update_weights(4, "/memory", (), "keep"))
    await turns(20)
    assert not update.done()
    await engine.wake_up()
    assert engine._loading, "it has no weights yet, so no request may start"
    await update
    assert vllm.calls == ["sleep 1 keep", "wake_up", "pause", "start", "update", "finish", "resume"]


@IMPORTS_VLLM
async def test_drain_waits_for_requests_that_vllm_has_interrupted(vllm: Vllm) -> None:
    """vLLM's own mode "wait" ends while such a request is in its queue."""
    engine = Engine(SPEC, "")
    await engine.serve_own(3)
    engine._layout = ()
    vllm.held.clear()
    rollout = asyncio.ensure_future(engine.generate(request("3-0")))
    await turns(20)
    update = asyncio.ensure_future(engine.update_weights(4, "/memory", (), "drain"))
    await turns(20)
    assert "pause" not in vllm.calls
    vllm.held.set()
    await update
    assert (await rollout).ids.tolist() == [5]


@IMPORTS_VLLM
@pytest.mark.parametrize("dies", [False, True])
async def test_the_core_is_asked_again_after_a_worker_signal_or_when_none_comes(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Each question would wait for a step of the core. A dead worker sends no signal, so the wait has a limit."""
    listeners: list[bytes] = []
    questions: list[bool] = []

    async def collective_rpc(method: str, args: tuple[Any, ...] = ()) -> list[bool]:
        if method == "prepare_weights":
            listeners.append(args[2])
        elif method == "weights_prepared":
            questions.append(len(questions) > 0)
            if dies and questions[-1]:
                raise RuntimeError("EngineCore encountered an issue")
            if not dies:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                    sender.sendto(b"\0", listeners[0])
            return questions[-1:]
        return [True]

    monkeypatch.setattr(vllm, "collective_rpc", collective_rpc)
    monkeypatch.setattr(engine_module, "PREPARED_CHECK_S", 0.01 if dies else 1e9)
    engine = Engine(SPEC, "")
    engine._layout = ()
    with pytest.raises(RuntimeError, match="encountered an issue") if dies else nullcontext():
        await engine.update_weights(4, "/", (), "keep")
    assert questions == [False, True]
    assert ("pause" in vllm.calls) is not dies


@IMPORTS_VLLM
async def test_an_engine_that_cannot_fall_asleep_is_not_left_locked(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(level: int, mode: str) -> None:
        raise RuntimeError("Memory usage increased after sleeping.")

    engine = Engine(SPEC, "")
    await engine.serve_own(3)
    monkeypatch.setattr(vllm, "sleep", refuses)
    with pytest.raises(RuntimeError, match="after sleeping"):
        await engine.sleep()
    await engine.abort()  # it needs the lock that the sleep had acquired
    assert (await engine.generate(request("1-0"))).ids.tolist() == [5]
