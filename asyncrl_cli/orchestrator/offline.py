"""Evaluations without a trainer, for `asyncrl evaluate`, with the code that a run uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from asyncrl_cli.orchestrator.evaluation import Measured, Series, measure, series_of
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.serving import Engines, Served, use_engines
from asyncrl_cli.orchestrator.task_actors import TaskActors
from asyncrl_cli.runs.directory import RunDirectory

Choose = Callable[[Sequence[Series]], Iterator[Series]]


def offline(found: Sequence[Series], kind: str | None, data: str) -> Iterator[Series]:
    """The series of a ``kind`` (``greedy`` or ``sampled``) with all prompts. They are renamed to ``offline:greedy`` or
    ``offline-SET:greedy``, and so never replace a run's own evaluations.

    ``kind`` None: all, but held-out prompts are sampled only if the spec wants several samples, as during a run.
    ``data``: the name of the held-out prompts if they are not the spec's.
    """
    for one in found:
        name, _, own = one.kind.rpartition(":")
        if own == kind or (kind is None and (one.kind != "sampled" or one.samples > 1)):
            yield replace(one, kind="-".join(filter(None, ("offline", name or data))) + f":{own}", at_most=None)


def evaluate(
    experiment: Experiment,
    served: Served,
    choose: Choose,
    *,
    record: Callable[[Measured], None],
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> None:
    """Make the chosen evaluations, and call ``record`` with each. ``progress(ended, total)`` counts the generated
    responses. Raises like ``use_engines``."""

    def warn(text: str) -> None:
        say(f"! {text}")

    async def work(engines: Engines) -> None:
        spec = engines.factory.spec
        tasks = TaskActors(replace(experiment, spec=spec), engines.factory, engines.budget)
        try:
            await asyncio.gather(tasks.start(), engines.serving)
            await tasks.connect(engines.client, str(engines.folder))
            held_out = partial(tasks.held_out, tokenizer=engines.tokenizer, warn=warn)
            prompts = held_out("", experiment.eval_prompts) if spec.data.eval is not None else None
            sets = {name: held_out(name, rows) for name, rows in experiment.sets.items()}
            chosen = list(choose(series_of(spec, prompts, sets)))
            total = sum(len(one.held_out.prompts) * one.samples for one in chosen)
            numbers = count(1)

            def ended() -> None:
                progress(next(numbers), total)

            async def one(series: Series) -> None:
                record(await measure(series, served.step, spec=spec, client=engines.client, ended=ended))

            say(f"generating {total:,} responses")
            await asyncio.gather(*map(one, chosen))
        finally:
            await tasks.stop()

    use_engines(served, work, again="evaluate again", status=say, warn=warn, search_path=experiment.search_path)


def store(run: RunDirectory, measured: Measured) -> Path:
    """Write an evaluation's file to a run's folder; keeps earlier files of the same kind. Raises ``OSError``."""
    wanted = run.path / measured.file
    names = (wanted if number == 1 else wanted.with_stem(f"{wanted.stem}-{number}") for number in count(1))
    path = next(name for name in names if not name.exists())
    run.write_text(str(path.relative_to(run.path)), measured.text)
    return path
