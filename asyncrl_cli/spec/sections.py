"""The sections of an experiment spec, one pydantic model each.

Unknown keys are refused, numbers carry their bounds, and every field carries the sentence that
docs/spec.md shows for it. What one section cannot check alone stands in ``rules``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from asyncrl_cli.spec.algorithm import AlgorithmSpec
from asyncrl_cli.spec.base import (
    MODULE_NAME,
    YEAR_S,
    Count,
    Decay,
    DecayRate,
    Fraction,
    LearningRate,
    Seconds,
    Section,
    SetName,
    SystemPath,
    Temperature,
    Text,
    Whole,
    pattern,
)
from asyncrl_cli.spec.inputs import DataSpec, ModelSpec, SplitSpec, TaskSpec

DType = Literal["float32", "bfloat16"]
_HOST = r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*"
_RAY = rf"auto|[a-z][a-z0-9+.-]*://\S+|({_HOST}|\[[0-9A-Fa-f:.]+\]):[0-9]{{1,5}}"


class SamplingSpec(Section):
    """How training rollouts are sampled.

    There is no top-p and no top-k: they would truncate the distribution, and the recorded log-probs would not be those
    of the tokens that were sampled.
    """

    temperature: Temperature = Field(1.0, description="Softmax temperature; log-probs are computed at it.")
    stop: list[Text] = Field(
        default_factory=list, description="Strings that end a response, in addition to the end token."
    )


class GatewaySpec(Section):
    """The OpenAI-compatible server in front of the engines."""

    host: Annotated[str, pattern(_HOST, "must be a host name or an address")] = Field(
        "127.0.0.1", description="Address to listen on. Other hosts can reach any address but a loopback address."
    )
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_body_mb: Count = Field(2, description="Largest body of a request in MiB.")


class RolloutSpec(Section):
    """The vLLM engines and what they generate."""

    engines: Count = Field(1, description="vLLM engines, each in a Ray actor of its own.")
    threads_per_engine: Count = Field(1, description="CPU threads of an engine (ignored on GPU).")
    gpus_per_engine: Whole = Field(
        0, description="GPUs of an engine (its tensor-parallel size); 0 runs vLLM on the CPU."
    )
    group_size: Count = Field(8, description="Rollouts per prompt.")
    max_running_rollouts: Count = Field(
        256, description="Rollouts that an engine generates at the same time (vLLM's `max_num_seqs`)."
    )
    max_prompt_tokens: Count = Field(
        512, description="Longest prompt in tokens. Longer prompts are skipped and counted."
    )
    max_response_tokens: Count = Field(512, description="Longest response in tokens.")
    sampling: SamplingSpec = Field(default_factory=SamplingSpec, description="Sampling of training rollouts.")
    dtype: DType = Field("float32", description="The engines' dtype.")
    kv_cache_mb: Count | None = Field(
        None,
        description="Key-value cache of a CPU engine in MiB. Default: enough for `max_running_rollouts` sequences of "
        "average length, and for one of `model.max_length`.",
    )
    retries: Whole = Field(2, description="How often a failed rollout is generated again before its group is rejected.")
    max_failed_share: Fraction = Field(
        0.25,
        description="The run stops when failed rollouts caused the loss of a larger share of the last 100 groups, and "
        "of at least 8 of them. 0: the run stops at the first lost group.",
    )
    hang_seconds: float = Field(
        120.0,
        ge=1,
        le=YEAR_S,
        description="An engine that has rollouts to generate and produces no token for this long is restarted.",
    )
    gateway: GatewaySpec = Field(
        default_factory=GatewaySpec, description="OpenAI-compatible access, for agents and `asyncrl serve`."
    )
    tool_parser: Text | None = Field(
        None,
        description="How the model writes tool calls: the name of one of vLLM's tool parsers. Default: `hermes`, "
        '`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.',
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the vLLM engine, passed on unchanged."
    )


class OptimizerSpec(Section):
    """AdamW."""

    learning_rate: LearningRate = Field(1e-6, description="Peak learning rate.")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), strict=False, description="Adam's decay rates.")
    eps: float = Field(1e-8, gt=0, le=1, description="Adam's epsilon.")
    weight_decay: Decay = Field(0.0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="The gradient's norm is clipped to this.")


class ScheduleSpec(Section):
    """The learning rate over optimizer updates."""

    kind: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after warm-up.")
    warmup_updates: Whole = Field(0, description="Optimizer updates of linear warm-up from zero.")
    final_fraction: Fraction = Field(
        0.0, description="Final learning rate of `linear` and `cosine`, as a fraction of the peak."
    )


class TrainerSpec(Section):
    """The DeepSpeed ranks."""

    ranks: Count = Field(1, description="Trainer processes, one Ray actor each.")
    threads_per_rank: Count = Field(1, description="CPU threads of a rank (ignored on GPU).")
    gpus_per_rank: Literal[0, 1] = Field(0, description="1 trains on GPU with NCCL, 0 on CPU with gloo.")
    zero_stage: Literal[0, 1, 2, 3] = Field(3, description="DeepSpeed ZeRO stage.")
    dtype: DType = Field("float32", description="Dtype of the trained weights.")
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec, description="AdamW's settings.")
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec, description="Learning-rate schedule.")
    minibatches: Count = Field(
        1, description="Optimizer updates per pass over the batch; each has an equal share of the groups."
    )
    epochs: Count = Field(1, description="Passes over the batch in one step.")
    tokens_per_microbatch: Count = Field(
        8192, description="Tokens of one forward and backward pass, per rank, including padding."
    )
    packing: bool = Field(
        False,
        description="Join the rows of a micro-batch into one sequence instead of padding them. Faster with "
        "`flash_attention_2` only: the other implementations compute attention over the joined sequence.",
    )
    attention: Literal["sdpa", "flash_attention_2", "eager"] = Field(
        "sdpa", description="How transformers computes attention; `flash_attention_2` needs a GPU and its package."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations to save memory.")
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="What a GPU rank keeps in CPU memory. `optimizer`: Adam's state and the float32 weights. `all` "
        "(with ZeRO-3): the trained weights, too.",
    )
    max_skipped_updates: Count = Field(
        10,
        description="The run stops after this many consecutive updates that were skipped because the loss or gradient "
        "was not finite.",
    )


class PipelineSpec(Section):
    """How generation and training overlap. Everything follows from one number, `max_staleness`."""

    mode: Literal["sync", "one_step_off", "async"] = Field(
        "async",
        description="A preset: `sync` is staleness 0 with `drain`, `one_step_off` is staleness 1 with `drain`, `async` "
        "leaves both to you. A file or `--set` that sets the mode replaces `max_staleness`, `weight_update` and "
        "`partial_rollouts` of the files below it.",
    )
    partial_rollouts: bool = Field(
        False,
        description="With mode `sync`: generation stops when a batch is complete. Unfinished rollouts keep their "
        "tokens and continue under the next weights. Engines are busy until the batch is complete, and idle while the "
        "trainer trains.",
    )
    max_staleness: Whole = Field(
        default_factory=lambda data: {"sync": int(data.get("partial_rollouts", False)), "one_step_off": 1, "async": 4}[
            data["mode"]
        ],
        description="Largest staleness of a trained group, in weight versions. Default: 0 (`sync`), 1 (`one_step_off`, "
        "and `sync` with `partial_rollouts`) or 4 (`async`).",
    )
    groups_per_step: Count = Field(32, description="Groups in one training batch.")
    publish_every: Count = Field(1, description="Steps between two weight versions.")
    weight_update: Literal["keep", "recompute", "drain"] = Field(
        default_factory=lambda data: "keep" if data["mode"] == "async" else "drain",
        description="What happens to running rollouts when new weights are published: `keep` continues them with their "
        "KV cache, `recompute` continues them with a KV cache computed under the new weights, `drain` lets them finish "
        "first. Default: `keep` in mode `async`, otherwise `drain`.",
    )
    on_stale: Literal["wait", "requeue", "train"] = Field(
        "wait",
        description="What happens to a group that would miss its deadline: `wait` for it, `requeue` its prompt, or "
        "`train` on it late and count it. `requeue` favours short responses: in simulations the mean length fell by 18 "
        "to 20 %.",
    )
    stall_minutes: float = Field(
        10.0,
        ge=0.01,
        le=YEAR_S // 60,
        description="The run stops after this long without progress, and names what it was waiting for.",
    )
    max_restarts: Whole = Field(
        10,
        description="Restarts of one kind of component (engines, trainer ranks, buffer, scorer) within 6 hours. After "
        "that many the run stops with the first cause.",
    )
    max_rejected_in_a_row: Count = Field(
        2000, description="The run stops after this many consecutive groups that were rejected."
    )


class EvaluationSet(Section):
    """Further prompts to evaluate on, of any task and split."""

    data: SplitSpec = Field(
        description="The prompts. Without a path the task makes them: those of its split `eval`, or of `train` if "
        "`split` is `train`."
    )
    task: TaskSpec | None = Field(None, description="The task that scores them. Default: the task of the run.")
    every: Whole | None = Field(
        None, description="Steps between two evaluations of this set. Default: `evaluation.every`."
    )
    greedy: bool = Field(
        True, description="Generate one greedy response per prompt. false: sample `samples` responses."
    )
    samples: Count = Field(1, description="Responses per prompt when they are sampled.")


class EvaluationSpec(Section):
    """Accuracy on the held-out prompts and on further sets, generated by the same engines."""

    every: Whole = Field(
        0, description="Steps between two evaluations during training; 0 evaluates before and after training only."
    )
    prompts: Count | None = Field(
        None, description="Prompts of an evaluation during training. Default: all held-out prompts."
    )
    samples: Count = Field(
        1,
        description="Sampled responses per held-out prompt. With more than one, every evaluation samples them and "
        "reports pass@1 to pass@k; with one, only the evaluations before and after training sample.",
    )
    temperature: Temperature | None = Field(
        None, description="Temperature of sampled responses. Default: `rollout.sampling.temperature`."
    )
    fix_version: bool = Field(
        False,
        description="Delay new weights until a running evaluation ends, so that it measures exactly one weight "
        "version. Otherwise the evaluation records which versions it used.",
    )
    sets: dict[SetName, EvaluationSet] = Field(default_factory=dict, description="Further sets, by name.")


class CheckpointSpec(Section):
    """When the trainer's state is saved."""

    every: Whole = Field(
        0, description="Steps between two checkpoints; 0 saves only when the run ends or is interrupted."
    )
    keep_last: Count = Field(2, description="Number of newest checkpoints to keep.")
    keep_every: Whole = Field(0, description="Also keep the checkpoints of steps that are divisible by this; 0: none.")
    keep_best: Whole = Field(
        0, description="Also keep this many checkpoints with the best greedy held-out accuracy at their step."
    )


