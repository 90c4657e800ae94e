"""Samples and tokens per second compared with TRL's GRPOTrainer, with the same task and initial weights.

    make against-trl [STEPS=20] [SIZES="0.3M 9.5M"] [DEVICE=gpu]
    python benchmarks/against_trl.py [--device cuda] [--steps 20] [--trl KEY=VALUE ...]

Runs steps with asyncrl, then the same number with TRL and the same initial model, with the same number of completions
in groups of 8, the same limits of lengths, reward, learning rate and clipping. They run one after the other; start-up
and the first steps are not timed.

On a CPU the task is the quickstart's: 256 completions a step, up to 192 tokens. ``9.5M`` is the quickstart with a
larger model. TRL generates with transformers, as it does without a GPU, and trains in micro-batches that fit: with the
larger model 256 completions at a time are 1.7 times slower than 32.

On a GPU the task has a long tail of lengths, as in `make gpu`: 512 completions a step, up to 1,024 tokens, with a model
of 0.4B. asyncrl runs `async` with the settings that it chooses for the card. TRL has the settings that its pages "vLLM
integration" and "Speeding up training" recommend: vLLM in the trainer's process on the same GPU (`colocate`), bfloat16,
a flash attention that is installed, and Liger's kernels if they are installed. TRL 1.16 prefers kernels that it
downloads (`--trl 'model_init_kwargs={use_kernels: true}'`). `--trl` changes any setting. Both settings are printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from common import INIT, header, metrics, row
from gpu_report.runs import Bench
from gpu_report.specs import MODEL, quickstart_spec, resolved, spec_of, timed_spec

SKIPPED_STEPS = 3


class Size(NamedTuple):
    """A model.

    ``config`` changes the quickstart's config; an empty one keeps its trained model, and others have random weights.
    ``microbatch``: completions in one pass of TRL.
    """

    config: Mapping[str, float]
    microbatch: int


SIZES = {
    "0.3M": Size({}, 64),
    "9.5M": Size(
        {
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        32,
    ),
    "0.4B": Size(MODEL["cuda"], 64),
}
DEVICE_SIZES = {"cpu": ["0.3M", "9.5M"], "cuda": ["0.4B"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20, help="steps of each")
    parser.add_argument("--asyncrl", default="asyncrl", help="the command")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="models; default: all of the device")
    parser.add_argument("--microbatch", type=int, metavar="COMPLETIONS", help="of TRL in one pass; default: by size")
    parser.add_argument("--trl", nargs="*", default=[], metavar="KEY=VALUE", help="changes of TRL's GRPOConfig")
    arguments = parser.parse_args()
    changes = {key: yaml.safe_load(value) for key, _, value in (change.partition("=") for change in arguments.trl)}
    print(header("model", "", "samples/s", "tokens/s", "s of a step", "tokens of a response"))
    for name in arguments.sizes or DEVICE_SIZES[arguments.device]:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            spec = spec_of_size(SIZES[name], arguments.device, Path(folder))
            microbatch = arguments.microbatch or SIZES[name].microbatch
            settings = grpo_settings(spec, arguments.device, microbatch, arguments.steps) | changes
            ours = train_here(Path(folder), arguments.asyncrl, spec, arguments.steps)
            made_models = list(Path(folder, "models").glob("[0-9a-f]*"))
            (model,) = made_models or [Path(spec["model"]["path"])]
            theirs = train_with_trl(model, spec, settings)
        for trainer, figures in (("asyncrl", ours), ("TRL", theirs)):
            tokens = figures["rate"] * figures["length"]
            columns = f"{figures['rate']:.1f}", f"{tokens:,.0f}", f"{figures['step_s']:.2f}", f"{figures['length']:.1f}"
            print(row(name, trainer, *columns))
        # Compared by tokens, because responses grow at different rates.
        by_tokens = ours["rate"] * ours["length"] / (theirs["rate"] * theirs["length"])
        print(
            row(name, "asyncrl / TRL", f"{ours['rate'] / theirs['rate']:.2f}", f"{by_tokens:.2f}", "", ""), flush=True
        )


def spec_of_size(size: Size, device: Literal["cpu", "cuda"], folder: Path) -> dict[str, Any]:
    """The spec of asyncrl's run. On a GPU its engine and its trainer share the card."""
    if device == "cuda":
        bench = Bench(device, folder)
        spec = timed_spec(device, "async")
        spec["model"]["init"]["config"] |= size.config
        return bench.on_device(spec)
    spec = quickstart_spec("float32")
    if size.config:
        spec["model"] |= {"path": None, "init": {**INIT, "config": INIT["config"] | size.config}}
        spec["algorithm"]["uniform_groups"] = "train"  # random weights get no reward
    return spec


