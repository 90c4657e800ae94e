"""The table and the JSON of a memory estimate (`asyncrl validate-spec --memory`)."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.errors import ConfigError, diagnostic

if TYPE_CHECKING:
    from asyncrl_cli.sizing.estimate import Estimate
    from asyncrl_cli.sizing.model import SizedModel
    from asyncrl_cli.spec.sections import ExperimentSpec


@dataclass(frozen=True)
class MemoryAnswer:
    """A memory estimate to print. ``fits`` is False if the spec cannot run."""

    fits: bool
    text: str
    diagnostics: tuple[str, ...]
    document: dict[str, object]


def model_config(spec: ExperimentSpec) -> Any:
    """Find the config of a spec's model."""
    from asyncrl_cli.core.imports import large_imports

    with large_imports():
        import transformers.models.auto.modeling_auto  # noqa: F401

    from asyncrl_cli.sizing.config import find_config

    with tempfile.TemporaryDirectory(prefix="asyncrl-config-") as empty:
        return find_config(spec, Path(empty))


def memory_answer(spec: ExperimentSpec) -> MemoryAnswer:
    """Estimate a spec's memory."""
    from asyncrl_cli.checks.finding import Warned
    from asyncrl_cli.checks.memory import estimate_memory, memory_problems, resolve_microbatch, resolve_rollouts
    from asyncrl_cli.sizing.model import size_model

    try:
        model = size_model(spec, model_config(spec))
        spec, microbatch = resolve_microbatch(spec, model)
        spec, rollouts = resolve_rollouts(spec, model)
        estimate = estimate_memory(spec, model)
        refusal, warnings = memory_problems(spec, estimate)
        warnings += [result for result in (microbatch, rollouts) if isinstance(result, Warned)]
    except ConfigError as error:
        return MemoryAnswer(False, text="", diagnostics=(error.diagnostic(),), document={"problems": [_problem(error)]})
    problems = [{"severity": "warning", "message": warning.text, "hint": warning.hint} for warning in warnings]
    diagnostics = [diagnostic("warning", warning.text, hint=warning.hint) for warning in warnings]
    if refusal is not None:
        problems.insert(0, _problem(refusal))
        diagnostics.append(refusal.diagnostic())
    document = asdict(estimate) | {
        "model": model.name,
        "parameters": model.parameters,
        "tokens_per_microbatch": spec.trainer.microbatch_tokens,
        "gradient_checkpointing": spec.trainer.recomputes,
        "max_running_rollouts": spec.rollout.running_rollouts,
        "problems": problems,
    }
    return MemoryAnswer(
        refusal is None, text=table(spec, model, estimate), diagnostics=tuple(diagnostics), document=document
    )


def table(spec: ExperimentSpec, model: SizedModel, estimate: Estimate) -> str:
    """Show the estimate as text: each GPU and host with its capacity and the parts of its memory."""
    from asyncrl_cli.checks.memory import microbatch_text
    from asyncrl_cli.sizing.memory_use import size_text

    trained = f", {_many(model.trained)} of them trained" if model.trained < model.parameters else ""
    lines = [f"memory, estimated (docs/sizing.md): {model.name}, {_many(model.parameters)} weights{trained}"]
    lines.append(f"the trainer: {microbatch_text(spec.trainer)}")
    for device in estimate.devices:
        count = f", {device.count} alike" if device.count > 1 else ""
        has = f"it has {size_text(device.capacity)}" if device.capacity is not None else "its capacity is not known"
        lines += ["", f"{device.name}{count}"]
        rows = [(entry.name, size_text(entry.bytes), entry.note) for entry in device.parts]
        rows.append(("sum", size_text(device.total), has))
        width = max(len(name) for name, _, _ in rows)
        lines += [f"  {name:{width}}  {size:>11}  {note}".rstrip() for name, size, note in rows]
    if (cache := estimate.cache) is not None:
        versions = (spec.pipeline.max_staleness + 1) * spec.pipeline.publish_every
        admitted = versions * spec.pipeline.groups_per_step * spec.rollout.group_size
        lines += [
            "",
            f"each engine has room for {max(0, cache.tokens):,} tokens of keys and values: {cache.longest_rollouts:,} "
            f"rollouts of the longest length, {cache.average_rollouts:,} of a third of it",
            f"rollout.max_running_rollouts: {spec.rollout.running_rollouts:,} in each engine; the staleness bound "
            f"admits {admitted // spec.rollout.min_engines:,} for each",
        ]
    elif spec.rollout.gpus_per_engine and model.cache_numbers is not None:
        lines += ["", "set cluster.gpu_memory_gb to see whether the GPUs are large enough"]
    lines.append(f"the journal grows by about {size_text(estimate.journal)} a step")
    return "\n".join(lines)


def _many(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:,.2f}M"


def _problem(error: ConfigError) -> dict[str, str]:
    return {"severity": "error", "message": error.message, "location": error.location, "hint": error.hint}
