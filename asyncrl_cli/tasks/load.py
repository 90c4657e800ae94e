"""Load the task that ``task.use`` or ``task.mix`` names.

``use`` is the name of a ready task, ``gym/<data set>``, or an object in the user's module:

- ``module:Class`` with ``reward``, ``rewards``, ``run`` or ``environment``: a task, constructed with ``task.options``;
- ``module:Class`` with ``reset`` and ``step``: an environment, constructed with the options for each episode;
- ``module:function`` with a parameter ``response``: a reward; with ``responses``: a reward for whole groups;
- ``module:function``, async, with parameters (prompt, model): an agent.

Every mistake is a ``TaskError`` with the field and a hint, raised before anything heavy starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.spec.inputs import TaskMember, TaskSpec
from asyncrl_cli.spec.rules.data import GYM, READY_TASKS
from asyncrl_cli.tasks.base import is_episodic, scores_groups
from asyncrl_cli.tasks.episode_sandbox import check_sandbox
from asyncrl_cli.tasks.function_task import (
    RESPONSE,
    RESPONSES,
    ROW,
    AgentFunction,
    EnvironmentClass,
    FunctionTask,
    GroupFunction,
)
from asyncrl_cli.tasks.mcp_tools import McpServers
from asyncrl_cli.tasks.mix import MixTask, OneCall
from asyncrl_cli.tasks.ready.gym import Gym
from asyncrl_cli.tasks.tools import ToolTask

USE, OPTIONS = "task.use", "task.options"
ANY_KIND = (
    "name a class with a method reward(prompt, response, finished), rewards(prompt, responses), run(prompt, model) or "
    "environment(prompt), an environment class with reset and step, a function f(prompt, response) or "
    "f(prompt, responses), or an async function f(prompt, model)"
)
EPISODES_ARE_SINGLE = "rollouts of agents and environments are episodes, which are scored one by one"


def load_task(spec: TaskSpec, search_path: Path, location: str = "task", connect: bool = False) -> Any:
    """Load the task of ``spec``: a ``Task``, an ``AgentTask``, an ``EnvironmentTask`` or a ``TaskMix``.

    ``search_path`` is the spec file's folder; modules are first searched there, as Python does for a script.
    ``location``: the section's key. ``connect``: connect to the task's MCP servers, which rewards do not need.
    Raises ``TaskError``.
    """

    def load(section: TaskSpec | TaskMember, use: str, location: str) -> Any:
        task = load_one(use, section.options, search_path, location=location)
        if section.tools is None or not connect:
            return task
        episodic = is_episodic(task)
        plays_itself = episodic and getattr(type(task), "environment", None) is not ToolTask.environment
        if plays_itself or scores_groups(task):
            reason = "plays its episodes itself" if plays_itself else "scores whole groups"
            problem = f"{use} {reason}, so it cannot be given tools"
            hint = "connect to the servers in its own code, or use a ToolTask or a task with a reward"
            raise TaskError(problem, location=f"{location}.tools", hint=hint)
        servers = McpServers(section.tools.mcp, search_path, location=f"{location}.tools.mcp")
        if not episodic:
            return OneCall(task, servers)
        task.mcp_servers = servers
        return task

    if spec.mix:
        members = {
            member.name: load(member, member.use, f"{location}.mix.{index}") for index, member in enumerate(spec.mix)
        }
        if episodic := [name for name, member in members.items() if is_episodic(member)]:
            for index, (name, member) in enumerate(members.items()):
                if scores_groups(member):
                    raise TaskError(
                        f"{name} scores whole groups, but {episodic[0]} plays episodes: {EPISODES_ARE_SINGLE}",
                        location=f"{location}.mix.{index}.use",
                        hint="give it reward(prompt, response, finished), or train on it in another run",
                    )
        task: Any = MixTask(members, spec, search_path)
    elif spec.use is None:
        raise TaskError("the spec names no task", location=f"{location}.use", hint="give task.use or task.mix")
    else:
        task = load(spec, spec.use, location)
    check_sandbox(task, spec.sandbox, location)
    return task


def load_one(use: str, options: Mapping[str, Any], search_path: Path, location: str = "task") -> Any:
    """Load one task. Raises ``TaskError`` with keys below ``location``."""
    try:
        if use.startswith(GYM):
            return _construct(Gym, use, {"data_set": use.removeprefix(GYM), **options}, search_path)
        target = READY_TASKS.get(use, use)
        module_name, colon, name = target.partition(":")
        if not (module_name and colon and name):
            ready_names = f"ready tasks are {', '.join(READY_TASKS)}, {GYM}<data set>; yours is module:name"
            ready_names += " (`asyncrl init --list` has examples)"
            hint = did_you_mean(use, READY_TASKS, ready_names)
            raise TaskError(f"there is no ready task {use!r}", location=USE, hint=hint)
        target_object = import_named(target, search_path, location=USE, hint=ANY_KIND, error_type=TaskError)
        if isinstance(target_object, type):
            return _construct(target_object, use, options, search_path)
        if callable(target_object):
            return _wrap(target_object, use, options)
        message = f"{target} is neither a class nor a function (got {type(target_object).__name__})"
        raise TaskError(message, location=USE, hint=ANY_KIND)
    except TaskError as error:
        # A task does not know its location in the spec, so its errors have keys of the section `task`.
        if error.location.startswith("task."):
            error.location = f"{location}.{error.location.removeprefix('task.')}"
        raise


def _construct(task_class: type, use: str, options: Mapping[str, Any], spec_folder: Path) -> Any:
    """Construct a task of this class, or wrap it if it is an environment class. A parameter ``spec_folder`` gets the
    folder to which paths are relative."""
    methods = [
        name
        for name in ("reward", "rewards", "run", "environment", "reset", "step")
        if callable(getattr(task_class, name, None))
    ]
    if "rewards" in methods and (episodic := {"run", "environment", "reset"}.intersection(methods)):
        raise TaskError(
            f"{use} has rewards for whole groups and {min(episodic)}: {EPISODES_ARE_SINGLE}",
            location=USE,
            hint="return the reward of each episode instead, or give it reward(prompt, response, finished)",
        )
    is_environment = methods == ["reset", "step"]
    if not is_environment and not {"reward", "rewards", "run", "environment"}.intersection(methods):
        lacks = "no method reward, rewards, run or environment, and not both reset and step"
        message = f"{use} is not a task: class {task_class.__name__} has {lacks}"
        raise TaskError(message, location=USE, hint=ANY_KIND)
    if "run" in methods and not inspect.iscoroutinefunction(task_class.run):  # type: ignore[attr-defined]
        raise TaskError(
            f"{use} has a method run that is not async", location=USE, hint="make it async def run(self, prompt, model)"
        )
    signature = inspect.signature(task_class)
    episode_parameters = ("prompt", "sandbox") if is_environment else ()
    further = {name: None for name in episode_parameters if name in signature.parameters}
    if "spec_folder" in signature.parameters and not is_environment:
        options = {"spec_folder": spec_folder, **options}
    try:
        signature.bind(**options, **further)
    except TypeError as error:
        accepted = list(signature.parameters)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        hints = [did_you_mean(option, accepted) for option in options if option not in accepted and not takes_any]
        hints.append(
            f"it is constructed as {task_class.__name__}{signature.replace(return_annotation=signature.empty)}"
        )
        raise TaskError(
            f"the options do not fit {use}: {error}", location=OPTIONS, hint=" ".join(filter(None, hints))
        ) from None
    if is_environment:
        return EnvironmentClass(task_class, options, use)
    try:
        task = task_class(**options)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"the options do not fit {use}: {type(error).__name__}: {error}",
            location=OPTIONS,
            hint="change the option that it names",
        ) from error
    for name in {"reward", "rewards"}.intersection(methods):
        _check_reward(task, use, name)
    return task


def _check_reward(task: Any, use: str, name: str) -> None:
    """Raise ``TaskError`` unless ``reward`` takes (prompt, response, finished), or ``rewards`` takes (prompt,
    responses) with or without ``finished``."""
    called = "reward(prompt, response, finished)" if name == "reward" else "rewards(prompt, responses)"
    try:
        signature = inspect.signature(getattr(task, name))
        signature.bind(None, "", *([True] if name == "reward" or "finished" in signature.parameters else []))
        first_name, second_name = [*signature.parameters, "", ""][:2]
        if first_name in RESPONSE | RESPONSES or second_name in ROW:
            raise TypeError(f"its parameters are {signature}")
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        raise TaskError(
            f"{use}.{name} cannot be called as {called}: {error}",
            location=USE,
            hint="give it these parameters, in this order",
        ) from None


def _wrap(function: Any, use: str, options: Mapping[str, Any]) -> FunctionTask | AgentFunction:
    """Wrap a reward function or an agent as a task."""
    if options:
        raise TaskError(
            f"{use} is a function, which takes no options",
            location=OPTIONS,
            hint="remove task.options, or name a class",
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return FunctionTask(function, use)
    if list(signature.parameters)[1:2] != ["model"]:
        return (GroupFunction if RESPONSES.intersection(signature.parameters) else FunctionTask)(function, use)
    further = {"sandbox": None} if "sandbox" in signature.parameters else {}
    try:
        signature.bind({}, "", **further)
    except TypeError as error:
        raise TaskError(
            f"{use} cannot be called as f(prompt, model): {error}",
            location=USE,
            hint="give an agent two parameters, the prompt's row as a dict and the model (and sandbox, if it needs it)",
        ) from None
    if not inspect.iscoroutinefunction(function):
        raise TaskError(
            f"{use} takes (prompt, model), so it is an agent, but it is not async",
            location=USE,
            hint="make it async def, or name its second parameter response",
        )
    return AgentFunction(function, use)