class JournalSpec(Section):
    """The durable record of the run: every group, rollout, batch and published version."""

    segment_seconds: Seconds = Field(
        10.0,
        description="Tokens of unfinished rollouts are recorded at every publish, and at least this often.",
    )
    keep: Literal["all"] | Count = Field(
        "all",
        description="`all` keeps the tokens of every rollout. A number N deletes the tokens of groups that were "
        "trained before the Nth newest checkpoint. Whatever a resume from a kept checkpoint needs is never deleted.",
    )


class WandbSpec(Section):
    """Weights & Biases. Needs the extra `wandb`."""

    project: Text = Field("asyncrl", description="Project of the run.")
    entity: Text | None = Field(None, description="User or team that owns the project. Default: that of your account.")
    mode: Literal["online", "offline"] = Field(
        "online",
        description="`online` needs an API key (`WANDB_API_KEY`, or `wandb login`). `offline` writes to the run's "
        "folder alone: `wandb sync RUN/wandb/offline-*` uploads it later.",
    )


class TrackingSpec(Section):
    """Where the run is logged beside its own folder: MLflow, TensorBoard, Weights & Biases, monitors of your own."""

    mlflow: bool = Field(True, description="Log parameters, metrics and artifacts to MLflow.")
    uri: Text | None = Field(None, description="MLflow's tracking URI. Default: a SQLite store in the runs folder.")
    experiment: Text = Field("asyncrl", description="MLflow experiment.")
    system_metrics: bool = Field(
        True, description="Log processors, memory, disk, network and GPUs of the driver's machine, every ten seconds."
    )
    register_model: str | None = Field(
        None,
        pattern=r"^[^/:]+$",
        description="Register the final model in MLflow as a version of the model with this name. Default: do not "
        "register it.",
    )
    tensorboard: bool = Field(
        False, description="Write TensorBoard's event files to the run's folder. Needs the extra `tensorboard`."
    )
    wandb: WandbSpec | None = Field(None, description="Log metrics to Weights & Biases. Default: do not.")
    monitors: list[Annotated[str, pattern(MODULE_NAME, "is not module:Class")]] = Field(
        [],
        description="Your own monitors, each as `module:Class`: subclasses of `asyncrl_cli.monitors.base.Monitor` in "
        "modules beside the spec or on Python's path.",
    )


