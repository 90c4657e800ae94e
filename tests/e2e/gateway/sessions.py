"""Sessions of third-party agents during training, compared with the journal.

The answer to each call of a session (prompt ids, sampled ids, usage) is recorded on the agents' side
(``library_agents.Log``); the trained tokens are in the journal. The two must agree:

- no agent received an error;
- the tokens in the ``usage`` of the agents' calls are the rollout's sampled tokens, each exactly once;
- the ids of each call are in a sequence of the rollout, unchanged: a later turn either begins with the exact ids of an
  earlier one, including the reply, or begins a new sequence.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from asyncrl_cli.journal.queries import group_record, snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.records.generation import CONTEXT, Segment, TokenSequence
from tests.e2e.conftest import ROOT, Runs, rows, steps_of
from tests.e2e.gateway import program_sessions
from tests.e2e.gateway.program_sessions import Decode

GROUPS_A_STEP, GROUP_SIZE = 5, 4
LOG = "sessions.jsonl"
REWORDS = "smolagents"
"""The library that repeats the model's tool calls in its own words."""
HERE = Path(__file__).parent
CALCULATOR = ROOT / "templates/calculator-agent"


LIBRARY_AGENTS = ("library_agents.py", "library_agents.jinja")
ROWS = """
import random

{imports}


def rows(split, size):
    rng = random.Random(0)
    for _ in range(size):
        yield {{"messages": {conversation}}}
"""
SUPERVISED = {
    "batch_size": 24,
    "learning_rate": 3.0e-3,
    "schedule": {"kind": "cosine", "warmup_updates": 30, "final_fraction": 0.05},
}
"""Settings of a warm start that suit models with random weights."""
PROGRAM_AGENTS = ("program_agents.py", "http_record.py", "openhands_agent.py")


def warm_start(folder: Path, conversation: str, imports: str = "from calculator import Calculator") -> dict[str, Any]:
    """`model.warm_start` on conversations that a Python expression makes from ``rng``."""
    (folder / "conversations.py").write_text(ROWS.format(imports=imports, conversation=conversation))
    return SUPERVISED | {
        "steps": 300,
        "data": {"path": "conversations:rows", "size": 7200, "prompt_column": "messages"},
    }


def write_spec(runs: Runs, sessions: int, kinds: Sequence[str] = (), path: Path = Path()) -> Path:
    """Write a spec that trains on at least this many sessions, rounded up to a whole step. It is in a separate folder
    with the agents. ``kinds`` are those of ``program_agents``, with the programs in ``path``; default: only the
    libraries."""
    folder = runs.folder / "agents"
    folder.mkdir(exist_ok=True)
    (folder / LOG).unlink(missing_ok=True)
    for path_of in (CALCULATOR / "calculator.py", *(HERE / name for name in (*LIBRARY_AGENTS, *PROGRAM_AGENTS))):
        shutil.copy(path_of, folder)
    calculator = yaml.safe_load((CALCULATOR / "spec.yaml").read_text())
    spec: dict[str, Any] = {
        "name": "library-agents",
        "runs_dir": str(runs.folder),
        "model": {
            "init": calculator["model"]["init"],
            "warm_start": warm_start(folder, "Calculator().demonstration(rng, True)"),
            "chat_template": "library_agents.jinja",
            "max_length": 2048,
        },
        "task": {
            "use": "library_agents:LibraryAgents",
            "options": {"log": str(folder / LOG)},
            "episode": {"max_calls": 8, "timeout_s": 300},
        },
        "data": {"eval": {"size": 4}},
        "rollout": {
            "group_size": GROUP_SIZE,
            "max_running_rollouts": 40,
            "max_prompt_tokens": 32,
            "max_response_tokens": 96,
        },
        "trainer": {"tokens_per_microbatch": 8192, "optimizer": {"learning_rate": 1.0e-4}},
        "pipeline": {"groups_per_step": GROUPS_A_STEP, "max_staleness": 1},
        "tracking": {"mlflow": False},
        "stop": {"steps": -(-sessions // (GROUPS_A_STEP * GROUP_SIZE))},
    }
    if kinds:
        spec["name"] = "agents"
        conversation = f"Agents('', '', {list(kinds)}).demonstration(rng)"
        spec["model"] |= {
            "warm_start": warm_start(folder, conversation, "from program_agents import Agents"),
            "max_length": 4096,
        }
        spec["task"] |= {
            "use": "program_agents:Agents",
            "options": {"log": str(folder / LOG), "path": str(path.resolve()), "kinds": list(kinds)},
            "episode": {"max_calls": 8, "timeout_s": 600, "concurrency": 8},
        }
        spec["rollout"]["max_response_tokens"] = 128
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


@dataclass(slots=True)
class Audit:
    """What was found. ``problems`` is empty if all checks pass."""

    sessions: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    continued: int = 0
    branches: int = 0
    tool_calls: int = 0
    crossed: int = 0
    sampled: int = 0
    versions: int = 0
    updates: int = 0
    limits: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.sessions.items()))
        return (
            f"{sum(self.sessions.values())} sessions ({kinds}): {self.calls} calls, {self.tool_calls} replies with "
            f"tool calls; {self.continued} calls continued an earlier turn, {self.branches} began a branch; "
            f"{self.sampled} tokens; {self.versions} versions of the weights by {self.updates} updates, {self.crossed} "
            f"sessions used several versions; {self.limits} refusals at limits; "
            f"{len(self.problems)} problems"
        )


