"""Agents, commands and environments during real training: what is recorded, and the effect of faulty ones."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from asyncrl_cli.inspect.decoding import open_decoder
from asyncrl_cli.journal.queries import RolloutRecord
from asyncrl_cli.records.generation import CONTEXT, Segment
from asyncrl_cli.runs.directory import RunDirectory
from tests.e2e.conftest import Runs, mark_of, processes_of, rows, steps_of, until
from tests.e2e.faults.parts import processes_of_part
from tests.e2e.journal import groups_of, sequences_of
from tests.e2e.test_data import MIXTRAL
from tests.sandbox.kinds import NEEDS_BUBBLEWRAP
from tests.small_models import UNTRAINED

pytestmark = pytest.mark.stack

SLEEP_S = str(10_000 + os.getpid())
"""Seconds that processes of a bad agent sleep; other suites' processes have another number."""
PLAYERS = """
    import asyncio, json, os, subprocess, sys, time

    import aiohttp

    async def ask(model, messages):
        key = {"Authorization": "Bearer " + model.api_key}
        async with aiohttp.ClientSession() as http:
            body = {"model": model.model, "messages": messages}
            async with http.post(model.base_url + "/chat/completions", json=body, headers=key) as answer:
                assert answer.status == 200, await answer.text()
                return (await answer.json())["choices"][0]["message"]

    async def agent(row, model, turns=2):
        messages = [{"role": "user", "content": row["prompt"]}]
        for turn in range(turns):
            messages += [await ask(model, messages), {"role": "user", "content": f"turn {turn}>"}]
        return len(messages[-2]["content"] or "") / 20

    async def with_sandbox(row, model, sandbox):
        from asyncrl_cli.tasks.base import RewardResult

        await agent(row, model)
        await sandbox.write_file("row.json", json.dumps(row).encode())
        result = await sandbox.run("wc -l < row.json; cat row.json")
        assert json.loads(result.output.split(chr(10), 1)[1])["uid"] == row["uid"]
        return RewardResult(0.5, {"lines": float(result.output.split()[0])})

    class Echo:
        def __init__(self, prompt):
            self.prompt, self.turn = prompt["prompt"], 0

        def reset(self):
            return [{"role": "user", "content": self.prompt}]

        def step(self, reply):
            from asyncrl_cli.tasks.base import Step

            self.turn += 1
            again = [{"role": "user", "content": f"turn {self.turn}>"}]
            return Step(again, 0.5, self.turn == 2, {"turns": 1.0})

    async def bad(row, model):
        kind = row["kind"]
        if kind == "never returns":
            await asyncio.sleep(600)
        if kind == "floods":
            await asyncio.gather(*(ask(model, [{"role": "user", "content": f"{n}>"}]) for n in range(40)))
        if kind == "prints":
            print("x" * 20_000_000)
        if kind == "leaves children":
            line = "setsid sleep SLEEP_S > /dev/null 2>&1 & setsid sleep SLEEP_S > /dev/null 2>&1 &"
            subprocess.run(line, shell=True, env={})
        if kind == "ends its process":
            os._exit(5)
        return await agent(row, model)

    async def patient(row, model):
        return await agent(row, model, turns=4)
"""
COMMAND = """
import json, os, urllib.request
row = json.loads(os.environ["ASYNCRL_PROMPT"])
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": row["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"reward": len(text) / 20, "metrics": {"letters": len(text)}}))
"""
ROLLOUT = {"group_size": 4, "max_running_rollouts": 32, "max_prompt_tokens": 16, "max_response_tokens": 12}
SMALL: dict[str, Any] = {
    "model": {**UNTRAINED, "max_length": 128},
    "rollout": ROLLOUT,
    "pipeline": {"mode": "async", "max_staleness": 2, "groups_per_step": 4},
}


class Played(NamedTuple):
    """A recorded rollout, with the prompt and the state of its group."""

    uid: str
    state: str
    rollout: RolloutRecord


def played(run: Path) -> dict[str, Played]:
    """The rollouts in the journal, by id."""
    return {
        rollout.rollout_id: Played(group.row.uid, group.row.state, rollout)
        for group in groups_of(run)
        for rollout in group.rollouts
    }


def trained(run: Path) -> list[Played]:
    """The rollouts in batches."""
    return [one for one in played(run).values() if one.state in ("taken", "trained")]


def calls(rollout: RolloutRecord) -> list[int]:
    """The number of the policy's replies in each sequence."""
    return [
        sum(sampled for sampled, _ in groupby(segments, key=lambda segment: segment.version != CONTEXT))
        for segments in sequences_of(rollout).values()
    ]


def tokens_of(segments: Sequence[Segment]) -> list[tuple[int, float]]:
    """The tokens with their log-probs, which must not change."""
    return [pair for one in segments for pair in zip(one.ids.tolist(), one.logprobs.tolist(), strict=True)]


