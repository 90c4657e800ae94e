"""The promises of docs/shell.md: exit codes, --quiet, NO_COLOR, completion."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

from asyncrl_cli.cli.app import app, main
from asyncrl_cli.cli.report import report
from asyncrl_cli.cli.running import drive
from asyncrl_cli.inspect.dashboard import Panel, RunView
from asyncrl_cli.inspect.report import page
from asyncrl_cli.orchestrator import launch
from asyncrl_cli.orchestrator.interrupts import INTERRUPTED, Interrupted
from asyncrl_cli.orchestrator.launch import DriverStart, RunResult
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.load import load_spec
from tests.cli.conftest import Done
from tests.journal.recorded_run import make_run

pytestmark = pytest.mark.slow

Command = Callable[..., Done]
SPEC = "model: {init: {architecture: llama, config: {}}}\ntask: {use: chain_sum}\nstop: {steps: 3}\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("runs", "--json"), 0),
        (("watch", "--no-such-option"), 2),
        (("no-such-command",), 2),
        *(
            ((*command.split(), "nothing", *options), 2)
            for command, *options in (
                *[("watch",), ("report",), ("events",), ("staleness",), ("track",), ("resume",)],
                *[("replay",), ("evaluate",), ("serve",), ("inspect run",), ("inspect buffer",), ("checkpoint list",)],
                *[("checkpoint verify",), ("checkpoint prune",), ("report -o x latest",)],
                ("checkpoint export", "--to", "x"),
                *[("train",), ("validate-spec",), ("plan",), ("init",), ("runs --runs-dir",), ("doctor --cluster",)],
                *[("convert verl",), ("convert trl",), ("convert prime-rl",)],
            )
        ),
    ],
)
def test_commands_end_with_the_documented_exit_codes(asyncrl: Command, arguments: tuple[str, ...], code: int) -> None:
    assert asyncrl(*arguments).code == code


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_quiet_run_prints_its_id_and_problems(
    quiet: bool, stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_experiment(_: Any, **parts: Any) -> RunResult:
        view = parts["console"]
        view.status("starting engines")
        view.warn("engine-0: gone")
        os.write(1, b"what a library prints\n")
        if stopped:
            raise Interrupted
        return RunResult(1.0)

    monkeypatch.setattr(launch, "run_experiment", run_experiment)
    (tmp_path / "spec.yaml").write_text(SPEC)
    experiment: Any = SimpleNamespace(spec=load_spec(tmp_path / "spec.yaml").spec)
    run = RunDirectory.create(tmp_path / "runs", "test")
    code = 0
    try:
        drive(experiment, run, DriverStart(), quiet)
    except BaseException as ended:
        code = ended.exit_code  # type: ignore[attr-defined]
    assert code == (INTERRUPTED if stopped else 0)
    out, err = capfd.readouterr()
    if quiet:
        assert out == f"{run.run_id}\n"
        assert err.startswith("! engine-0: gone\n") and ("asyncrl resume" in err) is stopped
    else:
        assert "starting engines" in out and "! engine-0: gone" in out
        assert stopped or f"asyncrl report {run.argument} " in out.split("next:")[1]
    assert "library" not in out + err
    assert (run.path / "logs/driver.log").read_text() == "what a library prints\n"


def test_no_color_turns_colours_off(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = dict.fromkeys(("reward/mean", "response/tokens_mean", "staleness/groups_mean"), 0.5)
    metrics |= dict.fromkeys(("staleness/groups_max", "tokens/generated_per_s"), 1.0)
    shown = RunView("now", 5, 10, 5, 2, metrics | {"share/trainer_busy": 1.0, "share/engines_busy": 1.0})

    def colours() -> list[str]:
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
        console.print(Panel(shown))
        codes = r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[\d;]*)?m"
        return re.findall(codes, console.file.getvalue())  # type: ignore[attr-defined]

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("re", ["resume", "report", "replay"]),
        ("resume te", ["test-1", "test-2"]),
        ("inspect buffer --state r", ["running", "rejected", "requeued"]),
        ("events --kind st", ["start", "step", "stall"]),
        ("init mat", ["math"]),
        ("train x.yaml --set trainer.offl", ["trainer.offload="]),
        ("resume --runs-dir nowhere te", []),
    ],
)
def test_completion_in_the_shell(
    words: str,
    completed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("test-1", "test-2", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "manifest.json").write_text("{}")
    monkeypatch.setenv("_ASYNCRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"asyncrl {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    monkeypatch.setattr(sys, "argv", ["asyncrl"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.split() == completed


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ((), ("inspect",), ("checkpoint",), ("convert",)):
        monkeypatch.setattr(sys, "argv", ["asyncrl", *group, "--help"])
        with pytest.raises(SystemExit):
            main()
        listed = capsys.readouterr().out.partition("Show this message and exit.\n")[2]
        commands = re.findall(r"^  ([\w-]+)", listed, re.MULTILINE)
        assert commands and "..." not in listed
        for command in commands:
            if (command,) in (("inspect",), ("checkpoint",), ("convert",)):
                continue
            monkeypatch.setattr(sys, "argv", ["asyncrl", *group, command, "-h"])
            with pytest.raises(SystemExit):
                main()
            help_text = capsys.readouterr().out
            assert help_text.startswith(" ".join(["Usage: asyncrl", *group, command, ""]))
            assert not re.search(r"[{}]|\[\[", help_text.splitlines()[0])
            assert "  Example: asyncrl " in help_text


def test_the_table_of_keys_has_every_command_with_json() -> None:
    page = (Path(__file__).parents[2] / "docs/shell.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([a-z -]+)`", page, re.MULTILINE))

    def with_json(command: Any, name: str) -> Iterator[str]:
        for inner in getattr(command, "commands", {}).values():
            yield from with_json(inner, f"{name} {inner.name}".strip())
        if any("--json" in param.opts for param in command.params):
            yield name

    shown = {name.partition(" --")[0] for name in listed}
    assert set(with_json(typer.main.get_command(app), "")) <= shown


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("resume", "example: asyncrl resume latest"),
        ("init reward", "did you mean `reward-function`?"),
        ("inspect rum latest", "mean 'run'"),
        ("runs --run-dir x", "options: --runs-dir"),
    ],
)
def test_wrong_commands_and_options_get_a_hint(asyncrl: Command, arguments: str, hint: str) -> None:
    done = asyncrl(*arguments.split())
    assert done.code == 2 and hint in done.err


def test_a_new_folder_of_a_file_is_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "summarize", lambda run: run)
    monkeypatch.setattr(page, "render", lambda runs: "page")
    make_run(tmp_path)
    for is_new in (True, False):
        report("latest", tmp_path / "new/report.html", tmp_path)
        assert (f"created the folder {tmp_path / 'new'}\n" in capsys.readouterr().err) == is_new