def audit(run: Path) -> Audit:
    """Compare the log of a finished run's agents with its journal."""
    found = Audit()
    logged: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for session in rows(run.parent / "agents", LOG):
        name = session["rollout"]
        logged[name].append(session)
        found.problems += [f"{name}, {session['library']}: {error}" for error in session["errors"]]
    decode = _decoder(run)
    with snapshot(run / FILE) as journal:
        recorded = {
            rollout.rollout_id: rollout
            for (group,) in journal.execute("SELECT id FROM groups WHERE step IS NOT NULL ORDER BY id").fetchall()
            for rollout in group_record(journal, group).rollouts
        }
        (publishes,) = journal.execute("SELECT count(*) FROM publishes").fetchone()
    found.versions = publishes - 1
    found.updates = int(sum(row["train/updates"] for row in steps_of(run)))
    for name, rollout in recorded.items():
        if len(logged[name]) != 1:
            found.problems.append(f"{name}: {len(logged[name])} sessions")
            continue
        (session,) = logged[name]
        found.sessions[session["library"]] += 1
        found.sampled += rollout.tokens
        sampled = {segment.version for segment in rollout.segments if segment.version != CONTEXT}
        found.crossed += len(sampled) > 1
        compare = _compare if "calls" in session else partial(_compare_program, decode=decode)
        found.problems += [f"{name}, {session['library']}: {problem}" for problem in compare(session, rollout, found)]
    return found


def _decoder(run: Path) -> Decode:
    """The function that gives the text of a run's tokens."""
    from transformers import AutoTokenizer

    folder = next(run.parent.glob("models/*/tokenizer.json")).parent
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def _compare_program(session: dict[str, Any], rollout: Any, found: Audit, *, decode: Decode) -> list[str]:
    segments: defaultdict[str, list[Segment]] = defaultdict(list)
    for segment in rollout.segments:
        segments[segment.rollout_id].append(segment)
    sequences = {name: TokenSequence.join(parts) for name, parts in segments.items()}
    these = program_sessions.compare(session, sequences, decode)
    for name in ("calls", "tool_calls", "continued", "branches", "limits"):
        setattr(found, name, getattr(found, name) + getattr(these, name))
    return these.problems


def _compare(session: dict[str, Any], rollout: Any, found: Audit) -> list[str]:
    problems = []
    ids: defaultdict[str, list[int]] = defaultdict(list)
    versions: defaultdict[str, list[int]] = defaultdict(list)
    for segment in rollout.segments:
        ids[segment.rollout_id] += segment.ids.tolist()
        versions[segment.rollout_id] += [segment.version] * len(segment.ids)
    charged = sum(completion for _, completion in (call["usage"] for call in session["calls"]))
    if charged != rollout.tokens:
        problems.append(f"the usage of all calls is {charged} tokens, but {rollout.tokens} were recorded")
    accounted: Counter[str] = Counter()
    begun: list[tuple[str, list[int]]] = []
    for number, call in enumerate(session["calls"]):
        prompt, reply = call["prompt"], call["sampled"]
        found.calls += 1
        found.tool_calls += call["calls_a_tool"]
        if [len(prompt), len(reply)] != call["usage"]:
            problems.append(f"call {number} has {len(prompt)} + {len(reply)} ids, and usage {call['usage']}")
        whole = [*prompt, *reply]
        holders = [
            name
            for name, sequence in ids.items()
            if sequence[: len(whole)] == whole
            and CONTEXT not in versions[name][len(prompt) : len(whole)]
            and versions[name][len(prompt) - 1] == CONTEXT
        ]
        if len(holders) != 1:
            problems.append(f"the ids of call {number} are in {len(holders)} sequences of the rollout, not in one")
            continue
        (holder,) = holders
        accounted[holder] += len(reply)
        if any(version != CONTEXT for version in versions[holder][: len(prompt)]):
            found.continued += 1
            if not any(name == holder and prompt[: len(earlier)] == earlier for name, earlier in begun):
                problems.append(f"call {number} continues turns whose ids its prompt does not have")
        elif number:
            found.branches += 1
            if session["library"] != REWORDS:
                problems.append(f"call {number} begins a branch, though nothing was reworded")
        begun.append((holder, whole))
    if sum(accounted.values()) != sum(version != CONTEXT for one in versions.values() for version in one):
        problems.append(f"calls account for {dict(accounted)} sampled tokens")
    if len(ids) > 1 and len(begun) < len(ids):
        problems.append(f"{len(ids)} sequences, and {len(begun)} calls")
    return problems
