"""The sections of an experiment spec, one pydantic model each.

Unknown keys are refused and numbers have bounds. The docstring below a field is its description in docs/spec.md.
Checks between sections are in ``rules``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.algorithm import AlgorithmSpec
from asyncrl_cli.spec.base import (
    MODULE_NAME,
    YEAR_S,
    Count,
    Decay,
    DecayRate,
    Fraction,
    Gpus,
    LearningRate,
    NonNegative,
    OneGpu,
    Seconds,
    Section,
    SetName,
    SystemPath,
    Temperature,
    Text,
    pattern,
)
from asyncrl_cli.spec.inputs import DataSpec, ModelSpec, RateSchedule, SplitSpec, TaskSpec

DType = Literal["float32", "bfloat16"]
T = TypeVar("T", int, bool)
UNSIZED_ROLLOUTS = 256
"""Running rollouts of a CPU engine, and of a GPU engine without a memory estimate."""
NOT_COUNTED = 10**9
"""Total steps of a run with `stop.epochs` until its prompts are counted."""
_HOST = r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*"
_RAY = rf"auto|[a-z][a-z0-9+.-]*://\S+|({_HOST}|\[[0-9A-Fa-f:.]+\]):[0-9]{{1,5}}"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = rf"({_LABEL}(\.{_LABEL})*/)?{_LABEL}"
_LABEL_VALUES = rf"!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))"


def needs_no_mask(attention: str) -> bool:
    """True for a version of flash attention, which needs no mask for packed rows."""
    return attention == "varlen" or attention.startswith("flash")


def why_rows_are_separate(trainer: TrainerSpec) -> str | None:
    """Return the setting that rules out shared prefixes for every model, or None."""
    if trainer.attention.startswith("flash") or trainer.attention == "eager":
        return f"trainer.attention {trainer.attention}"
    return "trainer.sequence_parallel" if trainer.sequence_parallel > 1 else None


def shares_prefixes(spec: ExperimentSpec) -> bool:
    """True if the spec allows rows to share the computation of common prefixes. The model may still not support it."""
    return spec.trainer.share_prefixes is not False and why_rows_are_separate(spec.trainer) is None


class SamplingSpec(Section):
    """How training rollouts are sampled.

    There is no top-p and no top-k: they truncate the distribution, so the recorded log-probs would be wrong.
    """

    temperature: Temperature = 1.0
    """Softmax temperature. Log-probs are computed at the same temperature."""
    stop: list[Text] = Field(default_factory=list)
    """Strings that end a response, in addition to the end token."""


class GatewaySpec(Section):
    """The OpenAI-compatible server in front of the engines."""

    host: Annotated[str, pattern(_HOST, "must be a host name or an address")] = "127.0.0.1"
    """Address to listen on. Other hosts can reach it unless it is a loopback address."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on. 0 picks a free port."""
    max_body_mb: Count = 2
    """Largest request body in MiB."""


class EngineRange(Section):
    """The number of engines of a run. It starts with `min`, and adds more when Ray has room for them."""

    min: Count
    """Number of engines at the start. When the run loses an engine, it asks Ray for another."""
    max: Count
    """Largest number of engines."""


