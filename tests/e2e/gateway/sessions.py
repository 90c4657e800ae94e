"""Sessions of third-party agents during training, compared with the journal."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from asyncrl_cli.records.generation import CONTEXT, TokenSequence
from tests.e2e.conftest import ROOT, Runs, rows, steps_of
from tests.e2e.gateway.program_sessions import Decode, Findings, compare
from tests.e2e.journal import batched_groups, sequences_of

GROUPS_A_STEP, GROUP_SIZE = 5, 4
LOG = "sessions.jsonl"
HERE = Path(__file__).parent
CALCULATOR = ROOT / "templates/calculator-agent"
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
AGENT_FILES = (
    "library_agents.py",
    "library_agents.jinja",
    "program_agents.py",
    "http_record.py",
    "openhands_agent.py",
)


def warm_start(folder: Path, conversation: str, imports: str = "from calculator import Calculator") -> dict[str, Any]:
    """`model.warm_start` on conversations that a Python expression makes from ``rng``."""
    (folder / "conversations.py").write_text(ROWS.format(imports=imports, conversation=conversation))
    return SUPERVISED | {
        "steps": 300,
        "data": {"path": "conversations:rows", "size": 7200, "prompt_column": "messages"},
    }


def write_spec(runs: Runs, sessions: int, kinds: Sequence[str], path: Path) -> Path:
    """Write a spec that trains on at least this many sessions, rounded up to a whole step. It is in a separate folder
    with the agents. ``kinds`` are those of ``program_agents``, with the programs in ``path``."""
    folder = runs.folder / "agents"
    folder.mkdir(exist_ok=True)
    (folder / LOG).unlink(missing_ok=True)
    for path_of in (CALCULATOR / "calculator.py", *(HERE / name for name in AGENT_FILES)):
        shutil.copy(path_of, folder)
    calculator = yaml.safe_load((CALCULATOR / "spec.yaml").read_text())
    conversation = f"Agents('', '', {list(kinds)}).demonstration(rng)"
    spec: dict[str, Any] = {
        "name": "agents",
        "runs_dir": str(runs.folder),
        "model": {
            "init": calculator["model"]["init"],
            "warm_start": warm_start(folder, conversation, "from program_agents import Agents"),
            "chat_template": "library_agents.jinja",
            "max_length": 4096,
        },
        "task": {
            "use": "program_agents:Agents",
            "options": {"log": str(folder / LOG), "path": str(path.resolve()), "kinds": list(kinds)},
            "episode": {"max_calls": 8, "timeout_s": 600, "concurrency": 8},
        },
        "data": {"eval": {"size": 4}},
        "rollout": {
            "group_size": GROUP_SIZE,
            "max_running_rollouts": 40,
            "max_prompt_tokens": 32,
            "max_response_tokens": 128,
        },
        "trainer": {"tokens_per_microbatch": 8192, "optimizer": {"learning_rate": 1.0e-4}},
        "pipeline": {"groups_per_step": GROUPS_A_STEP, "max_staleness": 1},
        "tracking": {"mlflow": False},
        "stop": {"steps": -(-sessions // (GROUPS_A_STEP * GROUP_SIZE))},
    }
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def audit(run: Path) -> Findings:
    """Compare the log of a finished run's agents with its journal."""
    found = Findings()
    logged: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for session in rows(run.parent / "agents", LOG):
        logged[session["rollout"]].append(session)
    decode = _decoder(run)
    found.counts["updates"] = int(sum(row["train/updates"] for row in steps_of(run)))
    for rollout in (rollout for group in batched_groups(run) for rollout in group.rollouts):
        name = rollout.rollout_id
        if len(logged[name]) != 1:
            found.problems.append(f"{name}: {len(logged[name])} sessions")
            continue
        (session,) = logged[name]
        found.counts[f"sessions of {session['agent']}"] += 1
        found.counts["tokens"] += rollout.tokens
        sampled = {segment.version for segment in rollout.segments if segment.version != CONTEXT}
        found.counts["sessions with several versions"] += len(sampled) > 1
        sequences = {name: TokenSequence.join(segments) for name, segments in sequences_of(rollout).items()}
        compared = compare(session, sequences, decode)
        found.counts.update(compared.counts)
        found.problems += [f"{name}, {session['agent']}: {problem}" for problem in compared.problems]
    return found


def _decoder(run: Path) -> Decode:
    """The function that gives the text of a run's tokens."""
    from transformers import AutoTokenizer

    folder = next(run.parent.glob("models/*/tokenizer.json")).parent
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
