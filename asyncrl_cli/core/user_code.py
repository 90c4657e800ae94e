"""Imports the user's code in this process, and reports hangs and calls of ``sys.exit`` as errors with their line."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, ModuleType
from typing import Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.suggest import did_you_mean

FIRST_NOTICE_S = 5.0
"""Seconds before the first notice; the time to the next one doubles each time."""
CODE_S = 120.0
"""Seconds that importing and constructing the user's objects may take."""
HIDEABLE = sys.stdlib_module_names | {
    *("accelerate", "datasets", "deepspeed", "fastapi", "fsspec", "httpx", "huggingface_hub", "jinja2"),
    *("mlflow", "numpy", "openai", "peft", "PIL", "psutil", "pyarrow", "pydantic", "ray", "requests", "rich"),
    *("safetensors", "sympy", "tokenizers", "torch", "transformers", "typer", "uvicorn", "vllm", "yaml"),
}
"""Python's own modules, and the libraries that asyncrl and its engines import."""


class _TooLong(BaseException):
    """Not an ``Exception``, which user code may catch."""


@contextmanager
def user_code(description: str, notice: Callable[[str], None], limit_s: float | None = None) -> Iterator[None]:
    """Run a block that executes user code. ``description`` names it, such as "importing the task".

    While it runs, ``notice`` gets its description and the current line of the user's code. Raises ``ConfigError`` if
    the block runs for more than ``limit_s`` seconds or calls ``sys.exit``. Outside the main thread there are neither
    notices nor a limit, because Python delivers signals only to the main thread.
    """
    started = time.monotonic()
    next_notice_s = min(FIRST_NOTICE_S, limit_s or FIRST_NOTICE_S)
    interval_s = next_notice_s

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal next_notice_s
        waited_s = time.monotonic() - started
        if limit_s is not None and waited_s >= limit_s:
            raise _TooLong(_line(walk_stack(frame)))
        if waited_s >= next_notice_s:
            next_notice_s *= 2
            limit = f" of at most {limit_s:.0f} s" if limit_s is not None else ""
            user_line = _own_line(walk_stack(frame))
            notice(
                f"{description} takes long: {waited_s:.0f} s{limit}" + (f", now at {user_line}" if user_line else "")
            )

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        outer_handler = signal.signal(signal.SIGALRM, look)
        outer_s, outer_interval_s = signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield
    except SystemExit as error:
        raise ConfigError(
            f"{description} called sys.exit({'' if error.code is None else repr(error.code)})",
            location=_line(reversed(list(walk_tb(error.__traceback__)))),
            hint='remove the call, or put it below `if __name__ == "__main__":`',
        ) from None
    except _TooLong as error:
        raise ConfigError(
            f"{description} took more than {limit_s:.0f} s",
            location=str(error),
            hint="move slow work out of the module's top level and out of the constructor",
        ) from None
    finally:
        if in_main_thread:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, outer_handler)
            if outer_s:  # an outer timer continues
                left_s = outer_s - (time.monotonic() - started)
                signal.setitimer(signal.ITIMER_REAL, max(left_s, 0.001), outer_interval_s)


def _line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost line in the user's own code, otherwise the innermost of all. ``frames``: the innermost first, each
    with its line."""
    frames = list(frames)
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames]
    return _own_line(frames) or (lines or ["unknown:0"])[0]


def _own_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        if _is_own(file := frame.f_code.co_filename):
            return f"{file}:{line}"
    return ""


def _is_own(file: str) -> bool:
    """True if a file belongs neither to Python, nor to an installed package or its commands, nor to asyncrl."""
    library_folders = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts"))
    return not file.startswith(("<", *library_folders, __file__.rpartition("/core/")[0]))


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's own code that an exception passed, as ``file:line``; empty if none."""
    return _own_line(reversed(list(walk_tb(error.__traceback__))))


