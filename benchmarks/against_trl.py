"""Samples and tokens per second compared with TRL's GRPOTrainer, with the same task and initial weights.

    make against-trl [STEPS=20] [SIZES="0.3M 9.5M"]

Runs steps of the quickstart with asyncrl, then the same number with TRL and the same initial model: 256
completions a step in groups of 8, up to 192 tokens, the same reward, learning rate and clipping. ``9.5M`` is the
quickstart with a larger model. TRL generates with transformers, as it does without a GPU, and trains in micro-batches
that fit: with the larger model 256 completions at a time are 1.7 times slower than 32. They run one after the other;
start-up and the first steps are not timed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from common import CHAIN_SUM, INIT, QUICKSTART, header, metrics, row

SKIPPED_STEPS = 3


class Size(NamedTuple):
    """A model.

    ``config`` changes the quickstart's config; an empty one keeps its trained model, and others have random weights.
    ``microbatch``: completions in one pass of TRL.
    """

    config: dict[str, int]
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of each")
    parser.add_argument("--asyncrl", default="asyncrl", help="the command")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="models")
    parser.add_argument("--microbatch", type=int, metavar="COMPLETIONS", help="of TRL in one pass; default: by size")
    arguments = parser.parse_args()
    print(header("model", "", "samples/s", "tokens/s", "s of a step", "tokens of a response"))
    for name in arguments.sizes:
        size, spec = SIZES[name], yaml.safe_load(QUICKSTART.read_text())
        spec["model"]["path"] = str(CHAIN_SUM)
        if size.config:
            spec["model"] |= {"path": None, "init": {**INIT, "config": INIT["config"] | size.config}}
            spec["algorithm"]["uniform_groups"] = "train"  # random weights get no reward
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            ours = train_here(Path(folder), arguments.asyncrl, spec, arguments.steps)
            (model,) = Path(folder, "models").glob("[0-9a-f]*") if size.config else [CHAIN_SUM]
            theirs = train_with_trl(model, spec, arguments.steps, arguments.microbatch or size.microbatch)
        for trainer, figures in (("asyncrl", ours), ("TRL", theirs)):
            tokens = figures["rate"] * figures["length"]
            columns = f"{figures['rate']:.1f}", f"{tokens:,.0f}", f"{figures['step_s']:.2f}", f"{figures['length']:.1f}"
            print(row(name, trainer, *columns))
        # Compared by tokens, because responses grow at different rates.
        by_tokens = ours["rate"] * ours["length"] / (theirs["rate"] * theirs["length"])
        print(
            row(name, "asyncrl / TRL", f"{ours['rate'] / theirs['rate']:.2f}", f"{by_tokens:.2f}", "", ""), flush=True
        )


def samples_per_step(spec: dict[str, Any]) -> int:
    return int(spec["rollout"]["group_size"] * spec["pipeline"]["groups_per_step"])


def train_here(folder: Path, command: str, spec: dict[str, Any], steps: int) -> dict[str, float]:
    """Run asyncrl. The last steps are not timed either, because the pipeline drains."""
    staleness = spec["pipeline"]["max_staleness"]
    changes = {"stop": {"steps": steps + staleness + 1}, "tracking": {"mlflow": False}, "runs_dir": str(folder)}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({**spec, **changes, "evaluation": {"every": 0, "prompts": 8}}))
    subprocess.run([command, "train", str(path)], check=True, stdout=sys.stderr)
    (manifest,) = folder.glob("*/manifest.json")
    rows = metrics(manifest.parent)[SKIPPED_STEPS - 1 : steps]
    step_s = (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)
    length = statistics.fmean(row["response/tokens_mean"] for row in rows[1:])
    return {"rate": samples_per_step(spec) / step_s, "step_s": step_s, "length": length}


def train_with_trl(model: Path, spec: dict[str, Any], steps: int, microbatch: int) -> dict[str, float]:
    """Run the same number of steps with TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl_cli.tasks.ready.chain_sum import ChainSum

    task, samples = ChainSum(**spec["task"]["options"]), samples_per_step(spec)
    group, optimizer = spec["rollout"]["group_size"], spec["trainer"]["optimizer"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = task.prompts("train", samples // group * (steps + 1))
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
            args=GRPOConfig(
                output_dir=out,
                use_cpu=True,
                bf16=False,
                max_steps=steps,
                per_device_train_batch_size=microbatch,
                gradient_accumulation_steps=samples // microbatch,
                num_generations=group,
                max_completion_length=spec["rollout"]["max_response_tokens"],
                temperature=1.0,
                beta=0.0,
                loss_type="grpo",
                epsilon_high=spec["algorithm"]["clip_high"],
                learning_rate=optimizer["learning_rate"],
                adam_beta1=optimizer["betas"][0],
                adam_beta2=optimizer["betas"][1],
                max_grad_norm=optimizer["max_grad_norm"],
                lr_scheduler_type="constant",
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    step_s = (ended[-1] - ended[SKIPPED_STEPS - 1]) / (len(ended) - SKIPPED_STEPS)
    length = statistics.fmean(lengths[SKIPPED_STEPS:])
    return {"rate": samples / step_s, "step_s": step_s, "length": length}


if __name__ == "__main__":
    main()