def _number_or_range(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Report one problem for one mistake: pydantic would report two, one for each alternative."""
    if isinstance(value, dict):
        return EngineRange.model_validate(value)
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError("format", "must be a whole number from 1 on, or a mapping with min and max") from None


class RolloutSpec(Section):
    """The vLLM engines and what they generate."""

    engines: Annotated[Count | EngineRange, WrapValidator(_number_or_range)] = 1
    """Number of vLLM engines, or a range such as `{min: 1, max: 4}`. Each engine is one Ray actor. With a range, the
    run starts with `min` engines, and more join when Ray has room for them. When an engine leaves, the others continue
    its requests (docs/clusters.md). `asyncrl serve` starts `min` engines."""
    threads_per_engine: Count = 1
    """CPU threads per engine (ignored on GPU)."""
    gpus_per_engine: Gpus = 0
    """GPUs per engine (its tensor-parallel size); 0 runs vLLM on the CPU. With a share such as 0.5, each engine shares
    one GPU with a trainer rank."""
    group_size: Count = 8
    """Rollouts per prompt."""
    max_running_rollouts: Literal["auto"] | Count = Field(
        default_factory=lambda data: _auto_on_gpus(data.get("gpus_per_engine"), UNSIZED_ROLLOUTS)
    )
    """Rollouts that an engine generates at the same time (vLLM's `max_num_seqs`). `auto`: the start chooses as many as
    fill a GPU engine by the memory estimate, and the run keeps the number. It takes 256 where the memory or the model
    is unknown. Default: `auto` on GPUs, 256 on CPUs."""
    max_prompt_tokens: Count = 512
    """Longest prompt in tokens. Longer prompts are skipped and counted."""
    max_response_tokens: Count = 512
    """Longest response in tokens."""
    sampling: SamplingSpec = Field(default_factory=SamplingSpec)
    """Sampling of training rollouts."""
    dtype: DType = "float32"
    """The engines' dtype."""
    kv_cache_mb: Count | None = None
    """Key-value cache of a CPU engine in MiB. Default: enough for `max_running_rollouts` sequences of average length,
    and for one sequence of `model.max_length`."""
    retries: NonNegative = 2
    """How often a failed rollout is generated again before its group is rejected."""
    max_failed_share: Fraction = 0.25
    """The run stops when more than this share of the last 100 groups is lost, and at least 8 groups. A group is lost
    when a rollout failed, or when the reward is None for all rollouts but one. 0 stops the run at the first lost group.
    """
    hang_seconds: float = Field(120.0, ge=1, le=YEAR_S)
    """An engine that has rollouts to generate but produces no token for this long is restarted."""
    gateway: GatewaySpec = Field(default_factory=GatewaySpec)
    """OpenAI-compatible access, for agents and `asyncrl serve`."""
    history: Literal["sampled", "template"] = "sampled"
    """Earlier turns in a later call's prompt. `sampled`: their tokens as sampled, whatever the template does with older
    turns. `template`: the chat template renders all messages again, as servers do, so a template that drops earlier
    reasoning drops it here, too. Such a call begins another sequence of the rollout (docs/gateway.md)."""
    tool_parser: Text | None = None
    """vLLM tool parser that reads the model's tool calls. Default: `hermes`, which reads `<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>`."""
    reasoning_parser: Text | None = None
    """vLLM reasoning parser that reads the model's reasoning, such as `qwen3` or `deepseek_r1`. Default: the entire
    reply is content."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, passed on unchanged."""

    @property
    def running_rollouts(self) -> int:
        """``max_running_rollouts``; for `auto` without a start, as in `asyncrl serve SPEC`, the number for CPUs."""
        return UNSIZED_ROLLOUTS if self.max_running_rollouts == "auto" else self.max_running_rollouts

    @property
    def longest_rollout(self) -> int:
        """Tokens of the longest prompt and the longest response together."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def min_engines(self) -> int:
        """Number of engines at the start."""
        return self.engines.min if isinstance(self.engines, EngineRange) else self.engines

    @property
    def max_engines(self) -> int:
        """Largest number of engines."""
        return self.engines.max if isinstance(self.engines, EngineRange) else self.engines


class OptimizerSpec(Section):
    """AdamW."""

    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), strict=False)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Adam's epsilon."""
    weight_decay: Decay = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""


class ScheduleSpec(RateSchedule):
    """The learning rate over optimizer updates."""

    steps: Count | None = None
    """Training steps that `linear` and `cosine` span. Default: `stop.steps`. Later steps keep the final rate. A resume
    with another `stop.steps` keeps the old length, because steps that are trained again must have the same rate."""


class TrainerSpec(Section):
    """The DeepSpeed ranks."""

    ranks: Count = 1
    """Trainer processes, one Ray actor each."""
    threads_per_rank: Count = 1
    """CPU threads per rank. On GPU they matter only with `offload`, where they compute the optimizer's step: each
    thread updates about 0.8 billion weights per second."""
    gpus_per_rank: OneGpu = 0
    """1 trains on GPU with NCCL, 0 on CPU with gloo. With a share such as 0.5, each rank shares one GPU with an
    engine."""
    dtype: DType = "float32"
    """Dtype of the trained weights."""
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    """AdamW's settings."""
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec)
    """Learning-rate schedule."""
    minibatches: Count = 1
    """Optimizer updates per pass over the batch; each has an equal share of the groups."""
    epochs: Count = 1
    """Passes over the batch in one step."""
    tokens_per_microbatch: Literal["auto"] | Count = Field(
        default_factory=lambda data: _auto_on_gpus(data.get("gpus_per_rank"), 8192)
    )
    """Tokens per forward and backward pass of a rank, including padding. With `sequence_parallel`, the ranks of a group
    share them. `auto`: the start chooses them from the memory estimate, and the run keeps them. Default: `auto` on
    GPUs, 8192 on CPUs."""
    attention: Literal["sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4", "eager"] = (
        Field(
            default_factory=lambda data: (
                "varlen" if data.get("gpus_per_rank") and data.get("dtype") == "bfloat16" else "sdpa"
            )
        )
    )
    """How attention is computed. Default: `varlen` on GPUs in bfloat16, if the model allows it, otherwise `sdpa`.
    `varlen` is the flash attention in torch itself; it needs bfloat16 and an Ampere GPU or newer. Others also need a
    package: `flash_attention_2` flash-attn and Ampere or newer, `flash_attention_3` flash-attn-3 and Ampere, Ada or
    Hopper, `flash_attention_4` flash-attn-4 (in the GPU lock) and Hopper or Blackwell."""
    fused_kernels: bool = False
    """Compute norms, rotary embeddings and SwiGLU on GPUs by liger-kernel's Triton kernels, for `llama`, `qwen2`,
    `qwen3` and `qwen3_moe` (there without SwiGLU). They have not run on a GPU here yet. Log-probs change in their last
    bits."""
    share_prefixes: bool | None = None
    """Compute a prefix that several rows share only once: a group's prompt, and the common part of a rollout's
    branches. Log-probs and gradients do not change. Default: on if the model and `attention` support it;
    `flash_attention_*` does not. With `varlen`, only in updates where it is estimated to save a third of the work."""
    packing: bool = Field(default_factory=lambda data: needs_no_mask(data.get("attention", "")))
    """Join the rows of a micro-batch into one sequence instead of padding them. Default: true with flash attention. The
    other implementations compute attention across the entire joined sequence, so padding is faster with them."""
    sequence_parallel: Count = 1
    """Number of ranks that share each sequence (DeepSpeed's Ulysses), for sequences that are too long for one rank.
    Each rank has a slice of the positions, and in attention a share of the heads."""
    expert_parallel: Count = 1
    """Number of ranks that divide the experts of a mixture of experts (DeepSpeed's AutoEP). Tokens are sent to the
    ranks that have their experts, and a rank gathers only its own experts' weights. Needs ZeRO-3."""
    gradient_checkpointing: Literal["auto"] | bool = Field(
        default_factory=lambda data: _auto_on_gpus(data.get("gpus_per_rank"), False)
    )
    """Recompute activations to save memory. `auto`: only if a useful micro-batch does not fit otherwise. Default:
    `auto` on GPUs, false on CPUs."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State that a GPU rank keeps in CPU memory. `optimizer`: Adam's state and the float32 weights. `all` (needs
    ZeRO-3): the trained weights, too."""
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default_factory=lambda data: 3 if data.get("ranks", 1) > 1 or data.get("offload") == "all" else 2
    )
    """DeepSpeed ZeRO stage. Default: 3, which shards the weights. A single rank has nothing to shard, so its default is
    2 (3 with `offload: all`)."""
    max_skipped_updates: Count = 10
    """The run stops after this many consecutive skipped updates. An update is skipped if its loss or gradient is not
    finite."""

    @property
    def microbatch_tokens(self) -> int:
        """``tokens_per_microbatch``, which the start has chosen if it was `auto`. Raises ``ConfigError`` if not."""
        if self.tokens_per_microbatch == "auto":
            raise _unresolved("tokens_per_microbatch")
        return self.tokens_per_microbatch

    @property
    def recomputes(self) -> bool:
        """``gradient_checkpointing``, which the start has chosen if it was `auto`. Raises ``ConfigError`` if not."""
        if self.gradient_checkpointing == "auto":
            raise _unresolved("gradient_checkpointing")
        return self.gradient_checkpointing