def defined_at(function: object) -> str:
    """The first line of a function in the user's own code, as ``file:line``; empty for any other object."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code and _is_own(code.co_filename) else ""


def import_named(
    target: str, folder: Path | None, location: str, hint: str, error_type: type[ConfigError] = ConfigError
) -> Any:
    """The object that a spec names as ``module:name``; the name may be a dotted path of attributes.

    The module is searched in ``folder``, if given, before Python's path. Raises ``error_type`` at ``location`` if it
    cannot be imported or lacks the name; ``hint`` describes the names that are allowed there.
    """
    if (imported := as_import(target)) != target:
        message = f"{target} is not of the form module:name"
        raise error_type(message, location=location, hint=f"write it like an import, as `{imported}`")
    module_name, _, path = target.partition(":")
    value: Any = _module(module_name, folder=folder and folder.resolve(), location=location, error_type=error_type)
    where = getattr(value, "__file__", None) or module_name
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            public = [attribute for attribute in vars(value) if not attribute.startswith("_")]
            message = f"module {module_name} ({where}) has no {path!r}"
            raise error_type(message, location=location, hint=did_you_mean(name, public, hint)) from None
    return value


def missing_name(target: str, folder: Path) -> tuple[str, str] | None:
    """The reason why ``import_named`` would not find a ``module:name``, and a hint; None if there is none.

    Only reads the module's file, and imports nothing. So None is also the answer where only an import can tell: for
    compiled modules, ``from … import *``, and names that the module makes at run time.
    """
    module_name, _, path = target.partition(":")
    name = path.partition(".")[0]
    folders: Sequence[str] = [str(folder.resolve()), *sys.path]
    file = ""
    for package in accumulate(module_name.split("."), "{}.{}".format):
        module = PathFinder.find_spec(package, folders)
        if module is None and "." not in package:
            with suppress(ValueError):  # a loaded module without a spec
                module = importlib.util.find_spec(package)  # built in, or installed by a finder of its own
        if module is None:
            return f"no module {module_name!r} in {folder} or on Python's path", _place(module_name)
        folders, file = module.submodule_search_locations or [], module.origin or ""
    if not file.endswith(".py"):
        return None
    source = Path(file).read_bytes()
    try:
        defined = list(_defined(ast.parse(source).body))
    except (SyntaxError, ValueError) as error:
        return f"module {module_name} ({file}) is not valid Python: {error}", "correct it"
    dynamic = {"*", "__getattr__"} & {*defined} or re.search(rb"\b(globals|vars|exec|setattr)\(", source)
    if name in defined or dynamic or PathFinder.find_spec(f"{module_name}.{name}", folders):
        return None
    return f"module {module_name} ({file}) has no {path!r}", did_you_mean(name, defined, "correct the name")


def _defined(statements: Iterable[ast.AST]) -> Iterator[str]:
    """The names that statements define, but not the names inside functions and classes."""
    for node in statements:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.alias():
                yield node.asname or node.name.partition(".")[0]
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case _:
                yield from _defined(ast.iter_child_nodes(node))


def as_import(target: str) -> str:
    """The target in the form `module:name`, if it names a file (`rewards/mine.py:reward`) or has no colon."""
    module, colon, name = target.partition(":")
    if not colon and not module.endswith(".py"):
        module, _, name = module.rpartition(".")
    return f"{module.removesuffix('.py').strip('./').replace('/', '.')}:{name or 'NAME'}"


def _module(name: str, folder: Path | None, location: str, error_type: type[ConfigError]) -> ModuleType:
    if folder is not None:
        _refuse_hiding(folder, error_type)
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing_module = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        within = f" in {folder}" if folder else ""
        message = f"importing module {name} failed: {type(error).__name__}: {error}"
        hint = f"fix the import; full traceback: python -c 'import {name}'{within}"
        if missing_module and f"{name}.".startswith(f"{missing_module}."):
            message = f"no module {name!r}{within and f'{within} or'} on Python's path"
            hint = _place(name)
        elif missing_module:
            message = f"module {name} needs {missing_module!r}, which is not installed"
            hint = "install it in this environment"
        raise error_type(message, location=location, hint=hint) from error


def _refuse_hiding(folder: Path, error_type: type[ConfigError]) -> None:
    """Refuse a module that would be imported in place of Python's or of a library's module, in workers, too."""
    for entry in sorted(folder.glob("*")):
        if entry.stem == "test" or entry.stem not in HIDEABLE:
            continue  # no library imports Python's own tests
        if entry.suffix == ".py" or (entry / "__init__.py").is_file():
            library = "Python's" if entry.stem in sys.stdlib_module_names else "the installed"
            fault = f"{entry.name} next to the spec hides {library} module `{entry.stem}`"
            raise error_type(fault, location=str(entry), hint="rename it, and its imports")


def _place(module: str) -> str:
    return f"put {module.replace('.', '/')}.py next to the spec file, or install the package that has it"