Notice = Literal["finish", "failure", "stall"]


class NotifySpec(Section):
    """Notices about the run. If a notice cannot be delivered, there is a warning, and the run continues."""

    webhook: str | None = Field(
        None,
        pattern=r"^(https?://\S+|env:[A-Za-z_][A-Za-z0-9_]*)$",
        description="URL that gets a POST request with JSON. `env:NAME` reads the URL from that environment variable, "
        "so that it is not written to the run's folder, MLflow or reports.",
    )
    command: Text | None = Field(
        None,
        description="A shell command. It has `ASYNCRL_EVENT`, `ASYNCRL_RUN_ID`, `ASYNCRL_MESSAGE` and `ASYNCRL_FOLDER` "
        "in its environment, the webhook's JSON on its standard input, and 30 s of time.",
    )
    on: list[Notice] = Field(
        list(get_args(Notice)),
        description="Events to send: `finish` (the last step is done), `failure` (the run failed), `stall` (the run "
        "has made no progress for half of `pipeline.stall_minutes`).",
    )


class ClusterSpec(Section):
    """Where the actors run."""

    address: Annotated[str | None, pattern(_RAY, "must be `auto`, `host:port`, or an address with ray://")] = Field(
        None,
        description="Address of a running Ray cluster. Default: start one on this machine, and stop it at the end.",
    )


