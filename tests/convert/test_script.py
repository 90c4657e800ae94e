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

from asyncrl_cli.convert.config import ForeignConfig, override, unknown_fragments, without_marks
from asyncrl_cli.convert.shell import command_words
from asyncrl_cli.convert.verl import ARGUMENT
from asyncrl_cli.core.errors import ConfigError

Command = Callable[..., tuple[int, str, str]]
PROGRAM = "python3 -m verl.trainer.main_ppo"

SCRIPTS = {
    "plain": f"set -x\n{PROGRAM} a.b=1 \\\n    c.d='x y' e.f=\"$HOME/data\" $@\n",
    "variables": f'export A=3\nB="$A-${{A}}"; C=\'$A\'\nreadonly D=${{E:-"$A x"}}\nF=$D\n'
    f'{PROGRAM} a.b=$A$B c.d="$C" e.f="$D" g.h="$F"\n',
    "arrays": f'R=(a.b=1 "c.d=x y") # one\nR+=(\n  e.f=$((2 * (3 + 4) / 5))  # two\n  g.h=2\n)\n'
    f'{PROGRAM} "${{R[@]}}" "$@"\n',
    "sums": f"A=$((1024 * 8))\nB=$((A + A/3 - ${{A}}))\n{PROGRAM} a.b=$A c.d=$B e.f=$((A*2))\n",
    "around": f"ulimit -n 65535; N=2\nX=1 Y=2 nohup {PROGRAM} a.b=$N c.d=1 > log.txt 2>&1 &\nwait\n",
    "pipe": f"if true; then\n  {PROGRAM} a.b=1 c.d=2 2>&1 | tee out.log\nfi\n",
    "text": f"cat <<'EOF' >note\nA=9 {PROGRAM} x.y=3\nEOF\nA=1 # not 2\n"
    f'{PROGRAM} a.b=$A#2 "c.d=[\\"m\\",\'n\']" e.f=\\$A\n',
    "split": f'P="a.b=1  c.d=2"\n: ${{N:=4}}\n{PROGRAM} $P e.f=$N "g.h=$P"\n',
    "conditions": 'D=${D:-gpu}; E=()\nif [ "$D" = npu ]; then A=1; elif [[ $D == g* && -n $D ]]; then A=2; '
    "E+=(c.d=$A); "
    f'else A=3; fi\n[ $A -gt 1 ] && A=$((A - 7)) || A=9\nfalse && B=1\n{PROGRAM} a.b=$A "${{E[@]}}" e.f=${{B:-0}}\n',
    "cases": f'M=Q3-8B\ncase "$M" in\n  (x|y) T=1 ;;\n  Q3-*) T=2\n    ;;\n  *) T=3;;\nesac\n'
    f"{PROGRAM} a.b=$T g.h=$((-7 / 2))\n",
    "substitutions": f'G=$(cd "$(dirname "$0")/.." && pwd)\n{PROGRAM} c.d=$G e.f=$(pwd) g.h=`pwd`\n',
    "documents": f"cat <<'B' >x\n\t$(( 1\nif '\nB\npython3 - <<<\"x\" || true\n{PROGRAM} a.b={{1}}\n",
    "nested": 'A="${X:-"${Y:-"a b"}/c"}"\nB=${X:-${Y:-d e}}\n'
    f'{PROGRAM} "a.b=$A" c.d="$B" e.f="$A$B" g.h=${{A:+1}}\n',
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
    subprocess.run(["bash", script], env=environment, cwd=script.parent, check=False, timeout=300, capture_output=True)
    return (programs / "words").read_text().split("\0")[:-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_words_of_bash(
    name: str, tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[name])
    (tmp_path / "values.sh").write_text("A=7\nB=$((A + 1))\n")
    found = command_words([str(script)], ARGUMENT)
    assert found[found.index("-m") :] == words_of_bash(script, programs)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=12), min_size=1))
@settings(max_examples=200)
def test_any_quoted_text_comes_back(texts: list[str]) -> None:
    script = Path(os.environ["PYTEST_CURRENT_TEST_FOLDER"]) / "quoted.sh"
    given = [f"a.b{index}={text}" for index, text in enumerate(texts)]
    script.write_text(f"{PROGRAM} {' '.join(map(shlex.quote, given))}\n")
    assert command_words([str(script)], ARGUMENT)[3:] == given


