"""Rules of prompts: where they come from, how rows become them, and their order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from asyncrl_cli.spec.data_sources import HUB, kind_of, names_a_file, template_columns
from asyncrl_cli.spec.problems import Problem
from asyncrl_cli.spec.rules.base import rule, warning
from asyncrl_cli.spec.sections import ExperimentSpec, SplitSpec

SOURCES = (
    "Name a .jsonl, .parquet or .csv file, or a folder that `datasets` saved; a relative path starts from the spec's "
    "folder. `hf:owner/name` is a data set of the hub, `module:function` a function."
)
SAVED_MARKS = ("dataset_info.json", "dataset_dict.json")
"""One of these lies in a folder that `datasets` saved."""


@rule
def splits(spec: ExperimentSpec) -> Iterator[Problem]:
    """Each split has a `path` or a `size`, its file or folder exists, and `data.eval` is not `data.train`."""
    for key, split in all_splits(spec):
        path = split.path
        if path is None and split.size is None and not key.startswith("task.mix."):
            yield Problem(key, "has neither path nor size", "give a file, or how many prompts the task makes")
        if path is None or not names_a_file(path):
            continue
        kind = kind_of(path)
        found = "is a folder" if os.path.isdir(path) else "is no folder" if os.path.exists(path) else "does not exist"
        if kind is None and found != "does not exist":
            yield Problem(f"{key}.path", f"the name {os.path.basename(path)} does not say what it is", SOURCES)
        elif not (os.path.isdir if kind == "saved" else os.path.isfile)(path):
            yield Problem(f"{key}.path", f"{path} {found}", SOURCES)
        elif kind == "saved" and not any(os.path.exists(os.path.join(path, name)) for name in SAVED_MARKS):
            yield Problem(f"{key}.path", f"{path} is a folder that `datasets` has not saved", SOURCES)
    train, held_out = spec.data.train, spec.data.eval
    same = (train.path, train.config, train.split) == (held_out.path, held_out.config, held_out.split)
    if train.path is not None and same:
        yield warning("data.eval.path", "the held-out prompts are trained on", "use a file of its own")


@rule
def rows_to_prompts(spec: ExperimentSpec) -> Iterator[Problem]:
    """A split's `template` names columns; `config` and `split` belong to data sets, and a hub id needs its `split`."""
    for key, split in all_splits(spec):
        kind = None if split.path is None else kind_of(split.path)
        if split.template is not None:
            try:
                template_columns(split.template)
            except ValueError as error:
                hint = 'write columns in braces, as in "Q: {question}"; `{{` is a brace'
                yield Problem(f"{key}.template", f"is no template: {error}", hint)
        if kind == "hub" and not re.fullmatch(f"{HUB}[A-Za-z0-9_][\\w.-]*(/[\\w.-]+)?(@\\S+)?", split.path or ""):
            yield Problem(f"{key}.path", f"`{split.path}` names no data set of the hub", "write it as hf:owner/name")
        if kind == "hub" and split.split is None:
            yield Problem(f"{key}.split", "a hub data set needs its split", "set it, for example to `train`")
        if kind != "hub" and split.config is not None:
            yield Problem(f"{key}.config", "belongs to hub ids (`hf:owner/name`)", "leave it out")
        own = key.startswith("evaluation.") and split.path is None
        if own and split.split not in (None, "train", "eval"):
            yield Problem(f"{key}.split", f"a task has no split `{split.split}`", "use `train` or `eval`")
        elif not own and kind not in ("hub", "saved") and split.split is not None:
            yield Problem(f"{key}.split", "belongs to data sets of `datasets`", "leave it out")


@rule
def curriculum_stages(spec: ExperimentSpec) -> Iterator[Problem]:
    """Stages of a curriculum end one after another, each below its `max`; only the last may have no end."""
    stages = spec.data.curriculum.stages if spec.data.curriculum else []
    before = 0
    for index, stage in enumerate(stages):
        key = f"data.curriculum.stages.{index}"
        if stage.until_prompt is None:
            if index < len(stages) - 1:
                hint = "only the last stage may leave it out"
                yield Problem(f"{key}.until_prompt", "is missing, so the later stages never come", hint)
        elif stage.until_prompt <= before:
            hint = f"it counts from the run's first prompt: use more than {before}"
            yield Problem(f"{key}.until_prompt", f"the stage before ends at {before} already", hint)
        else:
            before = stage.until_prompt
        if stage.min is not None and stage.max is not None and stage.min > stage.max:
            yield Problem(f"{key}.min", f"{stage.min:g} is more than the stage's max {stage.max:g}", "lower it")


@rule
def evaluation_samples(spec: ExperimentSpec) -> Iterator[Problem]:
    """Several `samples` of an evaluation set mean `greedy: false`: greedy responses are all the same."""
    for name, chosen in spec.evaluation.sets.items():
        if chosen.greedy and chosen.samples > 1:
            hint = "set greedy to false, or leave samples out"
            yield Problem(f"evaluation.sets.{name}.samples", "greedy responses are all the same", hint)


def all_splits(spec: ExperimentSpec) -> Iterator[tuple[str, SplitSpec]]:
    """Every split of a spec, by its key."""
    yield "data.train", spec.data.train
    yield "data.eval", spec.data.eval
    for index, member in enumerate(spec.task.mix):
        for name, split in (("train", member.train), ("eval", member.eval)):
            if split is not None:
                yield f"task.mix.{index}.{name}", split
    for name, chosen in spec.evaluation.sets.items():
        yield f"evaluation.sets.{name}.data", chosen.data
