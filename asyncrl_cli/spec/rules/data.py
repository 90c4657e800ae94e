"""Rules for the task or mix of tasks, and for the prompts: their sources and their order."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator

from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.core.user_code import as_import
from asyncrl_cli.spec.base import MODULE_NAME
from asyncrl_cli.spec.data_sources import HUB, names_a_file, source_type_of, template_columns
from asyncrl_cli.spec.inputs import SplitSpec
from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import all_tasks, members, rule, warning
from asyncrl_cli.spec.sections import ExperimentSpec

READY_TASKS = {
    "chain_sum": "asyncrl_cli.tasks.ready.chain_sum:ChainSum",
    "math": "asyncrl_cli.tasks.ready.math_answers:MathAnswers",
    "exact": "asyncrl_cli.tasks.ready.matching:ExactMatch",
    "unit_tests": "asyncrl_cli.tasks.ready.unit_tests:UnitTests",
    "judge": "asyncrl_cli.tasks.ready.judge:Judge",
    "verifiers": "asyncrl_cli.tasks.ready.verifiers_adapter:VerifiersEnvironment",
    "external": "asyncrl_cli.tasks.ready.external:External",
    "command": "asyncrl_cli.tasks.ready.command:Command",
    "harbor": "asyncrl_cli.tasks.ready.harbor:Harbor",
    "prompts": "asyncrl_cli.tasks.ready.matching:Prompts",
}
"""The ready tasks and their classes."""
RESERVED_TASKS = {
    **{
        name: f"the metric reward/{name} covers all tasks together"
        for name in ("mean", "std", "correct", "masked_rollouts", "uniform_groups")
    },
    "outside": "uids of prompts from outside programs begin with it",
}
"""Names that no task of a mix may have, and why."""
EXTERNAL = "external"
"""The ready task that programs outside of the run play."""
GYM = "gym/"
"""Prefix of the names of reasoning-gym data sets."""
HUB_ID = re.compile(f"{HUB}[A-Za-z0-9_][\\w.-]*(/[\\w.-]+)?(@\\S+)?")
ROW_KEYS = ("prompt_column", "uid_column", "template", "image_column", "system")
"""Keys of a split that say how its rows become prompts."""
SOURCES = (
    "name .jsonl, .json, .parquet or .csv files (relative to the spec; text also as .gz), `hf:owner/name`, or "
    "`module:function`"
)

REMOVED_TASKS = {
    "regex": "write a reward function: return float(bool(re.search(prompt['pattern'], response)))",
    "shapes": "`asyncrl init vision` has it: use shapes:Shapes",
}
"""Former ready tasks, and what replaces them."""


@rule
def one_task_or_mix(spec: ExperimentSpec) -> Iterator[Problem]:
    """Exactly one of `task.use` and `task.mix` is given. Tasks of a mix have different names, and bring the prompts."""
    for key, task in all_tasks(spec).items():
        if task.use is None and not task.mix:
            yield Problem(key, "missing", f"give {key}.use (one task) or {key}.mix (several)")
        if task.mix and task.use is not None:
            yield Problem(f"{key}.use", f"cannot be combined with {key}.mix", "set one of the two to null")
        if task.mix and task.options:
            yield Problem(
                f"{key}.options", f"cannot be combined with {key}.mix", "give options to the members of the mix"
            )
        if task.mix and task.tools is not None:
            yield Problem(f"{key}.tools", f"cannot be combined with {key}.mix", "give tools to the members of the mix")
        names = [member.name for member in task.mix]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield Problem(
                    f"{key}.mix.{index}.name", f"`{name}` is the name of another task, too", "use another name"
                )
            if name in RESERVED_TASKS:
                message = f"`{name}` is reserved: {RESERVED_TASKS[name]}"
                yield Problem(f"{key}.mix.{index}.name", message, "use another name")
    for split_name, split in (("train", spec.data.train), ("eval", spec.data.eval)):
        if spec.task.mix and split is not None and split.path is not None:
            hint = f"give the file to a member, as task.mix.0.{split_name}.path, and only a size here"
            yield Problem(f"data.{split_name}.path", "cannot be combined with task.mix", hint)
    for name, each in spec.evaluation.sets.items():
        if name == "offline":
            message = f"`{name}` is reserved: evaluations by `asyncrl evaluate` have this name"
            yield Problem(f"evaluation.sets.{name}", message, "use another name")
        if (each.task or spec.task).mix and each.data.path is not None:
            hint = f"give the set one task, as evaluation.sets.{name}.task.use, or only a size here"
            yield Problem(f"evaluation.sets.{name}.data.path", "cannot be combined with a mix of tasks", hint)


@rule
def container_image(spec: ExperimentSpec) -> Iterator[Problem]:
    """A container has an image with well-formed columns; other sandboxes have neither image nor runtime."""
    for path, task in all_tasks(spec).items():
        sandbox = task.sandbox
        if "harbor" in (task.use, *(member.use for member in task.mix)) and (
            sandbox is None or sandbox.kind != "container" or "{image}" not in (sandbox.image or "")
        ):
            message = "the task `harbor` works in containers, with an image for each row"
            yield Problem(f"{path}.sandbox", message, 'set it to {kind: container, image: "{image}"}')
            continue
        if sandbox is None:
            continue
        if sandbox.kind != "container":
            for key in ("image", "runtime"):
                if getattr(sandbox, key) is not None:
                    hint = "set kind: container, or remove it"
                    yield Problem(f"{path}.sandbox.{key}", f"`{sandbox.kind}` has no {key}", hint)
        elif sandbox.image is None:
            yield Problem(f"{path}.sandbox.image", "missing", "name an image, or a column of the data as `{image}`")
        elif "{" in sandbox.image:
            try:
                template_columns(sandbox.image)
            except ValueError as error:
                yield Problem(f"{path}.sandbox.image", str(error), "write a column's name, as in `{image}`")


@rule
def task_name(spec: ExperimentSpec) -> Iterator[Problem]:
    """`use` is a ready task or a well-formed `module:name`; the module is imported at launch."""
    for key, task in (all_tasks(spec) | members(spec)).items():
        path, use = f"{key}.use", task.use
        if use is None:
            continue
        if ":" in use:
            if (imported := as_import(use)) != use or not re.fullmatch(MODULE_NAME, use):
                hint = f"write it like an import, as `{imported}`"
                yield Problem(path, f"`{use}` is not of the form module:name", hint)
        elif use not in READY_TASKS and not use.startswith(GYM):
            fallback_hint = f"ready tasks are {', '.join(READY_TASKS)} and {GYM}<data set>; yours is `module:name`"
            fallback_hint += " (`asyncrl init --list` has examples)"
            if use in REMOVED_TASKS:
                yield Problem(path, f"the task `{use}` left asyncrl", REMOVED_TASKS[use])
                continue
            if "." in use:
                fallback_hint = f"yours is `{as_import(use)}`, module and name as in an import"
            yield Problem(path, f"there is no ready task `{use}`", did_you_mean(use, READY_TASKS, fallback_hint))


@rule
def external_task(spec: ExperimentSpec) -> Iterator[Problem]:
    """The task `external` has no evaluations, because the run does not start its programs; it is not part of a mix and
    has no images. Without `data.train.path`, programs bring their prompts, each for one rollout."""
    for key, member in members(spec).items():
        if member.use == EXTERNAL:
            yield Problem(f"{key}.use", "`external` cannot be part of a mix", "train on it in another run")
    for name, evaluation_set in spec.evaluation.sets.items():
        use = spec.task.use if evaluation_set.task is None else evaluation_set.task.use
        if use == EXTERNAL:
            key = f"evaluation.sets.{name}.task"
            yield Problem(key, "the run cannot start the programs of `external`", "give the set a task of its own")
    if spec.task.use != EXTERNAL:
        return
    if spec.data.eval is not None:
        hint = "set data.eval to null; evaluation.sets can have tasks of their own"
        yield Problem("data.eval", "the run cannot start the programs of `external`, so it cannot evaluate them", hint)
    if spec.model.max_images:
        yield Problem("model.max_images", "sessions of `external` have no images yet", "set it to 0")
    if spec.task.tools is not None or spec.task.sandbox is not None:
        key = "task.tools" if spec.task.tools is not None else "task.sandbox"
        yield Problem(key, "programs of `external` run elsewhere", "remove it")
    if spec.data.train.path is None and spec.rollout.group_size > 1:
        message = f"{spec.rollout.group_size}, and programs bring their own prompts, each for one rollout"
        hint = "set it to 1 with algorithm.preset single_rollout, or give the run prompts in data.train.path"
        yield Problem("rollout.group_size", message, hint)
    if spec.data.train.path is None and spec.stop.epochs is not None:
        yield Problem("stop.epochs", "programs bring the prompts, so there are no epochs", "set stop.steps")
    if spec.data.filter is not None:
        yield Problem("data.filter", "programs of `external` choose when a prompt is played", "remove it")
    if not spec.rollout.gateway.port:
        hint = "set a port if programs must know the address before the run starts"
        yield warning("rollout.gateway.port", "0: the address is only in the run's sessions.json", hint)


@rule
def splits(spec: ExperimentSpec) -> Iterator[Problem]:
    """Each split has a `path` or a `size`. Its files or folder exist, and are named once. `image_column` needs
    `model.max_images`. `data.eval` and `data.train` have no source in common."""
    for key, split in all_splits(spec):
        paths = split.paths
        if not paths and split.size is None and ".mix." not in key:
            yield Problem(key, "missing", "give path (a file), or size (how many prompts the task makes)")
        for path in paths:
            if fault := _source_fault(path, several=len(paths) > 1):
                yield Problem(f"{key}.path", fault, SOURCES)
        for path in (path for path, count in Counter(paths).items() if count > 1):
            yield Problem(f"{key}.path", f"{path} is named twice", "name each file once: a prompt has one uid")
        if split.image_column is not None and not spec.model.max_images:
            hint = "set it to the number of images that a row may have"
            yield Problem("model.max_images", f"0, and {key}.image_column names a column of images", hint)
    members_splits = [(f"task.mix.{index}", member.train, member.eval) for index, member in enumerate(spec.task.mix)]
    for key, train, held_out in [("data", spec.data.train, spec.data.eval), *members_splits]:
        if train is None or held_out is None or not _may_overlap(train, held_out):
            continue
        if shared_paths := sorted(set(train.paths) & set(held_out.paths)):
            subject = (
                "the held-out prompts are"
                if shared_paths == sorted(held_out.paths)
                else f"the prompts of {shared_paths[0]} are"
            )
            yield warning(f"{key}.eval.path", f"{subject} also trained on", "use another file")


def _may_overlap(first: SplitSpec, second: SplitSpec) -> bool:
    """True if splits of one source have rows in common. Two different slices count as distinct."""
    parts = [(split.split or "").partition("[") for split in (first, second)]
    same_split = parts[0][0] == parts[1][0] and (parts[0] == parts[1] or not (parts[0][1] and parts[1][1]))
    return first.config == second.config and same_split


def _source_fault(path: str, several: bool) -> str:
    """The mistake in one source of a split, or empty text. ``several``: the split has several sources."""
    source_type = source_type_of(path)
    if several and source_type in ("hub", "function"):
        return f"only files can be joined, and {path} is not a file; task.mix joins any sources"
    if not names_a_file(path):
        return ""
    if not os.path.exists(path):
        return f"no file matches {path}" if glob.has_magic(path) else f"{path} does not exist"
    if os.path.isdir(path):
        return f"{path} is a folder; name its files, such as *.parquet (Dataset.to_parquet writes one)"
    return f"unknown kind of file: {os.path.basename(path)}" if source_type is None else ""


@rule
def rows_to_prompts(spec: ExperimentSpec) -> Iterator[Problem]:
    """A split's `template` names columns, in place of `prompt_column`. Only data sets have `config` and `split`, and a
    hub id needs a `split`. Keys about rows, such as `prompt_column` and `system`, need a `path`."""
    for key, split in all_splits(spec):
        first_path = next(iter(split.paths), None)
        source_type = None if first_path is None else source_type_of(first_path)
        if split.template is not None:
            try:
                template_columns(split.template)
            except ValueError as error:
                hint = 'write columns in braces, as in "Q: {question}"; `{{` is a brace'
                yield Problem(f"{key}.template", f"invalid template: {error}", hint)
            if split.prompt_column != SplitSpec.model_fields["prompt_column"].default:
                message = "has no effect: the template names the columns of the prompt"
                yield warning(f"{key}.prompt_column", message, "remove it, or remove the template")
        for name in ROW_KEYS if split.path is None else ():
            if getattr(split, name) != SplitSpec.model_fields[name].default:
                hint = "give a path (with a mix of tasks: in a member's split), or remove it"
                yield Problem(f"{key}.{name}", "is about the rows of a path, and this split has no path", hint)
        if source_type == "hub" and not HUB_ID.fullmatch(first_path or ""):
            yield Problem(f"{key}.path", f"`{first_path}` is not a hub id", "write it as hf:owner/name")
        if source_type == "hub" and split.split is None:
            yield Problem(f"{key}.split", "missing: a hub data set needs a split", "set it, for example to `train`")
        if source_type != "hub" and split.config is not None:
            yield Problem(f"{key}.config", "only hub data sets (`hf:owner/name`) have a config", "remove it")
        is_task_split = key.startswith("evaluation.") and ".mix." not in key and split.path is None
        if is_task_split and split.split not in (None, "train", "eval"):
            yield Problem(f"{key}.split", f"a task has no split `{split.split}`", "use `train` or `eval`")
        elif not is_task_split and source_type != "hub" and split.split is not None:
            yield Problem(f"{key}.split", "only hub data sets have splits", "remove it")


@rule
def mcp_servers(spec: ExperimentSpec) -> Iterator[Problem]:
    """An MCP server has a `command` or a `url`, and only settings of that kind."""
    for location, task in (all_tasks(spec) | members(spec)).items():
        for name, server in (task.tools.mcp if task.tools is not None else {}).items():
            key = f"{location}.tools.mcp.{name}"
            if (server.command is None) == (server.url is None):
                hint = "set `command` for a stdio server, or `url` for a streamable HTTP server"
                yield Problem(key, "needs one of `command` and `url`", hint)
            for setting in ("args", "env") if server.command is None else ("headers",):
                if getattr(server, setting):
                    yield Problem(f"{key}.{setting}", "not a setting of this kind of server", "remove it")


@rule
def evaluation_samples(spec: ExperimentSpec) -> Iterator[Problem]:
    """In an evaluation set, `samples` above 1 needs `greedy: false`: all greedy responses are equal."""
    for name, evaluation_set in spec.evaluation.sets.items():
        if evaluation_set.greedy and evaluation_set.samples > 1:
            hint = "set greedy to false, or remove samples"
            yield Problem(f"evaluation.sets.{name}.samples", "all greedy responses are equal", hint)


@rule
def held_out_prompts(spec: ExperimentSpec) -> Iterator[Problem]:
    """Without `data.eval`, `evaluation.prompts`, `evaluation.samples` and `checkpoints.keep_best` have no effect, and
    `evaluation.every` needs `evaluation.sets`."""
    if spec.data.eval is not None:
        return
    for key, is_set in {
        "evaluation.every": spec.evaluation.every > 0 and not spec.evaluation.sets,
        "evaluation.prompts": spec.evaluation.prompts is not None,
        "evaluation.samples": spec.evaluation.samples > 1,
        "checkpoints.keep_best": spec.checkpoints.keep_best > 0,
    }.items():
        if is_set:
            yield warning(key, "has no effect: there are no held-out prompts", "set data.eval, or remove it")


@rule
def special_tokens(spec: ExperimentSpec) -> Iterator[Problem]:
    """An evaluation set's task has the same `special_tokens` as the run: engines decode all responses alike."""
    for name, evaluation_set in spec.evaluation.sets.items():
        set_tokens = evaluation_set.task.special_tokens if evaluation_set.task is not None else None
        if set_tokens is not None and set_tokens != (spec.task.special_tokens or "hidden"):
            message = "the engines decode all responses as task.special_tokens says"
            yield Problem(f"evaluation.sets.{name}.task.special_tokens", message, "remove it, or set both alike")


def all_splits(spec: ExperimentSpec) -> Iterator[tuple[str, SplitSpec]]:
    """Yield every split of a spec with its key."""
    yield "data.train", spec.data.train
    if spec.model.warm_start is not None:
        yield "model.warm_start.data", spec.model.warm_start.data
    if spec.data.eval is not None:
        yield "data.eval", spec.data.eval
    for key, member in members(spec).items():
        for name, split in (("train", member.train), ("eval", member.eval)):
            if split is not None:
                yield f"{key}.{name}", split
    for name, evaluation_set in spec.evaluation.sets.items():
        yield f"evaluation.sets.{name}.data", evaluation_set.data
