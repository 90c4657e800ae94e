"""A coding task: a repository in a sandbox, a tool ``shell``, and hidden tests of the final files.

    user       Fix calc.py.
    assistant  (calls shell with command = cat calc.py)
    tool       def add(a, b):
                   return a - b
    assistant  (calls shell with command = sed -i '2s/-/+/' calc.py)
    tool
    assistant  Done.

The first reply without a call ends the episode; then the files are judged.

Invariant: a hash of a repository's module decides its split (``is_held_out``). Only ``_draw`` draws repositories.
"""

from __future__ import annotations

import ast
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from repository import BUG_KINDS, EXAMPLES, MODULE, README, BugKind, Repository, Shape, edits, make_repository

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.sandbox.commands import BlockingSandbox, CommandResult
from asyncrl_cli.sandbox.judge import Check, Limits, SandboxError, SandboxKind, run
from asyncrl_cli.sandbox.trial import check_judge
from asyncrl_cli.tasks.base import RewardResult, Split
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out
from asyncrl_cli.tasks.tools import ToolTask, call_message, result_message

INSTRUCTION = (
    "This folder has a small Python repository in which {bugs} wrong results. {readme}Find what is wrong and correct "
    "the code in place, without changing what else it does. Tests that you cannot see decide whether it is right. Say "
    "in one sentence what you have changed when you are done."
)
README_HINT = f"{README} says what its functions do, and `python {EXAMPLES}` checks one call of each. "
TOOL, DONE = "shell", "Done."
REPLIES = ("look", "edit", "edit", "edit", "answer")
"""Replies that demonstrations teach, repeated by their share. Good and bad demonstrations differ only in edits."""
CAREFUL = 0.16
"""Share of the demonstrations that announce the right change and make it."""
IDLE = 0.5
"""Share of the bad demonstrations that change nothing."""
TINY: dict[str, Any] = {
    "functions": 1,
    "max_lines": 1,
    "kinds": ["comparison"],
    "terse": True,
    "instruction": "Fix calc.py.",
}
"""Options for a tiny model, and of the demonstrations that teach it."""
MOST_CHARACTERS = 2**18
"""Files with more characters count as broken."""
SLOTS = threading.Semaphore(max(os.cpu_count() or 1, 2))
"""Limit on concurrent verdicts. Each starts two processes; with more, they would slow each other down to a timeout."""
PROGRAM = """
import importlib, sys, types
for _name, _text in {files!r}.items():
    with open(sys.path[0] + "/" + _name, "w", encoding="utf-8", newline="") as _file:
        _file.write(_text)
for _name in {files!r}:
    globals()[_name.removesuffix(".py")] = types.SimpleNamespace(**vars(importlib.import_module(_name[:-3])))
"""
"""Writes the modules and imports them. The sandbox passes no modules to tests, so they get objects with the names."""


