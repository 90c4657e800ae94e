"""The task ``bugfix``: a repository in a sandbox, one tool ``shell``, and hidden tests of the files that are left.

    user       Fix calc.py.
    assistant  (calls shell with command = cat calc.py)
    tool       def add(a, b):
                   return a - b
    assistant  (calls shell with command = sed -i '2s/-/+/' calc.py)
    tool
    assistant  Done.

The first reply without a call ends the episode; then its files are judged (``verdict``).

Invariant: a repository is held out or trained on by the text of its modules (``prompts.is_held_out``), in prompts and
in demonstrations; ``_draw`` alone draws repositories.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.sandbox.commands import BlockingSandbox, CommandResult
from asyncrl_cli.sandbox.judge import Limits, SandboxError
from asyncrl_cli.sandbox.trial import Wanted, choose
from asyncrl_cli.tasks.base import RewardResult, Split
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out
from asyncrl_cli.tasks.ready.bugfix import demonstrations
from asyncrl_cli.tasks.ready.bugfix.mutations import KINDS, Kind
from asyncrl_cli.tasks.ready.bugfix.repository import EXAMPLES, MODULES, README, Repository, Shape, make_repository
from asyncrl_cli.tasks.ready.bugfix.verdict import passing
from asyncrl_cli.tasks.tools import ToolTask

INSTRUCTION = (
    "This folder has a small Python repository in which {bugs} wrong results. {readme}Find what is wrong and correct "
    "the code in place, without changing what else it does. Tests that you cannot see decide whether it is right. Say "
    "in one sentence what you have changed when you are done."
)
README_HINT = f"{README} says what its functions do, and `python {EXAMPLES}` checks one call of each. "


class Bugfix(ToolTask):
    """The task ``bugfix``."""

    def __init__(
        self,
        files: int = 1,
        functions: int = 4,
        bugs: int = 1,
        max_lines: int | None = None,
        kinds: Sequence[Kind] = KINDS,
        terse: bool = False,
        instruction: str | None = None,
        partial: bool = False,
        careful: float = 0.2,
        time_s: float = 10.0,
        sandbox: Wanted = "auto",
    ) -> None:
        """Args:
            files: modules of a repository.
            functions: functions of a module.
            bugs: functions with a bug.
            max_lines: of a function's body; None takes the longest of the library, too.
            kinds: of bugs, out of ``operator``, ``comparison``, ``constant``, ``name`` and ``swap``.
            terse: no docstrings, one-letter arguments, and neither README nor examples: for tiny models.
            instruction: the first message; None is one that tells a general model what to do.
            partial: the reward is the share of bugs that are gone, if all other tests pass; else 1.0 or 0.0.
            careful: of the demonstrations that are not clean, the share that says what is needed and makes that
                change; half of the rest make another, and half make none.
            time_s: seconds for the hidden tests.
            sandbox: of the hidden tests, as for ``unit_tests``.

        Raises ``ValueError`` for impossible values, and ``TaskError`` when the sandbox does not work here.
        """
        if not 1 <= files <= len(MODULES):
            raise ValueError(f"files must be between 1 and {len(MODULES)}, not {files}")
        if not 1 <= bugs <= files * functions:
            raise ValueError(f"1 <= bugs <= files * functions must hold, not {bugs=}, {files=}, {functions=}")
        if not kinds or not set(kinds) <= set(KINDS):
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {kinds}")
        self._shape = Shape(files, functions, bugs, max_lines, tuple(kinds), terse)
        self._instruction = instruction or _instruction(self._shape)
        if not 0 <= careful <= 1:
            raise ValueError(f"careful must be between 0 and 1, not {careful}")
        self._partial = partial
        self._careful = careful
        self._limits = Limits(time_s)
        self._kind = choose(sandbox)
        make_repository(random.Random(0), self._shape)  # raises if there can be none

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """``size`` rows of the split; row ``i`` is the same at every size. One repository may fill several rows."""

        def row(index: int) -> Prompt:
            uid = f"bugfix/{split}/{index}"
            made = self._draw(random.Random(uid), split)
            fields = {"files": made.files, "tests": made.tests, "broken": sorted(made.fixes)}
            return Prompt(uid, self._instruction, fields)

        return LazyPrompts(size, row)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``ValueError`` or ``SyntaxError`` for a row without a repository or its tests."""
        files, tests, broken = (prompt.fields.get(name) or {} for name in ("files", "tests", "broken"))
        for name, texts in (("files", files), ("tests", tests)):
            if not (isinstance(texts, dict) and texts and all(isinstance(text, str) for text in texts.values())):
                raise ValueError(f"the row's `{name}` is not an object of texts")
        if bad := next((name for name in files if not name or "/" in name or name.startswith(".")), None):
            raise ValueError(f"a file cannot be called {bad!r}: give names without folders")
        if not any(map(_is_module, files)):
            raise ValueError("the row has no Python module")
        if not (isinstance(broken, list) and broken and set(broken) <= tests.keys()):
            raise ValueError("the row's `broken` is not a list of names of its tests")
        for test in tests.values():
            ast.parse(test)

    def tools(self, prompt: Prompt, sandbox: BlockingSandbox) -> list[Callable[..., Any]]:  # type: ignore[override]
        """The shell, in a folder with the repository."""
        for name, text in prompt.fields["files"].items():
            sandbox.write_file(name, text.encode())

        def shell(command: str) -> str:
            """Run a command in the repository's folder and return what it prints.

            command: for bash, such as ls or cat README.md
            """
            return shown(sandbox.run(command))

        return [shell]

    def judge(self, prompt: Prompt, text: str, sandbox: BlockingSandbox) -> RewardResult:  # type: ignore[override]
        """The reward of the files in the sandbox, whatever the answer says."""
        return self.judge_files(prompt, left_in(sandbox.read_file, prompt.fields["files"]))

    def judge_files(self, prompt: Prompt, left: Mapping[str, str] | None) -> RewardResult:
        """The reward of the modules that an episode has left; None: one of them is gone, or no text any more.

        Raises ``SandboxError``.
        """
        before = {name: text for name, text in prompt.fields["files"].items() if _is_module(name)}
        if left is None or left == before:  # with the bugs in it the tests fail, as they did when it was made
            return RewardResult(0.0, {"changed": float(left != before)})
        passed = passing(left, prompt.fields["tests"], self._limits, self._kind)
        broken = prompt.fields["broken"]
        if self._partial:
            kept = all(right for name, right in passed.items() if name not in broken)
            return RewardResult(kept * sum(passed[name] for name in broken) / len(broken), {"changed": 1.0})
        return RewardResult(float(all(passed.values())), {"changed": 1.0})

    def demonstration(self, rng: random.Random, clean: bool) -> list[Message]:
        """A conversation in a repository of the train split up to some reply: the right one (``clean``), or a draw from
        the mixture."""
        right = clean or rng.random() < self._careful
        return demonstrations.demonstration(rng, self._instruction, self._draw(rng, "train"), self._shape.kinds, right)

    def _draw(self, rng: random.Random, split: Split) -> Repository:
        """A random repository of the split."""
        while True:
            made = make_repository(rng, self._shape)
            if is_held_out("".join(text for name, text in made.files.items() if _is_module(name))) == (split == "eval"):
                return made


def shown(result: CommandResult) -> str:
    """What the policy sees of a command."""
    output = result.output.rstrip("\n")
    if result.stopped:
        return f"{output}\n(stopped: {result.stopped})".lstrip("\n")
    return output if result.status == 0 else f"{output}\n(exit status {result.status})".lstrip("\n")


def left_in(read: Callable[[str], bytes], files: Mapping[str, str]) -> dict[str, str] | None:
    """The modules as ``read`` finds them now; None where one is gone or no text. Raises ``SandboxError``."""
    left = {}
    for name in filter(_is_module, files):
        try:
            left[name] = read(name).decode()
        except SandboxError:
            raise
        except (OSError, UnicodeDecodeError):
            return None
    return left


def _is_module(name: str) -> bool:
    return name.endswith(".py") and name != EXAMPLES


def _instruction(shape: Shape) -> str:
    bugs = "one function returns" if shape.bugs == 1 else f"{shape.bugs} functions return"
    return INSTRUCTION.format(bugs=bugs, readme="" if shape.terse else README_HINT)
