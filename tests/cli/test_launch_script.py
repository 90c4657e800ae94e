"""The command of a shell script: the same words as bash gives the program, or a refusal with the line."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl_cli.cli.launch_script import command_words
from asyncrl_cli.convert.verl import ARGUMENT
from asyncrl_cli.core.errors import ConfigError

Command = Callable[..., tuple[int, str, str]]
PROGRAM = "python3 -m verl.trainer.main_ppo"

SCRIPTS = {
    "plain": f"set -x\n{PROGRAM} a.b=1 \\\n    c.d='x y' e.f=\"$HOME/data\" $@\n",
    "variables": f'export A=3\nB="$A-${{A}}"; C=\'$A\' D=${{E:-"$A x"}}\n'
    f'{PROGRAM} a.b=$A$B c.d="$C" e.f="$D" g.h=${{D##* }}\n',
    "arrays": f'R=(a.b=1 "c.d=x y") # one\nR+=(\n  e.f=$((2 * (3 + 4) / 5))  # two\n)\nR[3]=g.h=2\n'
    f'{PROGRAM} "${{R[@]}}" "$@"\n',
    "functions": f'start() {{ local N=$1; shift; {PROGRAM} a.b=$N "$@"; }}\ntwice() {{ echo $(($1 * 2)); }}\n'
    "start $(twice 4) c.d={1,2} 'e.f={1,2}'\n",
    "loops": f'A=; for N in 1 2 3; do A+="a.b$N=$N "; done\nwhile ((N > 0)); do ((N--)); done\n{PROGRAM} $A c.d=$N\n',
    "around": f"ulimit -n 65535; N=2\nX=1 Y=2 nohup {PROGRAM} a.b=$N c.d=1 > log.txt 2>&1 &\nwait\n",
    "pipe": f"set -euo pipefail\nif true; then\n  {PROGRAM} a.b=1 c.d=2 2>&1 | tee /nowhere/out.log\nfi\n",
    "exec": f'[[ -n "${{A:-}}" ]] && exit 1\n(true) || exit 2\nexec {PROGRAM} a.b=1 "c.d=$(echo x; echo y)"\n',
    "text": f"cat <<'EOF' >note\nA=9 {PROGRAM} x.y=3\nEOF\nA=1 # not 2\n"
    f"{PROGRAM} a.b=$A#2 \"c.d=[\\\"m\\\",'n']\" e.f=\\$A g.h=$'a\\nb\\001' i.j=é\n",
    "conditions": 'D=${D:-gpu}; E=()\nif [ "$D" = npu ]; then A=1; elif [[ $D == g* && -n $D ]]; then A=2; '
    f'E+=(c.d=$A); else A=3; fi\nfalse && B=1\n{PROGRAM} a.b=$A "${{E[@]}}" e.f=${{B:-0}}\n',
    "cases": f'M=Q3-8B\ncase "$M" in\n  (x|y) T=1 ;;\n  Q3-*) T=2 ;;\n  *) T=3;;\nesac\n'
    f"{PROGRAM} a.b=$T g.h=$((-7 / 2))\n",
    "programs": "ulimit -n 9; ray stop || true; mkdir -p x && pip install x >pip.log 2>&1\nray start &\nwait\n"
    f"N=$(seq 3 | tr '\\n' ,)$(expr 2 + 3) M=${{N:-$(nproc)}}\n{PROGRAM} a.b=$N c.d=$M || exit $?\n",
    "folders": 'G=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)\ncd /usr\n'
    f'{PROGRAM} c.d=$G e.f=$(pwd) g.h=$(basename "$0" .sh) i.j=$PWD\n',
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``python3`` that writes its arguments to the file ``words``."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "python3").write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" > {folder}/words\n")
    (folder / "python3").chmod(0o755)
    return folder


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run.sh"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_words_of_bash(name: str, script: Path, programs: Path) -> None:
    script.write_text(SCRIPTS[name])
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": os.environ["HOME"]}
    subprocess.run(["bash", script], env=environment, check=False, timeout=300, capture_output=True)
    words = command_words([str(script)], ARGUMENT)
    assert words[words.index("-m") :] == (programs / "words").read_text().split("\0")[:-1]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=12)


@given(st.lists(TEXTS, min_size=1, max_size=40))
@settings(max_examples=15, deadline=None)
@example(["*\x02", "\x01\x02", "*\x01\x02 script 1 \n\x02"])
def test_any_quoted_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "quoted.sh"
    arguments = [f"a.b{index}={text}" for index, text in enumerate(texts)]
    path.write_text(f"{PROGRAM} {' '.join(map(shlex.quote, arguments))}\n")
    assert command_words([str(path)], ARGUMENT)[3:] == arguments


SHELL = st.sampled_from(
    [*"ab=$(){}[]'\"`\\;|&<>#!*~ \n", "${A:-", "$((", "if ", "; then ", "fi\n", "<<E\n", f"\n{PROGRAM} a.b="]
)


@given(st.lists(SHELL, max_size=40).map("".join))
@settings(max_examples=20, deadline=None)
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.sh"
    path.write_text(text)
    try:
        words = command_words([str(path)], ARGUMENT)
    except ConfigError as error:
        assert "\0" not in f"{error}{error.hint}"
        return
    assert words[2] == "verl.trainer.main_ppo"


def test_no_value_of_the_environment_gets_into_the_words(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-value")
    script.write_text(f"{PROGRAM} a.b=${{MY_API_KEY-unset}} e.f=$HOME/data\n")
    assert command_words([str(script)], ARGUMENT)[3:] == ["a.b=unset", f"e.f={os.environ['HOME']}/data"]
    assert command_words([str(script), "MY_API_KEY=mine", "c.d=1"], ARGUMENT)[3::2] == ["a.b=mine", "c.d=1"]


def test_a_script_changes_no_file_and_runs_no_program(script: Path) -> None:
    kept = script.with_name("kept")
    kept.write_text("text")
    script.write_text(
        f"{PROGRAM} a.b=1\necho x > {kept}\n/usr/bin/env rm {kept}\necho x > {kept}2\ncommand rm {kept}\n"
    )
    command_words([str(script)], ARGUMENT)
    assert kept.read_text() == "text" and sorted(script.parent.iterdir()) == [kept, script]


@pytest.mark.parametrize("end", ["\\\n\n", "\\ \n", "\\\n  # a comment\n", "\n"])
def test_arguments_after_the_end_of_the_command_are_refused_with_their_line(end: str, script: Path) -> None:
    script.write_text(f"{PROGRAM} a.b=1 {end}  c.d=2 \\\n  e.f=3\n")
    with pytest.raises(ConfigError, match=r"c\.d=2. is not part of the command") as refused:
        command_words([str(script)], ARGUMENT)
    assert refused.value.location == f"{script}:{3 + end.count(chr(10), 0, -1)}"  # its last line


ATTACKS = {
    "endless": "while true; do :; done",
    "waits": "until curl localhost; do sleep 5; done",
    "doubled": "A=aa\n" + "A=$A$A\n" * 40 + f"{PROGRAM} a.b=$A",
    "large": ("# " + "x" * 78 + "\n") * 65_000,
    "calls": "f() { f; f; }\nf\n",
    "forks": "f() { f | f & }\nf\n",
    "disk": "A=aaaaaaaa; while :; do echo $A$A$A$A$A >> x; done",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_script_that_would_need_much_work_is_refused(name: str, script: Path) -> None:
    script.write_text(ATTACKS[name])
    with pytest.raises(ConfigError):
        command_words([str(script)], ARGUMENT)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\nN=$(nvidia-smi -L)", "the result of `nvidia-smi -L`"),
        ("\nN=1$(/usr/bin/nproc)", "the result of `/usr/bin/nproc`"),
        ("\nif nvidia-smi </dev/null; then N=8; fi", "the result of `nvidia-smi`"),
        ("set -e\ncommand -v nvcc && N=8", "the result of `command -v nvcc`"),
        ("\nfor N in $(ls); do :; done", "the result of `ls`"),
        ("\nf(", "syntax error"),
        ("f() {\ngrep x y; }; f || N=2", "the result of `grep x y`"),
        ("nvidia-smi\n[ $? = 0 ] && N=8", "does not set STATUS_OF_A_PROGRAM"),
        ("\n[[ -n a && ! -d $HOME ]] && N=2", "the result of `[[ ! -d"),
        ("\n[ -f x ] && N=2", "the result of `[ -f x ]`"),
        ("\nN=$(<values)", "values: No such file or directory"),
        ("\nwhile read N; do :; done <values", "values: No such file or directory"),
        ("\nread N <<<2", "the result of `read N`"),
        ("\nset -- 2; N=$1", "the result of `set -- 2`"),
        ("\nsource a.sh", "the result of `source a.sh`"),
        ("source /opt/conda/bin/activate x\n. ./a.sh", "the result of `. ./a.sh`"),
        ('eval "$(conda shell.bash hook)"\neval "$(tool env)"', "the result of `tool env`"),
        ("export PATH=/usr/bin:$PATH\nN=$(python3 -c 'print(2)')", "the result of `python3 -c print(2)`"),
        ("\nN=$((8 * M))", "does not set M"),
        ("\necho $(echo $M)", "does not set M"),
        ("\nN=$RANDOM", "does not set RANDOM"),
        ("\nN=$1", "does not set 1"),
        ("\nN=${UID}", "does not set USER_ID"),
    ],
)
def test_a_script_that_depends_on_what_only_a_run_has_is_refused_with_its_line(
    text: str, problem: str, script: Path
) -> None:
    script.write_text(f"{text}\n{PROGRAM} trainer.n=${{N:-4}}\n")
    with pytest.raises(ConfigError) as refused:
        command_words([str(script)], ARGUMENT)
    assert problem in refused.value.message and refused.value.location == f"{script}:2"
    name = problem.removeprefix("does not set ")
    assert refused.value.hint and (name == problem or refused.value.hint == f"add `{name}=VALUE` after the script")


@pytest.mark.parametrize("end", ["\x02script: line 4: b", "\n\x02script: line 4: b", "\n\x01\x02script 1 a"])
def test_an_argument_that_looks_like_a_record_of_the_trace_is_refused(end: str, script: Path) -> None:
    script.write_text(f"{PROGRAM} {shlex.quote(f'a.b=1{end}')}\n")
    with pytest.raises(ConfigError, match="trace of the script is torn"):
        command_words([str(script)], ARGUMENT)


@pytest.mark.parametrize("text", ["", "echo a.b=1\n", f"{PROGRAM} a.b=1\n{PROGRAM} a.b=2\n"])
def test_a_script_without_one_command_is_refused(text: str, script: Path) -> None:
    script.write_text(text)
    with pytest.raises(ConfigError, match="commands with arguments of the trainer"):
        command_words([str(script)], ARGUMENT)


def test_a_script_becomes_a_spec(script: Path, asyncrl: Command) -> None:
    script.write_text(f"LR=3e-6\n{PROGRAM} actor_rollout_ref.actor.optim.lr=$LR trainer.experiment_name=first\n")
    code, out, err = asyncrl("convert", "verl", "run.sh", "data.train_batch_size=64")
    assert code in (0, 1), err
    assert "learning_rate: 3.0e-06" in out or "learning_rate: 3e-06" in out or "3e-6" in out
    Path("trl.sh").write_text("LR=2e-6\naccelerate launch --num_processes 4 grpo.py --learning_rate $LR\n")
    code, out, err = asyncrl("convert", "trl", "trl.sh")
    assert code in (0, 1), err
    assert "2e-06" in out or "2.0e-06" in out or "2e-6" in out