class Bugfix(ToolTask):
    """The task."""

    def __init__(
        self,
        functions: int = 4,
        bugs: int = 1,
        max_lines: int | None = None,
        kinds: Sequence[BugKind] = BUG_KINDS,
        terse: bool = False,
        instruction: str | None = None,
        time_s: float = 10.0,
        sandbox: SandboxKind = "bubblewrap",
    ) -> None:
        """Args:
            functions: number of functions in a repository.
            bugs: number of functions with a bug.
            max_lines: limit on the lines of a function's body; None: no limit.
            kinds: kinds of bugs, out of ``operator``, ``comparison``, ``constant``, ``name`` and ``swap``.
            terse: no docstrings, one-letter arguments, and neither README nor examples: for tiny models.
            instruction: the first message; the default instructs a general model.
            time_s: seconds for the hidden tests.
            sandbox: sandbox for the hidden tests, as in ``unit_tests``.

        Raises ``ValueError`` for invalid options, and ``TaskError`` if the sandbox does not work here.
        """
        if not 1 <= bugs <= functions:
            raise ValueError(f"1 <= bugs <= functions must hold, not {bugs=}, {functions=}")
        if not kinds or not set(kinds) <= set(BUG_KINDS):
            raise ValueError(f"kinds must be some of {', '.join(BUG_KINDS)}, not {kinds}")
        self._shape = Shape(functions=functions, bugs=bugs, max_lines=max_lines, kinds=tuple(kinds), terse=terse)
        self._instruction = instruction or INSTRUCTION.format(
            bugs="one function returns" if bugs == 1 else f"{bugs} functions return",
            readme="" if terse else README_HINT,
        )
        self._limits = Limits(time_s)
        check_judge(sandbox)
        self._kind = sandbox
        make_repository(random.Random(0), self._shape)  # raises if no repository fits the options

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` rows of the split; row ``i`` is the same for every size. Repositories may repeat."""

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
        """Write the repository into the work folder, and return the shell."""
        for name, text in prompt.fields["files"].items():
            sandbox.write_file(name, text.encode())

        def shell(command: str) -> str:
            """Run a command in the repository's folder and return what it prints.

            command: for bash, such as ls or cat README.md
            """
            return shown(sandbox.run(command))

        return [shell]

    def judge(self, prompt: Prompt, text: str, sandbox: BlockingSandbox) -> RewardResult:  # type: ignore[override]
        """Score the files in the sandbox; the answer's text does not matter."""
        return self.judge_files(prompt, left_in(sandbox.read_file, prompt.fields["files"]))

    def judge_files(self, prompt: Prompt, left: Mapping[str, str] | None) -> RewardResult:
        """Score the final modules of an episode; None if one is missing, or is not text. Raises ``SandboxError``."""
        before = {name: text for name, text in prompt.fields["files"].items() if _is_module(name)}
        if left is None or left == before:  # unchanged modules fail their tests, as make_repository checked
            return RewardResult(0.0, {"changed": float(left != before)})
        tests = tuple(prompt.fields["tests"].values())
        readable = all(len(text) <= MOST_CHARACTERS for text in left.values())
        passes = readable and all(_passing(tuple(left.items()), tests, limits=self._limits, kind=self._kind))
        return RewardResult(float(passes), {"changed": 1.0})

    def demonstration(self, rng: random.Random, clean: bool) -> list[Message]:
        """A conversation about a repository of the train split, up to the reply that it teaches.

        Demonstrations teach a policy that can work carefully but mostly does not. A careful one (all ``clean`` ones,
        and a share ``CAREFUL`` of the others) names the needed change and makes it. The others announce nothing: half
        change nothing, and half make a random plausible change. Only careful work is rewarded, so reinforcement finds
        it.
        """
        right = clean or rng.random() < CAREFUL
        made = self._draw(rng, "train")
        _, fix = rng.choice(sorted(made.fixes.items(), key=lambda item: item[0]))
        source = made.files[MODULE]
        others = [edit for edit in edits(source, self._shape.kinds) if edit.applied(source) != fix.applied(source)]
        edit = fix if right or not others else rng.choice(others)
        reply = rng.choice(REPLIES)
        messages: list[Message] = [
            {"role": "user", "content": self._instruction},
            call_message(0, TOOL, {"command": f"cat {MODULE}"}),
        ]
        if reply == "look":
            return messages
        messages.append(result_message(0, source.rstrip("\n")))
        if right or rng.random() >= IDLE:
            announced = f"Needs {edit.text}. " if edit == fix else None
            command = f"sed -i '{edit.sed(source)}' {MODULE}"
            messages.append(call_message(1, TOOL, {"command": command}, content=announced))
            if reply == "edit":
                return messages
            messages.append(result_message(1, ""))
        return [*messages, {"role": "assistant", "content": DONE}]

    def _draw(self, rng: random.Random, split: Split) -> Repository:
        while True:
            made = make_repository(rng, self._shape)
            if is_held_out(made.files[MODULE]) == (split == "eval"):
                return made


def demonstrations(split: Split, size: int, clean: bool = False) -> Iterator[dict[str, Any]]:
    """Yield rows for `model.warm_start.data`: conversations that end with a reply to learn."""
    bugfix, rng = Bugfix(**TINY), random.Random(0)
    for _ in range(size):
        yield {"messages": bugfix.demonstration(rng, clean)}


def shown(result: CommandResult) -> str:
    """A command's result in the form that the policy sees."""
    output = result.output.rstrip("\n")
    if result.stopped:
        return f"{output}\n(stopped: {result.stopped})".lstrip("\n")
    return output if result.status == 0 else f"{output}\n(exit status {result.status})".lstrip("\n")


def left_in(read: Callable[[str], bytes], files: Mapping[str, str]) -> dict[str, str] | None:
    """Read the modules; None if one is missing or is not text. Raises ``SandboxError``."""
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


@functools.lru_cache(maxsize=1024)  # a group's rollouts often leave the same files
def _passing(
    files: tuple[tuple[str, str], ...], tests: tuple[str, ...], limits: Limits, kind: SandboxKind
) -> tuple[bool, ...]:
    """Run the tests on these modules in a new sandbox; True for each test that passes.

    The modules' process gets only the modules. The tests run in another process, and only ask the first one to call
    functions. So no text in a file can read or change a test, or report that it passed.
    """
    with SLOTS:
        return tuple(
            run(PROGRAM.format(files=dict(files)), [Check(test) for test in tests], limits=limits, sandbox_kind=kind)
        )