class StopSpec(Section):
    """When the run ends."""

    steps: Count = Field(description="Training steps.")


class ExperimentSpec(Section):
    """One experiment."""

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64, description="Prefix of the run id."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of everything random in the run.")
    runs_dir: Annotated[Path, SystemPath] = Field(
        Path("runs"), strict=False, description="Folder of all runs, relative to the current folder."
    )
    model: ModelSpec = Field(description="The policy.", examples=[{"path": "Qwen/Qwen3-0.6B"}])
    task: TaskSpec = Field(description="The task and its reward.", examples=[{"use": "math"}])
    data: DataSpec = Field(default_factory=DataSpec, description="Prompts.")
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="Generation.")
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec, description="The objective.")
    trainer: TrainerSpec = Field(default_factory=TrainerSpec, description="Training.")
    pipeline: PipelineSpec = Field(default_factory=PipelineSpec, description="Overlap and staleness.")
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec, description="Evaluation.")
    checkpoints: CheckpointSpec = Field(default_factory=CheckpointSpec, description="Checkpoints.")
    journal: JournalSpec = Field(default_factory=JournalSpec, description="The journal.")
    tracking: TrackingSpec = Field(default_factory=TrackingSpec, description="Experiment tracking.")
    notify: NotifySpec = Field(default_factory=NotifySpec, description="Notices of the run's end and of stalls.")
    cluster: ClusterSpec = Field(default_factory=ClusterSpec, description="Ray.")
    stop: StopSpec = Field(description="When the run ends.", examples=[{"steps": 100}])