VARIABLES = st.sampled_from("ABC")
LITERALS = st.sampled_from(["1", "20", "gpu", "a b", "", "x=y", "~", "*"])
TEXTS = st.one_of(
    LITERALS.map(shlex.quote),
    VARIABLES.map(lambda name: f'"${name}"'),
    VARIABLES.map(lambda name: f"${{{name}:-7}}"),
    st.tuples(VARIABLES, LITERALS).map(lambda pair: f'"${{{pair[0]}:+{pair[1].replace("*", "s")}}}-$HOME"'),
    st.tuples(st.integers(-9, 9), st.sampled_from("+-*"), st.integers(1, 9)).map(
        lambda parts: "$(({} {} {}))".format(*parts)
    ),
)
TESTS = st.one_of(
    st.tuples(VARIABLES, st.sampled_from(["=", "!="]), LITERALS).map(
        lambda parts: f'[ "${parts[0]}" {parts[1]} {shlex.quote(parts[2])} ]'
    ),
    VARIABLES.map(lambda name: f'[[ -n "${{{name}:-}}" ]]'),
    st.sampled_from(["true", "false", "[ 3 -lt 20 ]"]),
)
ASSIGNMENTS = st.tuples(VARIABLES, st.sampled_from(["=", "+="]), TEXTS).map("".join)
STATEMENTS = st.recursive(
    ASSIGNMENTS,
    lambda inner: st.one_of(
        st.tuples(TESTS, inner, inner).map(lambda parts: "if {}; then\n{}\nelse {}; fi".format(*parts)),
        st.tuples(TESTS, st.sampled_from(["&&", "||"]), inner).map(
            lambda parts: "{{ {}; }} {} {{ {}; }}".format(*parts)
        ),
        st.tuples(VARIABLES, inner, inner).map(lambda parts: 'case "${}" in 1|gpu) {};;\n*) {} ;; esac'.format(*parts)),
        st.tuples(inner, inner).map("; ".join),
    ),
    max_leaves=5,
)


