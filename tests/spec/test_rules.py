"""Rules about keys that must be consistent with each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.problems import Problem, SpecError
from asyncrl_cli.spec.rules.model import SIZES
from asyncrl_cli.spec.rules.quantization import FP8_ENGINES
from asyncrl_cli.spec.sharing import engines_sleep, memory_share, shares_gpus, tensor_parallel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TWO_RANKS = ROOT / "tests/fixtures/two_ranks.yaml"
ROWS = f"model.warm_start.data.path={ROOT}/tests/fixtures/sft.jsonl"
Write = Callable[..., Path]
ON_GPUS = (
    *("rollout.gpus_per_engine=1", "trainer.gpus_per_rank=1"),
    *("rollout.dtype=bfloat16", "trainer.dtype=bfloat16"),
)

NO_EVAL = ("data.eval=null", "data.train={size: 100}")


def findings(path: Path, *overrides: str) -> list[Problem]:
    try:
        return list(load_spec(path, overrides).warnings)
    except SpecError as error:
        return list(error.problems)


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["trainer.ranks=3"], "trainer.sequence_parallel", "2 does not divide trainer.ranks 3"),
        (["trainer.attention=eager"], "trainer.attention", "eager cannot be divided"),
        (["trainer.packing=true"], "trainer.packing", "with sdpa every rank has a mask"),
        (["model.init.config.num_attention_heads=3"], "trainer.sequence_parallel", "3 attention heads and"),
        (["trainer.ranks=4", "trainer.minibatches=64"], "trainer.ranks", "4 / trainer.sequence_parallel 2 is more"),
        ([], None, ""),
    ],
    ids=str,
)
def test_sequences_are_divided_only_among_suitable_ranks(overrides: list[str], path: str | None, message: str) -> None:
    base = ["trainer.ranks=2", "trainer.sequence_parallel=2", "model.init.config.num_attention_heads=4"]
    sizes = ["model.init.config.num_key_value_heads=1", "model.init.config.head_dim=32", "pipeline.mode=sync"]
    groups = ["pipeline.groups_per_step=64", "rollout.group_size=1", "algorithm.uniform_groups=train"]
    found = findings(TWO_RANKS, *base, *sizes, *groups, *overrides)
    about = [problem for problem in found if "trainer" in problem.path and "threads" not in problem.path]
    if path is None:
        assert about == []
    else:
        (problem,) = about
        assert problem.path == path and problem.message.startswith(message) and problem.hint


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.ranks=3"], "2 does not divide trainer.ranks 3"),
        (["trainer.zero_stage=2"], "does not work with trainer.zero_stage 2"),
        (["model.lora={rank: 2}"], "does not work with model.lora"),
        (["trainer.offload=optimizer", "trainer.gpus_per_rank=1"], "does not work with trainer.offload"),
        (["algorithm.router_replay=true", "trainer.sequence_parallel=2"], ""),
        (["model.init.architecture=llama"], "the experts of llama cannot be divided"),
        ([], ""),
    ],
    ids=str,
)
def test_experts_are_divided_where_that_is_supported(overrides: list[str], message: str) -> None:
    base = ["trainer.ranks=2", "trainer.expert_parallel=2", "model.init.architecture=mixtral"]
    found = findings(TWO_RANKS, *base, *overrides)
    about = [problem for problem in found if problem.path == "trainer.expert_parallel"]
    assert [problem.message[: len(message)] for problem in about] == [message] * bool(message)
    assert all(problem.hint for problem in about)


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["model.warm_start.data.path=README.md"], "data.path", "unknown kind of file"),
        (["model.warm_start.data.size=5"], "data", "the task makes no rows with replies"),
        ([ROWS, "model.warm_start.steps=null"], "", "has neither steps nor epochs"),
        ([ROWS, "model.warm_start.steps=null", "model.warm_start.epochs=2"], "", ""),
        ([ROWS, "model.warm_start.train_on=all", "stop.steps=0"], "", ""),
    ],
)
def test_rows_of_a_warm_start(overrides: list[str], path: str, words: str) -> None:
    found = findings(
        TWO_RANKS, "trainer.threads_per_rank=1", "trainer.ranks=1", "model.warm_start={steps: 10}", *overrides
    )
    assert [problem.path for problem in found] == [f"model.warm_start.{path}".rstrip(".")] * bool(words)
    assert all(words in problem.message and problem.hint for problem in found)


def test_no_steps_need_a_warm_start() -> None:
    assert "nothing is trained in 0 steps" in [problem.message for problem in findings(TWO_RANKS, "stop.steps=0")]


def test_harmless_engine_arguments_are_accepted() -> None:
    args = "{pipeline_parallel_size: 1, distributed_executor_backend: mp, quantization: null}"
    assert not findings(ROOT / "specs/quickstart.yaml", f"rollout.engine_args={args}")


def test_evaluation_sets_are_evaluated_without_held_out_prompts(write: Write) -> None:
    assert findings(write(), *NO_EVAL, "evaluation={every: 5, sets: {a: {data: {size: 8}}}}") == []


def test_broken_rules_yaml_breaks_most_of_them() -> None:
    problems = findings(ROOT / "tests/fixtures/broken_rules.yaml")
    assert [(p.line, p.path) for p in problems if p.severity == "error"] == [
        (4, "model.path"),
        (4, "model.path"),
        (7, "model.init.config.hidden_size"),
        (7, "model.init.config.num_key_value_heads"),
        (8, "model.init.tokenizer"),
        (9, "model.max_length"),
        (9, "model.max_length"),
        (11, "task.use"),
        (13, "data.train.path"),
        (14, "data.eval"),
        (23, "rollout.engine_args.max-model-len"),
        (23, "rollout.engine_args.seed"),
        (23, "rollout.engine_args.scheduler_cls"),
        (26, "trainer.ranks"),
        (27, "trainer.minibatches"),
        (32, "pipeline.max_staleness"),
        (35, "pipeline.weight_update"),
        (36, "evaluation.every"),
        (37, "checkpoints.every"),
        (38, "stop.steps"),
    ]
    assert [p.path for p in problems if p.severity == "warning"] == [
        "rollout.dtype",
        "rollout.kv_cache_mb",
        "algorithm.correction.level",
        "trainer.gpus_per_rank",
        "trainer.tokens_per_microbatch",
        "trainer.schedule.warmup_updates",
        "pipeline.publish_every",
    ]
    assert all(problem.hint for problem in problems)


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["model.path=null"], "model", "model.path (a saved model)"),
        (["model.path=/no/such"], "model.path", "/no/such is not a folder"),
        (["model.path=~/no/such"], "model.path", "is not a folder"),
        (["model.path=my model"], "model.path", "neither a folder nor a hub id"),
        (["model.chat_template=no/such.jinja"], "model.chat_template", "is not a file"),
        (["task.use=regex"], "task.use", "the task `regex` left asyncrl"),
        (["task.use=my/tasks.py:reward"], "task.use", "`my.tasks:reward`"),
        (["task.use=nothing"], "task.use", "ready tasks are chain_sum, math"),
        (["task.use=null"], "task", "give task.use (one task) or task.mix (several)"),
        (["task.mix=[{name: a, use: exact}]"], "task.use", "set one of the two to null"),
        (["task.use=null", "task.mix=[{name: a, use: exakt}]"], "task.mix.0.use", "did you mean `exact`?"),
        (
            ["task.use=null", "task.mix=[{name: a, use: exact}, {name: a, use: gym/any}]"],
            "task.mix.1.name",
            "the name of another task",
        ),
        (
            ["task.use=null", "task.options={a: 1}", "task.mix=[{name: a, use: exact}]"],
            "task.options",
            "to the members",
        ),
        (["data.train.path=."], "data.train.path", "is a folder; name its files"),
        (["model.max_length=600"], "model.max_length", "to 1024, or lower rollout.max_response_tokens to 88"),
        (["model.max_length=256"], "model.max_length", "raise model.max_length to 1024"),
        (["rollout.group_size=512"], "rollout.max_running_rollouts", "raise it to 512 or more"),
        (["trainer.minibatches=64"], "trainer.minibatches", "use one of 1, 2, 4, 8, 16, 32"),
        (["trainer.offload=optimizer"], "trainer.offload", "set it to none"),
        (["trainer.offload=all", "trainer.zero_stage=2", *ON_GPUS], "trainer.offload", "raise trainer.zero_stage to 3"),
        (["trainer.attention=flash_attention_2"], "trainer.attention", "the trainer is on CPU in float32"),
        (["trainer.fused_kernels=true"], "trainer.fused_kernels", "set it to false, or trainer.gpus_per_rank to 1"),
        (["trainer.attention=flash_attention_4"], "trainer.attention", "flash_attention_4 needs a GPU and bfloat16"),
        (["pipeline.mode=sync", "pipeline.max_staleness=1"], "pipeline.max_staleness", "mode sync means 0, not 1"),
        (["pipeline.partial_rollouts=true"], "pipeline.partial_rollouts", "needs mode sync"),
        (
            ["pipeline.mode=sync", "pipeline.partial_rollouts=true", "pipeline.max_staleness=0"],
            "pipeline.max_staleness",
            "set it to 1, or remove it",
        ),
        (["pipeline.mode=sync", "pipeline.weight_update=keep"], "pipeline.weight_update", "means drain, not keep"),
        (
            ["model={path: null, init: {architecture: gpt_oss, tokenizer: characters}}"],
            "model.init.architecture",
            "vLLM's loader writes its experts",
        ),
        (["pipeline.publish_every=4", "stop.steps=8", "evaluation.every=6"], "evaluation.every", "use 4"),
        (
            ["pipeline.publish_every=4", "stop.steps=8", "evaluation.sets={a: {data: {size: 1}, every: 3}}"],
            "evaluation.sets.a.every",
            "3 is not a multiple of pipeline.publish_every 4",
        ),
        (
            ["algorithm={preset: ppo, critic: {warmup_steps: 8}}", "stop.steps=8"],
            "algorithm.critic.warmup_steps",
            "the policy is never trained in 8",
        ),
        ([*NO_EVAL, "evaluation.every=5"], "evaluation.every", "no held-out prompts"),
        ([*NO_EVAL, "evaluation.prompts=8"], "evaluation.prompts", "no held-out prompts"),
        ([*NO_EVAL, "evaluation.samples=4"], "evaluation.samples", "no held-out prompts"),
        ([*NO_EVAL, "checkpoints.keep_best=1"], "checkpoints.keep_best", "no held-out prompts"),
        (["rollout.kv_cache_mb=512", *ON_GPUS], "rollout.kv_cache_mb", "has no effect on GPU engines"),
        (["rollout.speculative_tokens=3"], "rollout.speculative_tokens", "engines do not guess tokens"),
        (["algorithm.router_replay=true"], "algorithm.router_replay", "on GPUs only"),
        (["model.lora={rank: 600, serve: adapter}"], "model.lora.rank", "of rank 512 at most"),
        (["model={path: null, init: {architecture: qwen3}}", "model.max_images=1"], "model.max_images", "init vision"),
        (["model.max_images=1", "model.lora={serve: adapter}"], "model.lora.serve", "next to a vision tower"),
        (
            ["model.lora={serve: adapter}", "rollout.engine_args={quantization: fp8_per_tensor}", *ON_GPUS],
            "rollout.engine_args.quantization",
            "adapters together with quantized weights",
        ),
        (
            ["model={path: null, init: {architecture: mixtral, tokenizer: characters}}", "model.lora={serve: adapter}"],
            "model.lora.serve",
            "a mixture of experts on GPUs only",
        ),
        ([*ON_GPUS, "rollout.gpus_per_engine=0"], "rollout.gpus_per_engine", "the engines are on CPU"),
        ([*ON_GPUS, "trainer.gpus_per_rank=0"], "trainer.gpus_per_rank", "the trainer is on CPU"),
        (["tracking.uri=nonsense://x"], "tracking.uri", "no tracking store of scheme `nonsense`"),
        (["pipeline.publish_every=10"], "pipeline.publish_every", "rollouts of the initial weights"),
        (["runs_dir=/dev/null"], "runs_dir", "/dev/null is a file"),
        (["runs_dir=/dev/null/runs"], "runs_dir", "/dev/null is a file"),
        (["task.options={a: [.nan]}"], "task.options.a.0", "must be a finite number"),
        (["data.train={path: 'hf:', split: train}"], "data.train.path", "is not a hub id"),
        (["rollout.engines=0"], "rollout.engines", "must be a whole number from 1 on, or a mapping with min and max"),
        (["rollout.engines=two"], "rollout.engines", "or a mapping with min and max, not 'two'"),
        (["rollout.engines={min: 0, max: 2}"], "rollout.engines.min", "must be at least 1, not 0"),
        (["rollout.engines={max: 2}"], "rollout.engines.min", "missing"),
        (["rollout.engines={min: 2, max: 1}"], "rollout.engines.max", "1 is less than rollout.engines.min 2"),
        (["cluster.address=ray://head:10001"], "cluster.address", "the driver has to run on a host of the cluster"),
    ],
)
def test_one_broken_rule(write: Write, overrides: list[str], path: str, words: str) -> None:
    (problem,) = findings(write(), *overrides)
    assert problem.path == path
    assert words in f"{problem.message} {problem.hint}"


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        ("{async_scheduling: true}", "async_scheduling", "remove it"),
        ("{pipeline_parallel_size: 2}", "pipeline_parallel_size", "2 cannot work"),
        ("{distributed-executor-backend: ray}", "distributed-executor-backend", "set it to mp"),
        ("{quantization: fp8_per_block}", "quantization", "engines on GPUs"),
        ("{quantization: fp8}", "quantization", "use one of fp8_per_tensor"),
        ("{kv-cache-dtype: fp8}", "kv_cache_dtype", "engines on GPUs"),
        ("{quantization: gptq}", "quantization", "publishes"),
        ("{kv_cache_dtype: nvfp4}", "kv_cache_dtype", "publishes"),
        ("{calculate_kv_scales: true}", "calculate_kv_scales", "publishes"),
        ("{speculative_config: {method: suffix}}", "speculative_config", "would not continue as it began"),
        ("{enable_lora: true}", "enable_lora", "model.lora.serve"),
        ("{logits_processors: [my.Processor]}", "logits_processors", "the distribution of the weights"),
        ("{override_generation_config: {top_k: 5}}", "override_generation_config", "rollout.sampling"),
        ("{a: .inf}", "a", "must be a finite number"),
    ],
)
def test_engine_arguments_that_cannot_work(write: Write, arguments: str, key: str, words: str) -> None:
    (problem,) = findings(write(), f"rollout.engine_args={arguments}")
    assert problem.path == f"rollout.engine_args.{key}" and words in f"{problem.message} {problem.hint}"


@pytest.mark.parametrize(
    ("architecture", "hint"),
    [("qwen33", "did you mean `qwen3`?"), ("Llama", "`llama`?"), ("zzz", "`qwen3` or `llama`")],
)
def test_architectures_that_transformers_does_not_have(write: Write, architecture: str, hint: str) -> None:
    path = write("model: {init: {architecture: qwen3_moe}}\ntask: {use: math}\nstop: {steps: 10}\n")
    assert findings(path) == []
    (problem,) = findings(path, f"model.init.architecture={architecture}")
    assert problem.path == "model.init.architecture" and hint in problem.hint


@pytest.mark.parametrize("size", ["0", "-96", "big", "[64]", "true", ".nan", "1.5", "2147483648"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_a_new_model_are_whole_numbers(write: Write, name: str, size: str) -> None:
    path = write("model: {init: {architecture: qwen3}}\ntask: {use: math}\nstop: {steps: 10}\n")
    problems = findings(path, f"model.init.config.{name}={size}")
    assert {problem.path for problem in problems} == {f"model.init.config.{name}"}
    assert "must be a whole number from 1" in problems[0].message


def test_the_cache_holds_a_longest_rollout(write: Write) -> None:
    config = "{hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2}"
    path = write(
        f"model: {{init: {{architecture: qwen3, config: {config}}}, max_length: 8192}}\n"
        "task: {use: math}\nstop: {steps: 10}\n"
    )
    (problem,) = findings(path, "rollout.kv_cache_mb=7")
    assert problem.path == "rollout.kv_cache_mb" and "raise it to 8 or more" in problem.hint
    assert findings(path, "rollout.kv_cache_mb=8") == findings(path) == []
    assert findings(path, "rollout.kv_cache_mb=4", "rollout.dtype=bfloat16", "trainer.dtype=bfloat16") == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "localhost", "node-1.cluster.example", "_a"])
def test_valid_hosts_and_addresses(write: Write, host: str) -> None:
    shown = f"[{host}]" if ":" in host else host
    for override in (f"rollout.gateway.host='{host}'", f"cluster.address='{shown}:6379'"):
        assert findings(write(), override) == []


def test_nodes_can_be_chosen_only_in_a_joined_cluster(write: Write) -> None:
    chosen = ("cluster.trainer.labels={role: head}", "cluster.engines.labels={role: rollout}")
    chosen = (*chosen, "cluster.autoscaling=true")
    assert len(findings(write(), *chosen)) == 3
    assert findings(write(), *chosen, "cluster.address=auto") == []


@pytest.mark.parametrize(
    "labels", ["{role: a}", "{role: '!a'}", "{ray.io/market-type: 'in(spot, on-demand)'}", "{a: '!in(b,c)'}"]
)
def test_label_selectors_that_ray_accepts_are_valid(write: Write, labels: str) -> None:
    from ray._private.label_utils import validate_label_selector

    assert findings(write(), f"cluster.engines.labels={labels}", "cluster.address=auto") == []
    assert validate_label_selector(yaml.safe_load(labels)) is None


@pytest.mark.parametrize("labels", ["{role: ''}", "{role: 'a b'}", "{'-a': b}", "{a: 'in()'}", "{a: '!!b'}", "{a: 1}"])
def test_label_selectors_that_ray_refuses_are_refused(write: Write, labels: str) -> None:
    assert findings(write(), f"cluster.engines.labels={labels}", "cluster.address=auto")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("cluster.address", "auto head.cluster.example:6379 10.0.0.1:6379"),
        ("tracking.uri", "mlruns /srv/mlruns file:///srv sqlite:///a.db http://host:5000 mysql+pymysql://u@h/d"),
        ("pipeline.mode", "sync one_step_off async"),
    ],
)
def test_valid_values_have_no_problem(write: Write, key: str, values: str) -> None:
    assert [findings(write(), f"{key}={value}") for value in values.split()] == [[]] * len(values.split())


def test_threads_are_counted_on_this_machine_only(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert findings(write()) == []
    assert [p.path for p in findings(write(), "trainer.ranks=2")] == ["trainer.threads_per_rank"]
    assert findings(write(), "trainer.ranks=2", "pipeline.mode=sync") == []
    assert findings(write(), "trainer.ranks=2", "cluster.address=auto") == []
    assert findings(write(), "trainer.ranks=2", *ON_GPUS) == []


def test_float32_on_gpus_is_warned_about(write: Write) -> None:
    assert findings(write(), *ON_GPUS) == findings(write()) == []
    for changes, hint in (
        (["rollout.dtype=float32", "trainer.dtype=float32"], "set rollout.dtype and trainer.dtype to bfloat16"),
        (["trainer.dtype=float32"], "set trainer.dtype to bfloat16"),
    ):
        found = findings(write(), *ON_GPUS, *changes)
        assert hint in [problem.hint for problem in found] and {problem.severity for problem in found} == {"warning"}


def test_adapters_in_float32_are_refused_on_gpus(write: Write) -> None:
    changes = ("rollout.dtype=float32", "trainer.dtype=float32", "model.lora={serve: adapter}")
    assert "no float32 kernels for adapters" in str(findings(write(), *ON_GPUS, *changes))


@pytest.mark.parametrize(("engines", "bounds"), [("2", (2, 2)), ("{min: 1, max: 3}", (1, 3))])
def test_engines_are_a_number_or_a_range(engines: str, bounds: tuple[int, int]) -> None:
    rollout = load_spec(ROOT / "specs/quickstart.yaml", [f"rollout.engines={engines}"]).spec.rollout
    assert (rollout.min_engines, rollout.max_engines) == bounds


SHARED = (
    "rollout.gpus_per_engine=0.4",
    "trainer.gpus_per_rank=0.6",
    "trainer.dtype=bfloat16",
    "rollout.dtype=bfloat16",
)


def test_an_engine_and_a_rank_may_share_a_gpu() -> None:
    quickstart = ROOT / "specs/quickstart.yaml"
    assert findings(quickstart, *SHARED) == []
    assert findings(quickstart, *SHARED, "rollout.engines=2", "trainer.ranks=2", "pipeline.mode=sync") == []
    spec = load_spec(quickstart, (*SHARED, "pipeline.mode=sync")).spec
    assert shares_gpus(spec) and engines_sleep(spec) and tensor_parallel(spec) == 1
    assert memory_share(0.4) + memory_share(0.6) == pytest.approx(0.92)
    whole = load_spec(quickstart, ("rollout.gpus_per_engine=2.0", "trainer.gpus_per_rank=1")).spec
    assert not shares_gpus(whole) and not engines_sleep(whole) and tensor_parallel(whole) == 2
    assert (memory_share(2), str(whole.rollout.gpus_per_engine)) == (0.92, "2")


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["rollout.gpus_per_engine=0.5"], "rollout.gpus_per_engine", "take 0.5 + 0.6 of the GPU"),
        (["rollout.gpus_per_engine=1"], "rollout.gpus_per_engine", "must be a share of a GPU, too"),
        (["trainer.gpus_per_rank=0"], "trainer.gpus_per_rank", "must be a share of a GPU, too"),
        (["rollout.gpus_per_engine=1.5"], "rollout.gpus_per_engine", "must be a whole number, or a share of one GPU"),
        (["rollout.engines=2"], "rollout.engines", "must be trainer.ranks (1)"),
        (["rollout.engines={min: 1, max: 1}"], "rollout.engines", "must be trainer.ranks (1)"),
        (
            ["rollout.engine_args.gpu_memory_utilization=0.9"],
            "rollout.engine_args.gpu_memory_utilization",
            "0.9 is more than the engine's share of the GPU, 0.4",
        ),
        (
            ["cluster.address=auto", "cluster.engines.labels.role=rollout"],
            "cluster.engines",
            "run on the nodes of these ranks",
        ),
    ],
)
def test_shares_that_cannot_be_shared(overrides: list[str], path: str, message: str) -> None:
    found = [problem for problem in findings(ROOT / "specs/quickstart.yaml", *SHARED, *overrides) if problem.hint]
    assert [problem.path for problem in found if problem.severity == "error"] == [path]
    assert any(message in problem.message for problem in found)


def test_several_ranks_beside_busy_engines_are_warned_about() -> None:
    def warned_paths(*overrides: str) -> list[str]:
        problems = findings(ROOT / "specs/quickstart.yaml", *SHARED, *overrides)
        return [problem.path for problem in problems if "ranks wait for each other" in problem.message]

    two_ranks = ("trainer.ranks=2", "rollout.engines=2", "pipeline.mode=async")
    assert warned_paths(*two_ranks) == ["trainer.gpus_per_rank"]
    assert warned_paths(*two_ranks, "pipeline.mode=sync") == warned_paths("pipeline.mode=async") == []
    assert warned_paths(*two_ranks, "trainer.gpus_per_rank=1", "rollout.gpus_per_engine=1") == []


@pytest.mark.parametrize(
    ("argument", "value"), [(argument, value) for argument, values in FP8_ENGINES.items() for value in values]
)
def test_engines_on_gpus_may_compute_in_fp8_where_the_difference_is_corrected(
    write: Write, argument: str, value: str
) -> None:
    fp8 = (*ON_GPUS, f"rollout.engine_args={{{argument}: {value}}}")
    assert not findings(write(), *fp8)
    found = findings(write(), *fp8, "rollout.dtype=float32", "trainer.dtype=float32")
    assert f"engines with {argument} {value} need bfloat16" in [problem.message for problem in found]
    off = "algorithm.correction={level: null, cap: null}"
    problems = [problem for problem in findings(write(), *fp8, off) if problem.severity == "error"]
    assert [problem.path for problem in problems] == ["algorithm.correction.level"]


def test_ranks_on_gpus_in_bfloat16_use_the_kernel_for_packed_rows_by_default(write: Write) -> None:
    assert load_spec(write(), ON_GPUS).spec.trainer.attention == "varlen"
    float32 = ("trainer.dtype=float32", "rollout.dtype=float32")
    for changes in ([], [*ON_GPUS, *float32]):
        trainer = load_spec(write(), changes).spec.trainer
        assert (trainer.attention, trainer.packing) == ("sdpa", False)


@pytest.mark.parametrize("attention", ["sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_rows_are_packed_by_default_with_flash_attention(write: Write, attention: str) -> None:
    chosen = (*ON_GPUS, f"trainer.attention={attention}")
    spec = load_spec(write(), chosen).spec
    assert spec.trainer.packing == (attention != "sdpa")
    assert not load_spec(write(), [*chosen, "trainer.packing=false"]).spec.trainer.packing


def test_sequences_with_images_are_not_divided(write: Write) -> None:
    divided = ("trainer.ranks=2", "trainer.sequence_parallel=2")
    messages = [problem.message for problem in findings(write(), "model.max_images=1", *divided)]
    assert "sequences with images cannot be divided over ranks" in messages
