"""From ``task.use`` to a task.

Three forms: the name of a ready task, ``module:Class`` (constructed with ``task.options``) and
``module:function`` (a bare reward). Whatever is wrong is a ``TaskError`` that names the field and the mend,
raised before anything heavy starts.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl_cli.spec.sections import TaskSpec
from asyncrl_cli.tasks.base import Task
from asyncrl_cli.tasks.errors import TaskError
from asyncrl_cli.tasks.function_task import FunctionTask

READY = {
    "chain_sum": "asyncrl_cli.tasks.chain_sum:ChainSum",
    "spell_backward": "asyncrl_cli.tasks.spell_backward:SpellBackward",
}
"""The tasks that come with asyncrl."""


def load_task(spec: TaskSpec, search_path: Path) -> Task:
    """The task that ``spec`` names.

    ``search_path`` is the folder of the spec file: modules are looked for there first, as Python does for a
    script. Raises ``TaskError``.
    """
    target = READY.get(spec.use, spec.use)
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise TaskError(
            f"task.use: there is no ready task {spec.use!r}",
            mend=f"{_did_you_mean(spec.use, READY)}ready tasks are {', '.join(READY)}; "
            "your own is module:Class or module:function",
        )
    found = _attribute(_module(module_name, search_path), module_name, name)
    if isinstance(found, type):
        return _construct(found, spec)
    if callable(found):
        return _wrap(found, spec)
    raise TaskError(
        f"task.use: {target} is neither a class nor a function but {type(found).__name__}",
        mend="name a class with a method reward(prompt, response, finished), or a function f(prompt, response)",
    )


def _module(name: str, search_path: Path) -> Any:
    folder = str(search_path.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TaskError(
                f"task.use: no module {name!r} in {folder} or on Python's path",
                mend=f"put {name.replace('.', '/')}.py beside the spec file, or install the package that has it",
            ) from None
        raise TaskError(
            f"task.use: module {name} needs {error.name!r}, which is not installed",
            mend="install it in this environment",
        ) from error
    except Exception as error:
        raise TaskError(
            f"task.use: importing module {name} failed: {type(error).__name__}: {error}",
            mend=f"mend the module; python -c 'import {name}' in {folder} shows the whole traceback",
        ) from error


def _attribute(module: Any, module_name: str, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        public = [known for known in vars(module) if not known.startswith("_")]
        where = getattr(module, "__file__", None) or module_name
        raise TaskError(
            f"task.use: module {module_name} ({where}) has no {name!r}",
            mend=f"{_did_you_mean(name, public)}it must be a Task class or a reward function of that module",
        ) from None


def _construct(task_class: type, spec: TaskSpec) -> Task:
    if not callable(getattr(task_class, "reward", None)):
        raise TaskError(
            f"task.use: {spec.use} is not a task: class {task_class.__name__} has no method reward",
            mend="give it reward(self, prompt, response, finished) -> float",
        )
    signature = inspect.signature(task_class)
    try:
        signature.bind(**spec.options)
    except TypeError as error:
        accepted = list(signature.parameters)
        arguments = signature.replace(return_annotation=signature.empty)
        unknown = [option for option in spec.options if option not in accepted]
        hint = "".join(_did_you_mean(option, accepted) for option in unknown)
        raise TaskError(
            f"task.options do not fit {spec.use}: {error}",
            mend=f"{hint}it is constructed as {task_class.__name__}{arguments}",
        ) from None
    try:
        task = task_class(**spec.options)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"task.options do not fit {spec.use}: {type(error).__name__}: {error}",
            mend="change the option that it names",
        ) from error
    assert isinstance(task, Task)
    return task


def _wrap(function: Any, spec: TaskSpec) -> Task:
    if spec.options:
        raise TaskError(
            f"task.options: a reward function takes none, and {spec.use} is one",
            mend="remove task.options, or name a Task class",
        )
    if inspect.iscoroutinefunction(function):
        raise TaskError(
            f"task.use: {spec.use} is an async function", mend="make it a plain function that returns a number"
        )
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise TaskError(
            f"task.use: {spec.use} cannot be called as f(prompt, response): {error}",
            mend="give it two arguments: the prompt's row as a dict, and the response's text",
        ) from None
    except ValueError:
        pass  # a builtin without a signature; the first reward will show
    return FunctionTask(function, spec.use)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}? " if close else ""
