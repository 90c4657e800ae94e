"""The spec's sections for a run's inputs: model, task and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from asyncrl_cli.spec.base import (
    Count,
    Fraction,
    LearningRate,
    MemoryMB,
    NonNegative,
    Seconds,
    Section,
    SetName,
    SystemPath,
    Text,
)
from asyncrl_cli.spec.data_sources import files_of

CHARACTERS = "characters"
"""Name of the tokenizer for new models that has one token for each printable ASCII character."""


class ModelInit(Section):
    """A model built from an architecture's config, with random weights."""

    architecture: Text
    """A transformers model type with a causal language model for text, such as `qwen3` or `llama`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the architecture's transformers config. `vocab_size` and the special token ids come from the
    tokenizer."""
    tokenizer: Annotated[Text, SystemPath] = CHARACTERS
    """`characters` makes a tokenizer with one token for each printable ASCII character. Any other text is the path of a
    saved tokenizer (relative to this file)."""


Sources = Annotated[
    Annotated[Text, SystemPath, Tag("text")]
    | Annotated[list[Annotated[Text, SystemPath]], Field(min_length=1), Tag("list")]
    | Annotated[None, Tag("none")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "text" if value is not None else "none"),
]
"""One source, a list of files, or none. With the discriminator, pydantic reports errors only for the type given."""


class SplitSpec(Section):
    """The prompts of one split: where they come from, and how a row becomes a prompt. See docs/data.md."""

    path: Sources = None
    """A `.jsonl`, `.json`, `.parquet` or `.csv` file, a pattern such as `data/*.parquet`, a list of files and patterns,
    `hf:owner/name` (a hub id, optionally with `@revision`), or a
    `module:function` that yields rows. Text files may end in `.gz`. Relative to this file. Without a path the
    task makes its own prompts."""
    size: Count | None = None
    """Number of prompts: the first rows, or the number that the task generates. Default: all rows."""
    prompt_column: Text = "prompt"
    """The column with the prompt, or a path into an object such as `extra_info.question`: text, or a list of chat
    messages. All other columns reach the task."""
    uid_column: Text = "uid"
    """The column, or path, with the unique name of each row. Rows without a column `uid` are named by number and
    content; a column with another name must exist."""
    template: str | None = None
    r"""Build the prompt from columns instead, as in `"Q: {question}\nA:"`; `{{` is a literal brace."""
    image_column: Text | None = None
    """The column with a row's image or list of images: paths, data URLs or bytes. They replace `<image>` in the prompt.
    Default: images are only in the messages. See docs/data.md."""
    system: str | None = None
    """A system message to put before the prompt. A text prompt becomes a chat of this message and a user message."""
    config: str | None = None
    """The hub data set's config."""
    split: str | None = None
    """The split of a hub data set, such as `train` or `test[:200]`."""

    @property
    def path_list(self) -> list[str]:
        """The sources as written. Empty if the task makes the prompts."""
        return [self.path] if isinstance(self.path, str) else self.path or []

    @property
    def paths(self) -> list[str]:
        """The sources in order, with each pattern replaced by its files."""
        return [file for path in self.path_list for file in files_of(path)]