def _auto_on_gpus(gpus: float | None, cpu_default: T) -> T | Literal["auto"]:
    return "auto" if gpus else cpu_default


def _unresolved(key: str) -> ConfigError:
    hint = "give a value: only the start of a run chooses one"
    return ConfigError("auto stands for no value here", location=f"trainer.{key}", hint=hint)


class PipelineSpec(Section):
    """How generation and training overlap. The main setting is `max_staleness`."""

    mode: Literal["sync", "one_step_off", "async"] = "async"
    """A preset: `sync` is staleness 0 with `drain`, `one_step_off` is staleness 1 with `drain`, with `async` you set
    both. A file or `--set` that sets the mode also replaces `max_staleness`, `weight_update` and `partial_rollouts`
    in the files that it overrides."""
    partial_rollouts: bool = False
    """With mode `sync`: generation stops when a batch is complete. Unfinished rollouts keep their tokens and continue
    under the next weights. Engines are busy until the batch is complete, and idle while the trainer trains."""
    max_staleness: NonNegative = Field(
        default_factory=lambda data: {"sync": int(data.get("partial_rollouts", False)), "one_step_off": 1, "async": 4}[
            data["mode"]
        ]
    )
    """Largest staleness of a trained group, in weight versions. Default: 0 (`sync`), 1 (`one_step_off`, and `sync` with
    `partial_rollouts`) or 4 (`async`)."""
    groups_per_step: Count = 32
    """Groups in one training batch."""
    publish_every: Count = 1
    """Steps between two weight versions."""
    weight_update: Literal["keep", "recompute", "drain"] = Field(
        default_factory=lambda data: "keep" if data["mode"] == "async" else "drain"
    )
    """What happens to running rollouts when new weights are published: `keep` continues them with their KV cache,
    `recompute` continues them with a KV cache computed under the new weights, `drain` lets them finish first. Default:
    `keep` in mode `async`, otherwise `drain`."""
    on_stale: Literal["wait", "requeue", "train"] = "wait"
    """What happens to a group that would miss its deadline: `wait` for it, `requeue` its prompt, or `train` on it late
    and count it. `requeue` favours short responses: in simulations the mean length fell by 18 to 20 %."""
    ahead: Count | None = None
    """No new group is admitted while this many batches of finished groups wait for the trainer, because they would only
    get staler. 2 is useful if the trainer is always the slower side; if response lengths vary a lot, it costs speed.
    null: only `max_staleness` limits admission."""
    stall_minutes: float = Field(10.0, ge=0.01, le=YEAR_S // 60)
    """The run stops after this long without progress, and names what it was waiting for."""
    max_restarts: NonNegative = 10
    """Largest number of restarts within 6 hours for each kind of component (engines, trainer ranks, scorer, gateway,
    episode workers). After that, the run stops with the first cause."""
    max_rejected_in_a_row: Count = 2000
    """The run stops after this many consecutive rejected groups."""


class EvaluationSet(Section):
    """Further prompts to evaluate on, from any task and split."""

    data: SplitSpec
    """The prompts. Without a path the task generates them: its split `eval`, or `train` if `split` is `train`."""
    task: TaskSpec | None = None
    """The task that scores them. Default: the task of the run."""
    every: NonNegative | None = None
    """Steps between two evaluations of this set. Default: `evaluation.every`."""
    greedy: bool = True
    """Generate one greedy response per prompt. false: sample `samples` responses."""
    samples: Count = 1
    """Sampled responses per prompt, with `greedy: false`."""


class EvaluationSpec(Section):
    """Accuracy on the held-out prompts and on further sets. The run's engines generate the responses."""

    every: NonNegative = 0
    """Steps between two evaluations during training; 0 evaluates only before and after training."""
    prompts: Count | None = None
    """Prompts per evaluation during training. Default: all held-out prompts."""
    samples: Count = 1
    """Sampled responses per held-out prompt. With more than one, every evaluation samples them and reports pass@1 to
    pass@k; with one, only the evaluations before and after training sample."""
    temperature: Temperature | None = None
    """Temperature of sampled responses. Default: `rollout.sampling.temperature`."""
    fix_version: bool = False
    """Delay new weights until a running evaluation ends, so it measures exactly one weight version. Otherwise the
    evaluation records the versions that it used."""
    sets: dict[SetName, EvaluationSet] = Field(default_factory=dict)
    """Further sets, by name."""


class CheckpointSpec(Section):
    """When the trainer's state is saved, and which checkpoints are kept."""

    every: NonNegative = 0
    """Steps between two checkpoints, also updates of `model.warm_start`; 0 saves only when the run ends or is
    interrupted."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Also keep checkpoints of steps divisible by this number; 0: none."""
    keep_best: NonNegative = 0
    """Also keep this many checkpoints with the best greedy held-out accuracy at their step."""
    upload: Text | None = None
    """Destination for a copy of each complete checkpoint: a URL that fsspec can write, such as
    `s3://bucket/folder`. Training does not wait for it. A failed copy is retried after the next checkpoint
    (docs/tutorial.md)."""


class JournalSpec(Section):
    """The durable record of the run: all groups, rollouts, batches and published versions."""

    segment_seconds: Seconds = 10.0
    """Tokens of unfinished rollouts are recorded at least this often, and at every publish."""
    keep: Literal["all"] | Count = "all"
    """`all` keeps the tokens of every rollout. A number N deletes the tokens of groups that were trained before the Nth
    newest checkpoint. Data that a resume from a kept checkpoint needs is never deleted."""


class WandbSpec(Section):
    """Weights & Biases. Needs the extra `wandb`."""

    project: Text = "asyncrl"
    """Project of the run."""
    entity: Text | None = None
    """User or team that owns the project. Default: your account's default entity."""
    mode: Literal["online", "offline"] = "online"
    """`online` needs an API key (`WANDB_API_KEY`, or `wandb login`). `offline` writes to the run's folder only: `wandb
    sync RUN/wandb/offline-*` uploads it later."""


class TrackingSpec(Section):
    """Where the run is logged in addition to its folder: MLflow, TensorBoard, Weights & Biases, your own monitors."""

    mlflow: bool = True
    """Log parameters, metrics and artifacts to MLflow."""
    uri: Text | None = None
    """MLflow's tracking URI. Default: a SQLite store in the runs folder."""
    experiment: Text = "asyncrl"
    """MLflow experiment."""
    responses_every: NonNegative = 10
    """Steps between two tables of training responses in MLflow and W&B: prompt, response, reward, versions, staleness.
    Evaluations have tables, too. There are at most 64 of a kind, with 16 responses each. 0: no tables."""
    tensorboard: bool = False
    """Write TensorBoard's event files to the run's folder. Needs the extra `tensorboard`."""
    wandb: WandbSpec | None = None
    """Log metrics to Weights & Biases. Default: off."""
    monitors: list[Annotated[str, pattern(MODULE_NAME, "must be module:Class")]] = Field(default_factory=list)
    """Your own monitors, each as `module:Class`: subclasses of `asyncrl_cli.monitors.base.Monitor` in modules next to
    the spec or on Python's path."""


class NodeSelector(Section):
    """The nodes of a joined cluster that may be used. Without `labels`, all may be used."""

    labels: dict[
        Annotated[str, pattern(_LABEL_KEY, "must be a label's key, such as `role` or `ray.io/market-type`")],
        Annotated[str, pattern(_LABEL_VALUES, "must be a value, `!value`, `in(a, b)` or `!in(a, b)`")],
    ] = Field(default_factory=dict)
    """Labels that a node must have (`ray start --labels`), each with a value, `!value`, `in(a, b)` or `!in(a, b)`. Ray
    itself gives each node the label `ray.io/node-id`."""


class ClusterSpec(Section):
    """Where the actors run."""

    address: Annotated[str | None, pattern(_RAY, "must be `auto` or `host:port`")] = None
    """Address of a running Ray cluster that this host is part of. Default: start one on this machine, and stop it at
    the end."""
    trainer: NodeSelector = Field(default_factory=NodeSelector)
    """Nodes for the trainer ranks. Ray puts them on as few nodes as possible."""
    engines: NodeSelector = Field(default_factory=NodeSelector)
    """Nodes for the engines. An engine has all its GPUs on one node."""
    gpu_memory_gb: float | None = Field(None, gt=0, le=10_000)
    """Memory of a GPU in GB (10⁹ bytes), for the memory estimate (docs/sizing.md). Default: the memory of this
    machine's smallest GPU."""
    host_memory_gb: float | None = Field(None, gt=0, le=1_000_000)
    """Memory of a host in GB, for the memory estimate. Default: the memory available on this machine."""
    gpus_per_host: Count = 8
    """GPUs per host, for the memory estimate."""
    autoscaling: bool = False
    """Set this if the cluster adds nodes when Ray asks for them. A run that lacks resources at the start then waits for
    them instead of being refused."""


class StopSpec(Section):
    """When the run ends."""

    steps: NonNegative | None = None
    """Training steps. If `epochs` is set, too, the run ends at whichever comes first. 0: the run ends after
    `model.warm_start`, and starts no engines."""
    epochs: Count | None = None
    """Passes over the training prompts. At the start, the prompts are counted and `stop.steps` is recorded: epochs ·
    prompts / `pipeline.groups_per_step`, rounded up to a published version. Skipped prompts and rejected groups give
    their places to the next prompts."""

    on_unhealthy: Literal["never"] | Count = 50
    """End the run, with a checkpoint and exit code 1, after this many steps in a row in which nothing was learned. In
    such a step no weight changes, or all rewards that `algorithm.advantage` compares are equal: the rewards of each
    group, or all rewards of the step. Steps that train only the critic do not count, and neither do steps of a task
    that the policy has learned to solve. `never` trains to the last step (docs/watching.md)."""

    @property
    def total(self) -> int:
        """`steps`; with `epochs`, an unreachable number until the start has counted the prompts."""
        return NOT_COUNTED if self.steps is None else self.steps


class ExperimentSpec(Section):
    """One experiment."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Prefix of the run id."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of all random numbers of the run."""
    runs_dir: Annotated[Path, SystemPath] = Field(Path("runs"), strict=False)
    """Folder of all runs, relative to the current folder."""
    model: ModelSpec = Field(examples=[{"path": "Qwen/Qwen3-0.6B"}])
    """The policy."""
    task: TaskSpec = Field(examples=[{"use": "math"}])
    """The task and its reward."""
    data: DataSpec = Field(default_factory=DataSpec)
    """Prompts."""
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    """Generation."""
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec)
    """The objective."""
    trainer: TrainerSpec = Field(default_factory=TrainerSpec)
    """Training."""
    pipeline: PipelineSpec = Field(default_factory=PipelineSpec)
    """Overlap of generation and training, and staleness."""
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    """Evaluation."""
    checkpoints: CheckpointSpec = Field(default_factory=CheckpointSpec)
    """Checkpoints."""
    journal: JournalSpec = Field(default_factory=JournalSpec)
    """The journal."""
    tracking: TrackingSpec = Field(default_factory=TrackingSpec)
    """Experiment tracking."""
    cluster: ClusterSpec = Field(default_factory=ClusterSpec)
    """Ray."""
    stop: StopSpec = Field(examples=[{"steps": 100}])
    """When the run ends."""
