"""The command of a shell script: the same words as bash gives the program, or a refusal with the line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.convert.source import words
from asyncrl_cli.convert.verl import OVERRIDE
from asyncrl_cli.core.errors import ConfigError

Command = Callable[..., tuple[int, str, str]]
PROGRAM = "python3 -m verl.trainer.main_ppo"

SCRIPTS = {
    "plain": f"set -x\n{PROGRAM} a.b=1 \\\n    c.d='x y' e.f=\"$HOME/data\" $@\n",
    "variables": f'export A=3\nB="$A-${{A}}" C=\'$A\'\nreadonly D=${{E:-"$A x"}}\nF=$D\n'
    f'{PROGRAM} a.b=$A$B c.d="$C" e.f="$D" g.h="$F"\n',
    "arrays": f'R=(a.b=1 "c.d=x y") # one\nR+=(\n  e.f=$((2 * (3 + 4) / 5))  # two\n  g.h=2\n)\n'
    f'{PROGRAM} "${{R[@]}}" "$@"\n',
    "sums": f"A=$((1024 * 8))\nB=$((A + A/3 - ${{A}}))\n{PROGRAM} a.b=$A c.d=$B e.f=$((A*2))\n",
    "around": f"ulimit -n 65535; N=2\nX=1 Y=2 nohup {PROGRAM} a.b=$N c.d=1 > log.txt 2>&1 &\nwait\n",
    "pipe": f"if true; then\n  {PROGRAM} a.b=1 c.d=2 2>&1 | tee out.log\nfi\n",
    "text": f"cat <<'EOF' >note\nA=9 {PROGRAM} x.y=3\nEOF\nA=1 # not 2\n"
    f'{PROGRAM} a.b=$A#2 "c.d=[\\"m\\",\'n\']" e.f=\\$A\n',
    "split": f'P="a.b=1  c.d=2"\n: ${{N:=4}}\n{PROGRAM} $P e.f=$N "g.h=$P"\n',
    "function": f'train() {{\n  {PROGRAM} a.b=1 "$@"\n}}\ntrain\n',
    "positions": f"ENGINE=${{1:-vllm}}\n{PROGRAM} a.b=$ENGINE c.d=$(pwd)/x e.f=`pwd` g.h=$PWD\n",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``python3`` that writes its arguments to the file ``words``."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "python3").write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" > {folder}/words\n")
    (folder / "python3").chmod(0o755)
    return folder


def words_of_bash(script: Path, programs: Path) -> list[str]:
    (programs / "words").unlink(missing_ok=True)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": os.environ["HOME"]}
    subprocess.run(["bash", script], env=environment, cwd=script.parent, check=False, timeout=60, capture_output=True)
    return (programs / "words").read_text().split("\0")[:-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_words_of_bash(
    name: str, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[name])
    found = words([str(script)], OVERRIDE)
    assert found[found.index("-m") :] == words_of_bash(script, programs)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=12), min_size=1))
@settings(max_examples=200)
def test_any_quoted_text_comes_back(texts: list[str]) -> None:
    script = Path(os.environ["PYTEST_CURRENT_TEST_FOLDER"]) / "quoted.sh"
    given = [f"a.b{index}={text}" for index, text in enumerate(texts)]
    script.write_text(f"{PROGRAM} {' '.join(map(shlex.quote, given))}\n")
    assert words([str(script)], OVERRIDE)[3:] == given


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST_FOLDER", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"N=$(nproc)\n{PROGRAM} a.b=1 trainer.n=$N", "line 1 has $(nproc)"),
        (f"if true; then\n N=1\nelse\n N=2\nfi\n{PROGRAM} trainer.n=$N", "line 4 sets N under a condition"),
        (f"N=1\n[[ -z $M ]] && N=2\n{PROGRAM} trainer.n=$N", "line 2 sets N under a condition"),
        (f"for N in 1 2; do\n{PROGRAM} trainer.n=$N\ndone", "the script does not set N"),
        (f"{PROGRAM} trainer.n=${{N##*/}}", "line 1 has ${N##*/}"),
        (f"{PROGRAM} trainer.n=$1", "the script does not set 1"),
        (f"{PROGRAM} trainer.n=$((2 ** 70))", "line 1 has $((2 ** 70))"),
    ],
)
def test_a_value_that_only_a_run_would_give_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{text}\n")
    with pytest.raises(ConfigError) as refused:
        words([str(script)], OVERRIDE)
    assert problem in refused.value.message and re.fullmatch(rf"{script}:\d+", refused.value.location)
    assert refused.value.hint == "add `trainer.n=VALUE` after the script"
    found = words([str(script), "trainer.n=8"], OVERRIDE)
    assert [word for word in found if word.startswith("trainer.n=")] == ["trainer.n=8"]


@pytest.mark.parametrize("text", ["", "echo a.b=1\n", f"{PROGRAM} a.b=1\n{PROGRAM} a.b=2\n"])
def test_a_script_without_one_command_is_refused(text: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(ConfigError, match="commands with arguments of the trainer"):
        words([str(script)], OVERRIDE)


def test_a_script_becomes_a_spec(tmp_path: Path, asyncrl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(
        f"LR=3e-6\n{PROGRAM} actor_rollout_ref.actor.optim.lr=$LR trainer.experiment_name=first\n"
    )
    code, out, err = asyncrl("convert", "verl", "run.sh", "data.train_batch_size=64")
    assert code in (0, 1), err
    assert "learning_rate: 3.0e-06" in out or "learning_rate: 3e-06" in out or "3e-6" in out
    Path("trl.sh").write_text("LR=2e-6\naccelerate launch --num_processes 4 grpo.py --learning_rate $LR\n")
    code, out, err = asyncrl("convert", "trl", "trl.sh")
    assert code in (0, 1), err
    assert "2e-06" in out or "2.0e-06" in out or "2e-6" in out