class RateSchedule(Section):
    """The learning rate over optimizer updates."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    warmup_updates: NonNegative = 0
    """Optimizer updates of linear warm-up from zero."""
    final_fraction: Fraction = 0.0
    """Final learning rate of `linear` and `cosine`, as a fraction of the peak."""


class WarmStart(Section):
    """Supervised training (SFT) on your own rows, before reinforcement learning starts, on the trainer's ranks.

    `trainer` sets everything that has no key here, such as `tokens_per_microbatch` and the optimizer's other settings.
    The loss is the mean over the learned tokens of an update. With `stop.steps: 0` the run ends after it. See
    docs/models.md.
    """

    data: SplitSpec = Field(examples=[{"path": "sft.jsonl"}])
    """Rows to train on. `prompt_column` names the column with the conversation, often `messages`, which ends with an
    assistant message. Rows longer than `model.max_length` are skipped and counted."""
    response_column: Text | None = None
    """The column of `data` with the reply as text, if `prompt_column` has only the prompt."""
    train_on: Literal["last", "all"] = "last"
    """Assistant messages of a row that the loss covers. `all` needs a chat template that never changes earlier messages
    when later messages follow."""
    steps: Count | None = None
    """Optimizer updates. If `epochs` is set, too, the warm start ends at whichever comes first."""
    epochs: Count | None = None
    """Passes over the rows, each in another order. The last update may have fewer rows than `batch_size`."""
    batch_size: Count = 32
    """Rows per update."""
    held_out_rows: NonNegative = 0
    """Rows, drawn by the seed, that are never trained on. Their loss is measured before the first update and after the
    last one, and every `evaluate_every` updates."""
    evaluate_every: NonNegative = 0
    """Updates between two measurements of the held-out loss; 0: only before and after."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate."""
    schedule: RateSchedule = Field(default_factory=RateSchedule)
    """Learning-rate schedule; `linear` and `cosine` span the whole warm start."""

    def updates(self, rows: int) -> int:
        """Number of updates for this many rows."""
        by_epochs = -(-rows * self.epochs // self.batch_size) if self.epochs else self.steps or 0
        return min(by_epochs, self.steps or by_epochs)


SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM's slots for adapters. An adapter with a rank between two of these is padded with zeros."""


class LoraSpec(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685). Only they are trained; the model's own weights stay fixed.

    There is no dropout, because it would make the trainer's log-probs differ from the engines' log-probs.
    """

    path: Annotated[Text | None, SystemPath] = None
    """Folder of an adapter to start from, as peft saves it (`runs/RUN/adapter`, for example). Its rank, alpha and
    layers must be those given here. A KL penalty still compares with the model without adapters."""
    rank: Count = 16
    """Rank of an adapter, r."""
    alpha: float = Field(32.0, gt=0, le=1_000_000)
    """The product of an adapter's matrices is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """Names of the layers that get an adapter, such as `q_proj`. `all-linear`: every linear layer except the output
    head."""
    serve: Literal["merged", "adapter"] = "merged"
    """The weights that engines get with each version. `merged`: all weights, with the adapters merged into them.
    `adapter`: only the adapters, which vLLM applies on top of the initial model. Engines read the initial model from
    its folder when they start, so every host with engines needs this folder."""

    @property
    def slot_rank(self) -> int:
        """Rank of the slot where vLLM stores these adapters: the smallest rank that is large enough."""
        return next((rank for rank in SLOT_RANKS if rank >= self.rank), self.rank)


TEMPLATE_DATE = date(2026, 1, 1)
"""Default of ``model.chat_template_date``."""
FROZEN: Sequence[Literal["vision"]] = ("vision",)
"""Default of ``model.freeze``."""


class ModelSpec(Section):
    """The policy: a saved model, or one made from a config."""

    path: Annotated[Text | None, SystemPath] = None
    """A Hugging Face model directory (relative to this file), or a hub id."""
    init: ModelInit | None = None
    """Build the model from a config instead."""
    warm_start: WarmStart | None = None
    """Supervised training first. Its result is the run's initial model, in `runs/RUN/warm_start`."""
    lora: LoraSpec | None = None
    """Train adapters instead of all weights. They are merged into the weights of saved models, and also of engines
    unless `serve` is `adapter`."""
    max_length: Count = 1024
    """Longest sequence in tokens: prompt and response together."""
    chat_template: Annotated[Text | None, SystemPath] = None
    """A file with a Jinja chat template to use instead of the tokenizer's own (relative to this file). Default: the
    tokenizer's template; of several, the one named `default`."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`: for prompts, episodes and `asyncrl serve`.
    A variable that the template does not read is refused."""
    chat_template_date: date = Field(TEMPLATE_DATE, strict=False)
    """The date for chat templates that write today's date, so that a run has the same prompts every day."""

    max_images: NonNegative = 0
    """Largest number of images in a conversation; 0: text only. Images need a model with a vision tower, and
    torchvision."""
    freeze: list[Literal["vision"]] = Field(default_factory=lambda: list(FROZEN))
    """Parts of a vision-language model that are not trained. `vision`: the vision tower; its projector is trained."""

    @property
    def published_adapter(self) -> LoraSpec | None:
        """The adapters if the engines get only these with each version (`serve: adapter`), otherwise None."""
        return self.lora if self.lora is not None and self.lora.serve == "adapter" else None


class EpisodeSpec(Section):
    """Limits of an episode: one rollout that an environment, an agent or a command plays. At `max_calls` or
    `max_tokens` the episode ends with its reward so far; at `timeout_s` it fails."""

    max_calls: Count = 32
    """Calls of the model in one episode."""
    max_tokens: Count | None = None
    """Tokens that the model may sample in one episode, over all its calls."""
    timeout_s: Seconds = 600.0
    """Seconds after which an unfinished episode fails."""
    workers: Count = 1
    """Processes that play episodes."""
    concurrency: Count = 128
    """Episodes that one process plays at a time; further episodes wait."""
    memory_mb: MemoryMB | None = None
    """Address space, in MiB, that a process may use. Each process that it starts has the same limit."""


class PromptFilterSpec(Section):
    """Online filtering: solved training prompts are excluded."""

    solved_streak: Count = 1
    """A prompt is excluded after this many consecutive groups with only correct rollouts."""
    revisit_fraction: Fraction = 0.0
    """Fraction of an excluded prompt's turns at which it is used anyway. If it is not solved then, it is included
    again."""


class DataSpec(Section):
    """Prompts for training and for evaluation."""

    train: SplitSpec = Field(default_factory=lambda: SplitSpec(size=100_000))
    """Training prompts."""
    eval: SplitSpec | None = Field(
        default_factory=lambda data: None if "train" in data and data["train"].path else SplitSpec(size=256)
    )
    """Held-out prompts, never trained on. null: none, so only `evaluation.sets` are evaluated. Default: null if
    `data.train` has a path, otherwise 256 prompts that the task makes."""
    shuffle: bool = True
    """Shuffle the training prompts in every epoch; the order follows from the seed."""
    apply_chat_template: bool = True
    """Render a text prompt as a user message with the model's chat template. `false`: use it as plain text, for base
    models and for texts that already have the template's tokens. Models without a chat template always get plain text,
    and chat messages always go through the template."""
    special_tokens: Literal["text", "tokens"] = "text"
    """Special tokens such as `<|im_start|>` inside messages and tools. `text`: they stay text, so no message can forge
    another. `tokens`: they become the model's tokens. Prompts without the template always have tokens."""
    image_max_pixels: Count = 16_777_216
    """Largest number of pixels of an image; rows with larger images are refused. The model's processor scales images
    down to its own limit."""
    filter: PromptFilterSpec | None = None
    """Online filtering: exclude training prompts that are solved."""


class SandboxSpec(Section):
    """A sandbox for each episode: an empty folder, this machine's programs and Python, and limits.

    A `command` runs inside; agents, environments and tools get it as `sandbox`. See docs/agents.md.
    """

    kind: Literal["bubblewrap", "container", "none"] = "bubblewrap"
    """`bubblewrap`: separate namespaces. `container`: a container of podman or docker, with a task's own image. `none`:
    no confinement; commands may do everything that your user may do, and only their time is limited."""
    image: Text | None = None
    """Image of the container; it may contain columns of the row, as in `{image}`. A run pulls no image: it must be on
    every node."""
    runtime: Text | None = None
    """The engine's `--runtime` for containers, such as `runsc` (gVisor). null: the engine's default."""
    time_s: Seconds = 60.0
    """Time limit of a command in seconds. The task `command` uses `task.episode.timeout_s` instead."""
    memory_mb: MemoryMB = 1024
    """Memory limit of all its processes together in MiB. In a container the files of `/sandbox` count, too."""
    processes: Count = 128
    """Largest number of processes and threads at a time."""
    disk_mb: Count = 256
    """Size limit of its work folder in MiB; the folder is in memory. `/tmp` has a separate limit of the same size; in a
    container this is a limit on all that is written outside of the work folder."""
    readable: list[Annotated[Text, SystemPath]] = Field(default_factory=list)
    """Further files and folders (relative to this file) that can be read inside, at the same paths."""
    network: Literal["gateway", "none"] = "gateway"
    """`gateway`: only the model's server can be reached. `none`: nothing can be reached."""


class McpServerSpec(Section):
    """An MCP server with tools for the policy: a program (`command`), or a running server (`url`)."""

    command: Text | None = None
    """The program of a stdio server. Each episode that calls one of its tools starts it, in this file's folder."""
    args: list[str] = Field(default_factory=list)
    """Arguments of the program."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program. From the run's environment it gets only `PATH`, `HOME` and a few others.
    Write a secret as `${env:NAME}`: the run's folder then keeps the reference, not the value."""
    url: Text | None = None
    """Address of a streamable HTTP server, such as `http://localhost:8000/mcp`."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers of every request. Write a secret as `${env:NAME}`, as in `env`."""
    allowed_tools: Annotated[list[Text], Field(min_length=1)] | None = None
    """The tools that the policy gets. Default: all tools of the server."""
    timeout_s: Seconds = 30.0
    """Time limit, in seconds, for connecting to the server and for each tool call."""


class ToolsSpec(Section):
    """External tools for the policy. See docs/agents.md."""

    mcp: Annotated[dict[SetName, McpServerSpec], Field(min_length=1)]
    """MCP servers, by names of your choice."""


class TaskMember(Section):
    """One task of a mix."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Prefix of the uids of its prompts and of the names of its metrics."""
    weight: float = Field(1.0, gt=0, le=1_000_000_000)
    """Its share of the prompts, relative to the other tasks' weights."""
    use: str
    """The task, as in `task.use`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's class, as in `task.options`."""
    tools: ToolsSpec | None = None
    """Tools for the policy, as in `task.tools`."""
    reward_timeout_s: Seconds | None = None
    """Time limit of a reward of this task in seconds. Default: `task.reward_timeout_s`."""
    train: SplitSpec | None = None
    """Its training prompts. Default: the task generates as many as its share needs."""
    eval: SplitSpec | None = None
    """Its held-out prompts. Default: the task generates them."""


class TaskSpec(Section):
    """The model's task and the scoring of its responses: one task (`use`), or several (`mix`).

    See docs/tasks.md.
    """

    use: str | None = None
    """A ready task such as `chain_sum`, `math` or `gym/countdown`, or `module:name`: a task class, an environment
    class, a reward function `f(prompt, response)` or `f(prompt, responses)`, or an agent `async f(prompt, model)`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's class."""
    tools: ToolsSpec | None = None
    """Tools for the policy, in addition to the tools that a task brings. A task with a reward becomes an episode: the
    policy may call tools, and the first reply without a call is scored."""
    mix: list[TaskMember] = Field(default_factory=list)
    """Several tasks to train on together, each with its share of the prompts."""
    special_tokens: Literal["hidden", "shown"] | None = None
    """Special tokens in the text that rewards, environments and the APIs read. `shown` keeps them, except tokens that
    end a reply. Use it for models with special tokens such as `</think>`. Default: `hidden`."""
    reward_timeout_s: Seconds = 30.0
    """Time limit of one rollout's reward in seconds; the rollout fails after it. A reward that sees the group has this
    time for the entire group."""
    reward_workers: Count = 1
    """Processes that compute rewards."""
    reward_memory_mb: MemoryMB | None = None
    """Memory limit of a reward's process in MiB; a reward that needs more fails. null: no limit."""
    reward_concurrency: Count = 1
    """Rewards that one process computes at a time, if the reward is an async function."""
    episode: EpisodeSpec = Field(default_factory=EpisodeSpec)
    """Limits of a rollout that an environment, an agent or a command plays."""
    sandbox: SandboxSpec | None = None
    """A sandbox for the commands of an episode. null: none."""
