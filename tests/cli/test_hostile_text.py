"""Recorded text is printed to a terminal without control characters, whatever data and programs wrote."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.cli.app import main
from asyncrl_cli.core.terminal import printable
from asyncrl_cli.records.groups import Outcome
from asyncrl_cli.records.rewards import RewardFailure
from tests.cli.conftest import process
from tests.journal.recorded_run import RecordedRun, make_run, settings

pytestmark = pytest.mark.slow

HOSTILE = "\x1b]0;title\x07\x9b2J\x1b[1A\r\x00\u202e\u2066[/nope][bold]:bomb:<b>"
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("runs",),
    ("watch",),
    ("events",),
    ("staleness",),
    ("inspect", "run"),
    ("inspect", "buffer"),
    ("inspect", "buffer", "--limit", "50"),
    ("inspect", "buffer", "--group", "0"),
    ("inspect", "buffer", "--rollout", "0-1"),
    ("inspect", "run", HOSTILE.replace("\x00", "")),
    ("checkpoint", "list"),
    ("checkpoint", "verify"),
    ("checkpoint", "export", "--to", "model"),
    ("report", "-o", "report.html"),
    ("report", "-o", HOSTILE.replace("\x00", "").replace("/", "") + "/report.html"),
    ("resume", "latest"),
    ("replay", "latest"),
    ("validate-spec", HOSTILE.replace("\x00", "")),
)
TEXT_ONLY = {"watch", "verify", "export", "report", "resume", "validate-spec"}
"""Commands without ``--json``."""


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that has control characters in every text."""
    directory = make_run(tmp_path / "runs", phase="failed", step=1, version=1, reason=f"reason {HOSTILE}\ud83d")
    run = RecordedRun(directory.path / "journal.db", monkeypatch, settings(), lambda _: 3.0)
    run.metrics = {f"metric {HOSTILE}": 0.5}
    run.step()
    failing = run.book.ledger.running[-1]
    run.book.score([Outcome(f"{failing}-0", RewardFailure(f"KeyError: {HOSTILE}"))])
    run.book.journal.failed("engine", f"engine {HOSTILE}", f"died {HOSTILE}")
    run.commit()
    evaluation = {"kind": f"data:{HOSTILE}", "step": 1, "accuracy": 0.5, "mean_reward": 0.5, "mean_length": 4.0}
    run.book.journal.evaluated(evaluation | {"prompts": 2, "oldest": 1, "newest": 1})
    run.commit()
    columns = {"uid": HOSTILE, "prompt": json.dumps(HOSTILE), "fields": json.dumps({"answer": HOSTILE})}
    for column, text in columns.items():
        run.book.journal.commit([(f"UPDATE groups SET {column} = ?, crc = NULL", (text,))])
    run.book.journal.commit([("UPDATE batches SET metrics = NULL", ())])
    manifest = directory.manifest | {"host": HOSTILE, "command": ["asyncrl", HOSTILE], "git": {"commit": HOSTILE}}
    directory.write_json("manifest.json", manifest)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "arguments", [*COMMANDS, *((*one, "--json") for one in COMMANDS if not TEXT_ONLY.intersection(one))]
)
def test_no_control_character_is_printed(
    runs_dir: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs_dir.parent)
    where = [] if arguments[0] == "validate-spec" else ["--runs-dir", str(runs_dir)]
    monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments, *where])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, 1, 2)
    out, err = capsys.readouterr()
    text = out + err
    assert text
    assert [char for char in text if not char.isprintable() and char != "\n"] == []
    if "--json" in arguments and ended.value.code == 0:
        for document in out.splitlines() if arguments[0] in ("events", "replay") else [out]:
            json.loads(document)


def test_console_draws_no_text_that_a_caller_forgot_to_clean() -> None:
    from rich.table import Table
    from rich.text import Text

    from asyncrl_cli.core.console import PlainConsole

    drawn = io.StringIO()
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE, Text(HOSTILE))
    console = PlainConsole(file=drawn, width=300, force_terminal=True, color_system=None)
    console.print(HOSTILE, table, Text(HOSTILE, "bold"))
    console.log(HOSTILE)
    assert [char for char in drawn.getvalue() if not char.isprintable() and char != "\n"] == []
    assert drawn.getvalue().count("[/nope]") == 4, "the table measured its cells before, so it cuts their ends off"


@given(st.text())
def test_printable_text_keeps_what_can_be_shown(text: str) -> None:
    shown = printable(text)
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert shown == text or any(not char.isprintable() and char != "\n" for char in text)
    shown.encode()


@pytest.mark.parametrize("command", [["watch"], ["--help"]])
def test_a_terminal_that_lacks_characters_gets_their_escapes(runs_dir: Path, command: list[str]) -> None:
    where = [] if command == ["--help"] else ["--runs-dir", runs_dir]
    done = process(*command, *where, cwd=runs_dir, environment={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.code, done.err) == (0, "")
    assert done.out