def write(runs: Runs, name: str, count: int, **fields: Any) -> str:
    """Write prompts and the players into the folder of the spec."""
    (runs.folder / "players.py").write_text(textwrap.dedent(PLAYERS).replace("SLEEP_S", SLEEP_S))
    lines = [json.dumps({"uid": f"{name}/{n}", "prompt": f"{name[:2]}{n}>"} | fields) for n in range(count)]
    (runs.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return f"{name}.jsonl"


USES: dict[str, dict[str, Any]] = {
    "agent": {"use": "players:patient"},
    "echo": {"use": "players:Echo"},
    "program": {"use": "command", "options": {"command": shlex.join([sys.executable, "-c", COMMAND])}},
}
CALLS = {"agent": 4, "echo": 2, "program": 1}
METRICS: dict[str, set[str]] = {"agent": set(), "echo": {"turns"}, "program": {"letters"}}


class Killed(NamedTuple):
    """A finished run after kills of its gateway and then its driver; ``before``: its rollouts at the driver's death."""

    run: Path
    steps: int
    before: dict[str, Played]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A model with experts is trained on a mix of agents, environments and commands."""
    runs = Runs(tmp_path_factory.mktemp("killed"))
    files = {name: {"path": write(runs, name, 40)} for name in USES}
    mix = [{"name": name, "train": files[name], "eval": files[name]} | use for name, use in USES.items()]
    spec = runs.write_spec(
        **SMALL | {"model": SMALL["model"] | {"init": MIXTRAL}},
        task={"use": None, "mix": mix},
        data={"train": {"size": 60}, "eval": {"size": 6}},
        stop={"steps": 100},
    )
    process = runs.start("train", spec)
    until(
        lambda: (
            process.poll() is not None or any(steps_of(file.parent) for file in runs.folder.glob("*/metrics.jsonl"))
        ),
        "the first step",
    )
    run = runs.newest()

    def some_are_halfway() -> bool:
        return bool(trained(run)) and any(
            one.state == "running" and sum(calls(one.rollout)) >= 2 for one in played(run).values()
        )

    try:
        until(lambda: some_are_halfway() or process.poll() is not None, "unfinished episodes")
        mark = mark_of(process.pid)
        (gateway,) = processes_of_part(mark, "gateway")
        os.kill(gateway, signal.SIGKILL)
        taken = len(trained(run))
        until(
            lambda: (len(trained(run)) > taken + 32 and some_are_halfway()) or process.poll() is not None,
            "training to continue with another gateway",
        )
        assert processes_of_part(mark, "gateway") not in ([], [gateway])
    finally:
        process.kill()
        process.communicate()
    until(lambda: not processes_of(mark), "the run's processes to end", 60)
    before = played(run)
    steps = 3 + sum(one.state in ("taken", "trained") for one in before.values()) // 16
    runs.succeed("resume", run.name, "--runs-dir", runs.folder, "--steps", str(steps))
    return Killed(run, steps, before)


def test_agents_environments_and_commands_are_trained(killed: Killed) -> None:
    in_batches = trained(killed.run)
    assert len(in_batches) == killed.steps * 4 * 4
    assert {one.uid.partition("/")[0] for one in in_batches} == set(USES)
    versions = set()
    for uid, _, rollout in in_batches:
        name = uid.partition("/")[0]
        assert calls(rollout) == [CALLS[name]], "one sequence each, without branches"
        assert set(rollout.metrics) == METRICS[name]
        segments = rollout.segments  # without gaps: ``group_record`` has joined them
        assert segments[0].version == CONTEXT
        for segment in segments:
            assert all(value == 0 if segment.version == CONTEXT else value <= 0 for value in segment.logprobs)
        sampled = [segment.version for segment in segments if segment.version != CONTEXT]
        assert sampled == sorted(sampled)
        versions |= set(sampled)
    assert versions > {0}, "weights were updated while episodes ran"
    assert {one.rollout.failure for one in played(killed.run).values()} == {None}, "no agent received an error"
    assert len(steps_of(killed.run)) == killed.steps
    samples = rows(killed.run, f"evaluations/step-{killed.steps:06}-greedy.jsonl")[1:]
    assert len(samples) == 6 and all("failure" not in sample for sample in samples)


def test_recorded_turns_are_not_sampled_again_after_kills(killed: Killed) -> None:
    after = played(killed.run)
    kept = 0
    for rollout_id, earlier in killed.before.items():
        later = after[rollout_id].rollout
        assert later.failure is None
        for sequence_id, segments in sequences_of(earlier.rollout).items():
            old, new = tokens_of(segments), tokens_of(sequences_of(later)[sequence_id])
            assert new[: len(old)] == old
            kept += earlier.state == "running"
    assert kept, "some rollouts were unfinished"


SHORTENING = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}"
    "{% else %}{{ message.content[:1] }}!{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.rotating
def test_history_by_the_template_is_the_context_of_later_turns(runs: Runs) -> None:
    """The template shortens earlier replies, as others drop earlier reasoning."""
    (runs.folder / "shortening.jinja").write_text(SHORTENING)
    data = {name: {"path": write(runs, name, 8)} for name in ("train", "eval")}
    run = runs.train(
        pipeline=SMALL["pipeline"],
        rollout=ROLLOUT | {"history": "template"},
        model=SMALL["model"] | {"chat_template": "shortening.jinja"},
        task={"use": "players:agent"},
        data=data,
        stop={"steps": 2},
    )
    rollouts = [one.rollout for one in trained(run)]
    assert len(rollouts) == 2 * 4 * 4 and {tuple(calls(rollout)) for rollout in rollouts} == {(1, 1)}
    decoder = open_decoder(RunDirectory(run))
    assert decoder is not None
    for rollout in rollouts:
        first, second = (
            [
                decoder.split_text(ids, [len(ids)])[0]
                for is_context in (True, False)
                for ids in [[t for one in segments if (one.version == CONTEXT) == is_context for t in one.ids.tolist()]]
            ]
            for segments in sequences_of(rollout).values()
        )
        assert second[0].startswith(first[0] + first[1].strip()[:1])
        assert second[0].endswith("turn 0>") and len(second[0]) < len(first[0]) + 16


@pytest.mark.rotating
@NEEDS_BUBBLEWRAP
def test_programs_in_sandboxes_are_trained_and_a_killed_driver_leaves_none(runs: Runs) -> None:
    inside = 'import os; assert os.getcwd() == "/sandbox/cwd" and not os.path.exists("/etc/shadow")'
    uses: dict[str, dict[str, Any]] = {
        "program": {"use": "command", "options": {"command": shlex.join([sys.executable, "-c", f"{inside}{COMMAND}"])}},
        "agent": {"use": "players:with_sandbox"},
    }
    files = {name: {"path": write(runs, name, 40)} for name in uses}
    mix = [{"name": name, "train": files[name], "eval": files[name]} | use for name, use in uses.items()]
    settings = SMALL | {"task": {"use": None, "mix": mix, "sandbox": {"memory_mb": 256, "disk_mb": 16}}}
    data = {"train": {"size": 60}, "eval": {"size": 4}}
    run = runs.train(**settings, data=data)
    rollouts = [one.rollout for one in trained(run)]
    assert len(rollouts) == 4 * 4 * 4
    assert {tuple(calls(rollout)) for rollout in rollouts} == {(1,), (2,)}
    assert {one.rollout.failure for one in played(run).values()} == {None}
    assert {name for rollout in rollouts for name in rollout.metrics} == {"letters", "lines"}

    process = runs.start("train", runs.write_spec(**settings, data=data, stop={"steps": 1000}))
    sandboxed: list[psutil.Process] = []

    def many() -> bool:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            sandboxed[:] = [child for child in children if child.name() == "bwrap"]
        return len(sandboxed) >= 4

    try:
        until(lambda: many() or process.poll() is not None, "sandboxes")
        assert process.poll() is None
        mark = mark_of(process.pid)
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(one.is_running() for one in sandboxed), "the end of the sandboxes")
    until(lambda: not processes_of(mark), "the end of the run's processes")


@pytest.mark.rotating
def test_bad_agents_fail_with_their_reasons_and_the_run_continues(runs: Runs) -> None:
    kinds = ("never returns", "floods", "prints", "leaves children", "ends its process", "is correct")
    parts = [write(runs, kind.replace(" ", "-"), 1 if kind != "is correct" else 30, kind=kind) for kind in kinds]
    lines = [line for part in parts for line in (runs.folder / part).read_text().splitlines()]
    (runs.folder / "all.jsonl").write_text("\n".join(lines) + "\n")
    run = runs.train(
        model=SMALL["model"],
        pipeline=SMALL["pipeline"],
        rollout=ROLLOUT | {"retries": 0, "max_failed_share": 1.0},
        task={"use": "players:bad", "episode": {"timeout_s": 20, "max_calls": 8}},
        data={"train": {"path": "all.jsonl"}, "eval": {"path": "is-correct.jsonl", "size": 2}, "shuffle": False},
    )
    reasons: dict[str, set[str]] = {kind: set() for kind in kinds}
    ended: dict[str, set[str]] = {kind: set() for kind in kinds}
    for uid, state, rollout in played(run).values():
        kind = uid.partition("/")[0].replace("-", " ")
        ended[kind].add(state)
        reasons[kind] |= {rollout.failure or ""} - {""}
    assert all("had not ended after 20 s" in reason for reason in reasons["never returns"]) and reasons["never returns"]
    assert all("reached its limit of 8 calls" in reason for reason in reasons["floods"]) and reasons["floods"]
    assert all("exit status 5" in reason for reason in reasons["ends its process"]) and reasons["ends its process"]
    assert {ended[kind] == {"rejected"} for kind in ("never returns", "floods", "ends its process")} == {True}
    for kind in ("prints", "leaves children", "is correct"):
        assert "trained" in ended[kind] and not reasons[kind], kind
    logs = sum(log.stat().st_size for log in run.glob("logs/episode-worker-*.log*"))
    assert 16_000_000 < logs < 100_000_000, "at most 32 MiB for each of a few workers"
    left = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", SLEEP_S]]
    assert left == []