@given(st.lists(STATEMENTS, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_assignments_and_conditions_of_known_values_have_the_values_of_bash(programs: Path, lines: list[str]) -> None:
    script = Path(os.environ["PYTEST_CURRENT_TEST_FOLDER"]) / "known.sh"
    script.write_text("A=1; B=''; C=gpu\n" + "\n".join(lines) + f'\n{PROGRAM} a.a="$A" b.b="$B" c.c="$C"\n')
    assert command_words([str(script)], ARGUMENT)[1:] == words_of_bash(script, programs)


SHELL = st.sampled_from(
    [*"ab=$(){}[]'\"`\\;|&<>#!*~ \n", "${A:-", "$((", "if ", "; then ", "fi\n", "<<E\n", f"\n{PROGRAM} a.b="]
)


@given(st.lists(SHELL, max_size=40).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused_and_unknown_values_are_marked_by_type(text: str) -> None:
    script = Path(os.environ["PYTEST_CURRENT_TEST_FOLDER"]) / "any.sh"
    script.write_text(text)
    try:
        found = command_words([str(script)], ARGUMENT)
    except ConfigError as error:
        assert "\0" not in f"{error}{error.hint}"
        return
    assert all(word.count("\0") == 5 * len(unknown_fragments(word)) for word in found)


def test_braces_that_bash_expands_are_refused_and_quoted_ones_are_text(tmp_path: Path, programs: Path) -> None:
    script = tmp_path / "run.sh"
    for word in ("+a.b={1,c}", "a.b=[{x,$Y}]", "a{1..3}=2"):
        script.write_text(f"{PROGRAM} x.y=1 {word}\n")
        with pytest.raises(ConfigError, match="braces, which bash expands"):
            command_words([str(script)], ARGUMENT)
    script.write_text(f"{PROGRAM} a.b='{{1,2}}' c.d=\"{{a:1,b:2}}\" e.f={{g}} h.i=\\{{1,2}}\n")
    words = command_words([str(script)], ARGUMENT)
    assert words[words.index("-m") :] == words_of_bash(script, programs)


def test_no_value_of_the_environment_gets_into_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-value")
    script = tmp_path / "run.sh"
    script.write_text(f'{PROGRAM} a.b="$MY_API_KEY" c.d=${{MY_API_KEY:-none}} e.f=$HOME/data\n')
    found = command_words([str(script)], ARGUMENT)
    assert [without_marks(word) for word in found[-3:]] == [
        "a.b=$MY_API_KEY",
        "c.d=none",
        f"e.f={os.environ['HOME']}/data",
    ]
    assert command_words([str(script), "MY_API_KEY=mine"], ARGUMENT)[-3:-1] == ["a.b=mine", "c.d=mine"]
    script.write_text(f"N=$(nproc)\nM=3\n{PROGRAM} a.b=$N c.d=$M\n")
    assert command_words([str(script), "N=8", "M=8"], ARGUMENT)[-2:] == ["a.b=8", "c.d=3"]


@pytest.mark.parametrize("end", ["\\\n\n", "\\ \n", "\\\n  # a comment\n", "\n"])
def test_arguments_after_the_end_of_the_command_are_refused_with_their_line(end: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{PROGRAM} a.b=1 {end}  c.d=2 \\\n  e.f=3\n")
    with pytest.raises(ConfigError, match=r"c\.d=2. is not part of the command") as refused:
        command_words([str(script)], ARGUMENT)
    assert refused.value.location == f"{script}:{2 + end.count(chr(10), 0, -1)}"


NESTED = 3000
ATTACKS = {
    "quote": 'A="' + "()" * 22,
    "document": "cat <<EOF\n" + "x\n" * 3000,
    "doubled": "A=aa\n" + "A=$A$A\n" * 40 + f"{PROGRAM} a.b=$A",
    "array": "A=(a b)\n" + 'A+=("${A[@]}")\n' * 40 + f'{PROGRAM} a.b=1 "${{A[@]}}"',
    "comments": ("# " + "x" * 78 + "\n") * 65_000,
    "defaults": "A=" + "${A:-" * NESTED + "}" * NESTED,
    "sums": "A=$((" + "(" * NESTED + "1" + ")" * NESTED + "))",
    "blocks": "if true; then " * NESTED + "fi;" * NESTED,
    "calls": "f() { f; f; }\nf\n",
    "definitions": "f() " * NESTED,
    "loops": f"for i in {'x ' * NESTED}; do for j in {'y ' * NESTED}; do A=1; done; done",
    "tests": "[ " + "x -a " * NESTED + f"x ] && A=1\n{PROGRAM} trainer.n=$A",
    "braces": "A=" + "{" * 20_000 + "," * 20_000,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_script_that_would_need_much_work_is_refused(name: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(ATTACKS[name])
    with pytest.raises(ConfigError):
        ForeignConfig(override({}, command_words([str(script)], ARGUMENT)[3:]), {}, "", {}).get("trainer.n")


@pytest.mark.parametrize("sum_", ["9**9**9", "1 << 99999", "9*" * 60 + "9", "1/0", "A", "N++", "09"])
def test_a_sum_that_is_not_one_of_whole_numbers_is_unknown(sum_: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"A=A\n{PROGRAM} trainer.n=$(( {sum_} ))\n")
    with pytest.raises(ConfigError, match="which only a run gives"):
        ForeignConfig(override({}, command_words([str(script)], ARGUMENT)[3:]), {}, "", {}).get("trainer.n")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST_FOLDER", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"N=$(nproc)\n{PROGRAM} a.b=1 trainer.n=$N", "line 1 has $(nproc)"),
        (f"{PROGRAM} a.b=1 trainer.n=x$N", "the script does not set N"),
        (f"N=1\n[[ -d $M ]] && N=2\n{PROGRAM} trainer.n=$N", "line 2 sets N under the condition in line 2"),
        (f"for N in $(ls); do\n{PROGRAM} trainer.n=$N\ndone", "line 1 is set by a loop"),
        (f"{PROGRAM} trainer.n=${{N/a/b}}", "line 1 has ${N/a/b}"),
        (f"{PROGRAM} trainer.n=$1", "the script does not set 1"),
        (f"{PROGRAM} trainer.n=$((2 ** 70))", "line 1 has $((2 ** 70))"),
        (f"A=a/b\n{PROGRAM} trainer.n=${{A##*/}}", "line 2 has ${A##*/}"),
    ],
)
def test_a_value_that_only_a_run_would_give_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{text}\n")
    source = ForeignConfig(override({}, command_words([str(script)], ARGUMENT)[3:]), {}, "", {})
    with pytest.raises(ConfigError) as refused:
        source.get("trainer.n")
    assert problem in refused.value.message and re.fullmatch(rf"{script}:\d+", refused.value.location)
    assert refused.value.hint.startswith("add `trainer.n=VALUE`")
    assert override({}, command_words([str(script), "trainer.n=8"], ARGUMENT)[3:])["trainer.n"] == 8


@pytest.mark.parametrize(
    "text",
    [
        f"f() {{ N=8; }}\nf\n{PROGRAM} trainer.n=${{N:-1}}",
        f"source a.sh\n{PROGRAM} trainer.n=${{N:-8}}",
        f'eval "$(tool env)"\n{PROGRAM} trainer.n=${{N:-8}}',
        f"while read N; do true; done <values\n{PROGRAM} trainer.n=${{N:-8}}",
        f"N=1\n((N++))\n{PROGRAM} trainer.n=$N",
        f"N=(1 2)\nN[0]=3\n{PROGRAM} trainer.n=${{N[0]}}",
        f"N=1 M=2 # both\n{PROGRAM} trainer.n=$N",
    ],
)
def test_a_script_that_may_set_variables_in_another_way_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{text}\n")
    with pytest.raises(ConfigError) as refused:
        command_words([str(script)], ARGUMENT)
    assert re.fullmatch(rf"{script}:\d+", refused.value.location) and refused.value.hint


@pytest.mark.parametrize("text", ["", "echo a.b=1\n", f"{PROGRAM} a.b=1\n{PROGRAM} a.b=2\n"])
def test_a_script_without_one_command_is_refused(text: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(ConfigError, match="commands with arguments of the trainer"):
        command_words([str(script)], ARGUMENT)


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
