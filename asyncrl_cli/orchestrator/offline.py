"""Evaluations without a trainer, for `asyncrl evaluate`, with the code that a run uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path

from asyncrl_cli.orchestrator.evaluation import Evaluation, Series, measure, series_of
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.serving import Engines, Served, use_engines
from asyncrl_cli.orchestrator.task_actors import TaskActors
from asyncrl_cli.runs.directory import RunDirectory

Choose = Callable[[Sequence[Series]], Iterator[Series]]


def offline(all_series: Sequence[Series], sampling: str | None, data: str) -> Iterator[Series]:
    """The ``greedy`` or ``sampled`` series with all prompts. They are renamed to ``offline:greedy`` or
    ``offline-SET:greedy``, and so never replace a run's own evaluations.

    ``sampling`` None: all, but held-out prompts are sampled only if the spec wants several samples, as during a run.
    ``data``: the name of the held-out prompts if they are not the spec's.
    """
    for series in all_series:
        set_name, _, series_sampling = series.kind.rpartition(":")
        if series_sampling == sampling or (sampling is None and (series.kind != "sampled" or series.samples > 1)):
            prefix = "-".join(filter(None, ("offline", set_name or data)))
            yield replace(series, kind=f"{prefix}:{series_sampling}", max_prompts=None)


def evaluate(
    experiment: Experiment,
    served: Served,
    choose: Choose,
    *,
    record: Callable[[Evaluation], None],
    progress: Callable[[int, int], None],
    say: Callable[[str], None],
) -> None:
    """Make the chosen evaluations, and call ``record`` with each. ``progress(count, total)`` counts the generated
    responses. Raises like ``use_engines``."""

    def warn(text: str) -> None:
        say(f"! {text}")

    async def generate(engines: Engines) -> None:
        spec = engines.factory.spec
        tasks = TaskActors(replace(experiment, spec=spec), engines.factory, engines.budget)
        try:
            await asyncio.gather(tasks.start(), engines.serving)
            await tasks.connect(engines.client, str(engines.folder))
            held_out = partial(tasks.held_out, tokenizer=engines.tokenizer, warn=warn)
            prompts = held_out("", experiment.eval_prompts) if spec.data.eval is not None else None
            sets = {name: held_out(name, rows) for name, rows in experiment.sets.items()}
            chosen_series = list(choose(series_of(spec, prompts, sets)))
            total = sum(len(series.held_out.prompts) * series.samples for series in chosen_series)
            response_count = count(1)

            def on_response() -> None:
                progress(next(response_count), total)

            async def evaluate_series(series: Series) -> None:
                record(await measure(series, served.step, spec, engines.client, on_response))

            say(f"generating {total:,} responses")
            await asyncio.gather(*map(evaluate_series, chosen_series))
        finally:
            await tasks.stop()

    use_engines(served, generate, again="evaluate again", status=say, warn=warn, search_path=experiment.search_path)


def store(run: RunDirectory, evaluation: Evaluation) -> Path:
    """Write an evaluation's file to a run's folder; keeps earlier files of the same kind. Raises ``OSError``."""
    first_path = run.path / evaluation.file
    later_paths = (first_path.with_stem(f"{first_path.stem}-{index}") for index in count(2))
    path = next(path for path in chain([first_path], later_paths) if not path.exists())
    run.write_text(str(path.relative_to(run.path)), evaluation.text)
    return path