def samples_per_step(spec: dict[str, Any]) -> int:
    return int(spec["rollout"]["group_size"] * spec["pipeline"]["groups_per_step"])


def train_here(folder: Path, command: str, spec: dict[str, Any], steps: int) -> dict[str, float]:
    """Run asyncrl. The last steps are not timed either, because the pipeline drains."""
    staleness = spec_of(spec).pipeline.max_staleness
    changes = {"stop": {"steps": steps + staleness + 1}, "runs_dir": str(folder)}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({**spec, **changes, "evaluation": {"every": 0, "prompts": 8}}))
    shutil.copy(Path(__file__).with_name("long_tail.py"), folder)
    print(f"asyncrl: {json.dumps(spec['rollout'] | spec['trainer'] | spec['pipeline'])}", file=sys.stderr)
    subprocess.run([command, "train", str(path)], check=True, stdout=sys.stderr)
    (manifest,) = folder.glob("*/manifest.json")
    rows = metrics(manifest.parent)[SKIPPED_STEPS - 1 : steps]
    step_s = (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)
    length = statistics.fmean(row["response/tokens_mean"] for row in rows[1:])
    return {"rate": samples_per_step(spec) / step_s, "step_s": step_s, "length": length}


def grpo_settings(spec: dict[str, Any], device: Literal["cpu", "cuda"], microbatch: int, steps: int) -> dict[str, Any]:
    """TRL's settings for the same completions and updates; ``microbatch``: completions of a pass."""
    optimizer = spec["trainer"]["optimizer"]
    settings: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": samples_per_step(spec) // microbatch,
        "num_generations": spec["rollout"]["group_size"],
        "max_completion_length": spec["rollout"]["max_response_tokens"],
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon_high": spec["algorithm"]["clip_high"],
        "learning_rate": optimizer["learning_rate"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "max_grad_norm": optimizer["max_grad_norm"],
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": resolved(spec_of(spec))[0].trainer.recomputes,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if device == "cpu":
        return settings | {"use_cpu": True, "bf16": False}
    return settings | {
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": spec["rollout"]["gpus_per_engine"],
        "vllm_max_model_length": spec["model"]["max_length"],
        "use_liger_kernel": find_spec("liger_kernel") is not None,
        "model_init_kwargs": {"attn_implementation": installed_attention()},
    }


def installed_attention() -> str:
    """The newest flash attention that transformers finds in this environment, or `sdpa`."""
    from transformers.utils import import_utils

    for version in (4, 3, 2):
        if getattr(import_utils, f"is_flash_attn_{version}_available")():
            return f"flash_attention_{version}"
    return "sdpa"


def train_with_trl(model: Path, spec: dict[str, Any], settings: dict[str, Any]) -> dict[str, float]:
    """Run TRL's trainer with ``settings`` of its GRPOConfig."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl_cli.tasks.load import load_task

    print(f"TRL: {json.dumps(settings)}", file=sys.stderr, flush=True)
    task, samples, steps = (
        load_task(spec_of(spec).task, Path(__file__).parent),
        samples_per_step(spec),
        settings["max_steps"],
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = task.prompts("train", samples // spec["rollout"]["group_size"] * (steps + 1))
    by_text = {str(prompt.content): prompt for prompt in prompts}
    ended: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.monotonic())

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(statistics.fmean(map(len, completion_ids)))
        scored = []
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            scored.append(task.reward(by_text[prompt], text, ids[-1] == tokenizer.eos_token_id))
        return scored

    with tempfile.TemporaryDirectory(prefix="trl-") as out:
        trainer = GRPOTrainer(
            model=str(model),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": str(prompt.content)} for prompt in prompts]),
            callbacks=[Clock()],
            args=GRPOConfig(output_dir=out, **settings),
        )
        trainer.train()
    step_s = (ended[-1] - ended[SKIPPED_STEPS - 1]) / (len(ended) - SKIPPED_STEPS)
    length = statistics.fmean(lengths[SKIPPED_STEPS:])
    return {"rate": samples / step_s, "step_s": step_s, "length": length}


if __name__ == "__main__":
    main()
