"""Unusable prompts and sizes are refused at the start, whatever the load of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.checks.model import check_model, check_served, check_teacher
from asyncrl_cli.checks.prompts import ENOUGH, check_prompts
from asyncrl_cli.checks.start import StartChecks
from asyncrl_cli.core.errors import ConfigError, DataError
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.orchestrator.evaluation import encoded
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.rollout.engine_settings import adapted_names
from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.spec.load import dump_spec, load_spec
from tests.small_models import ARCHITECTURES, SMALL

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "specs/quickstart.yaml"
LONG, BROKEN, FINE = "x" * 50, "broken", "fine"
AT_ONCE_S, LIMIT_S = 0.0, 60.0
"""Time limits. With the first one only one prompt is tried."""


class Tokenizer:
    """A token for each character."""

    chat_template = bos_token_id = None

    def __call__(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        if BROKEN in texts:
            raise ValueError("no such character")
        return {"input_ids": [list(range(len(text))) for text in texts]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return f"{len(ids)} characters"


ENCODER = PromptEncoder(Tokenizer(), max_tokens=10)


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(str(row), text, {}) for row, text in enumerate(texts)]


def check(texts: list[str], limit_s: float = LIMIT_S) -> Result:
    return check_prompts(
        prompts(*texts), ENCODER, location="data.train", limit_s=limit_s, locate="rows.jsonl:{}".format
    )


@pytest.mark.parametrize("first", [LONG, BROKEN])
def test_one_slow_prompt_says_nothing_about_the_others(first: str) -> None:
    for limit_s in (AT_ONCE_S, LIMIT_S):
        found = check([first, *[FINE] * 999], limit_s)
        assert isinstance(found, Warned)
        assert found.hint


@pytest.mark.parametrize(("first", "says"), [(LONG, "max_prompt_tokens"), (BROKEN, "no such character")])
def test_a_split_without_a_usable_prompt_is_refused(first: str, says: str) -> None:
    for texts in ([first], [first] * ENOUGH, [first, *[LONG] * 999]):
        with pytest.raises(DataError, match=says) as refused:
            check(texts)
        assert refused.value.location == ("rows.jsonl:0" if first == BROKEN else "data.train")
        assert refused.value.hint


def test_held_out_rows_that_cannot_be_encoded_are_skipped_as_in_training() -> None:
    warned: list[str] = []
    found = encoded(prompts(BROKEN, FINE, LONG, BROKEN), ENCODER, "data.eval", warned.append)
    assert [prompt.content for prompt, _ in found] == [FINE]
    assert [text.partition(" prompts ")[0] for text in warned] == ["data.eval: 3 of 4"]


@pytest.mark.parametrize("kind", ["gpt_oss", "gpt_oss_in_another", "quantized", "quantized_text"])
def test_models_that_engines_cannot_load_are_refused(kind: str) -> None:
    from transformers import Gemma3Config, Gemma3TextConfig, GptOssConfig, Qwen3Config

    quantized = {"quant_method": "gptq", "bits": 4}
    config = {
        "gpt_oss": GptOssConfig(),
        "gpt_oss_in_another": SimpleNamespace(model_type="seeing", get_text_config=GptOssConfig),
        "quantized": Qwen3Config(quantization_config=quantized),
        "quantized_text": Gemma3Config(text_config=Gemma3TextConfig(quantization_config=quantized)),
    }[kind]
    says = "does not support reloading weights" if "gpt" in kind else r"the checkpoint is quantized \(gptq\)"
    with pytest.raises(ConfigError, match=says) as refused:
        check_served(config, "model.path")
    assert refused.value.location == "model.path"


def test_a_tokenizer_with_more_tokens_or_far_fewer_than_the_model_is_refused() -> None:
    from transformers import Qwen3Config

    spec = load_spec(QUICKSTART).spec
    vocabulary = {str(token): token for token in range(179)} | {"<added>": 200}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)
    config = Qwen3Config(**SMALL | {"vocab_size": 200})
    with pytest.raises(ConfigError, match=r"token '<added>' has the id 200, and the model embeds 200"):
        check_model(spec, config, tokenizer)
    vocabulary["<added>"] = 199
    check_model(spec, config, tokenizer)
    del vocabulary["0"]
    with pytest.raises(ConfigError, match="the model has 200 token ids, and its tokenizer has only 179 of them"):
        check_model(spec, config, tokenizer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"<eos>": 1}, ""),
        ({"<extra>": 3}, ""),  # the policy never samples it
        ({"b": 3, "c": 2}, r"another vocabulary: the policy's token 'b' \(id 2\) has the id 3 there"),
        ({"b": None}, r"the policy's token 'b' \(id 2\) does not exist there"),
    ],
)
def test_a_teacher_with_other_ids_is_refused_with_the_first_difference(
    tmp_path: Path, change: dict[str, int | None], says: str
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    own = {"a": 0, "<eos>": 1, "b": 2}
    theirs = {token: number for token, number in (own | change).items() if number is not None}
    backend = Tokenizer(models.WordLevel(theirs, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path)
    Qwen3Config(**SMALL | {"max_position_embeddings": 256}).save_pretrained(tmp_path)
    spec = load_spec(QUICKSTART, ["algorithm.preset=distill", f"algorithm.reference_path={tmp_path}"]).spec
    tokenizer = SimpleNamespace(get_vocab=lambda: own)
    with pytest.raises(ConfigError, match="has no weights"):
        check_teacher(spec, tokenizer)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"model.safetensors is a Git LFS pointer") as refused:
        check_teacher(spec, tokenizer)
    assert refused.value.location == "algorithm.reference_path" and "git lfs pull" in str(refused.value.hint)
    (tmp_path / "model.safetensors").write_text("")
    if says:
        with pytest.raises(ConfigError, match=says) as refused:
            check_teacher(spec, tokenizer)
        assert refused.value.location == "algorithm.reference_path" and refused.value.hint
        return
    assert check_teacher(spec, tokenizer) == str(tmp_path)
    longer = spec.model_copy(update={"model": spec.model.model_copy(update={"max_length": 257})})
    with pytest.raises(ConfigError, match="257 tokens are more than the reference model's 256 positions"):
        check_teacher(longer, tokenizer)


def test_a_teachers_own_size_is_counted(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    from asyncrl_cli.sizing.model import size_model
    from asyncrl_cli.sizing.trainer import rank_uses

    small, large = Qwen3Config(**SMALL), Qwen3Config(**SMALL | {"num_hidden_layers": 7})
    large.save_pretrained(tmp_path)
    spec = load_spec(QUICKSTART, ["algorithm.preset=distill", f"algorithm.reference_path={tmp_path}"]).spec
    found = size_model(spec, small)
    teacher = size_model(load_spec(QUICKSTART).spec, large).parameters
    counted = {part.name: part.bytes for part in rank_uses(spec, found).device}
    assert found.parameters < teacher == counted["reference model"] / 4


ON_GPUS = ["rollout.gpus_per_engine=1", "trainer.gpus_per_rank=1", "rollout.dtype=bfloat16", "trainer.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("architecture", "lora", "overrides", "refused"),
    [
        ("deepseek_v3", {"serve": "adapter"}, ON_GPUS, r"the adapter of model\.layers\.0\.self_attn\.kv_b_proj"),
        (
            "deepseek_v3",
            {"serve": "adapter", "target_modules": ["self_attn.kv_b_proj", "o_proj"]},
            ON_GPUS,
            "kv_b_proj",
        ),
        ("deepseek_v3", {"serve": "adapter", "target_modules": ["q_a_proj", "o_proj"]}, ON_GPUS, ""),
        ("deepseek_v3", {"serve": "merged"}, [], ""),
        ("qwen3_moe", {"serve": "adapter"}, [], "a mixture of experts on GPUs only"),
        ("qwen3_moe", {"serve": "adapter"}, ON_GPUS, ""),
        ("qwen3_moe", {"serve": "merged"}, [], ""),
        ("qwen3", {"serve": "adapter"}, [], ""),
    ],
)
def test_adapters_that_engines_would_not_apply_are_refused(
    architecture: str, lora: dict[str, Any], overrides: list[str], refused: str
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(architecture, **SMALL | ARCHITECTURES[architecture])
    spec = load_spec(QUICKSTART, [f"model.lora={lora}", *overrides]).spec
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext() as error:
        vocabulary = {str(token): token for token in range(SMALL["vocab_size"])}
        check_model(spec, config, SimpleNamespace(get_vocab=lambda: vocabulary))
    assert not refused or (error.value.location, error.value.hint[:16]) == ("model.lora.serve", "set it to merged")


def test_start_takes_sdpa_for_a_model_that_the_default_attention_cannot_compute(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("deepseek_v3", **SMALL | ARCHITECTURES["deepseek_v3"]).save_pretrained(tmp_path)
    spec = load_spec(QUICKSTART, ON_GPUS).spec
    assert (spec.trainer.attention, spec.trainer.packing) == ("varlen", True)
    checks = StartChecks(spec, tmp_path, print)
    checks._model_dir = str(tmp_path)
    checks._tokenizer = SimpleNamespace(get_vocab=lambda: {str(token): token for token in range(SMALL["vocab_size"])})
    result = checks._model()
    assert isinstance(result, Warned) and "attention by sdpa, because values of deepseek_v3" in result.text
    assert (checks._spec.trainer.attention, checks._spec.trainer.packing) == ("sdpa", False)


def test_vllm_has_slots_for_layers_that_are_named_with_their_parents() -> None:
    lora = LoraSpec(target_modules=["self_attn.q_proj", "0.mlp.up_proj", "k_proj"])
    assert adapted_names(lora, "not read") == ["k_proj", "q_proj", "up_proj"]


def test_start_on_gpus_gives_the_run_a_micro_batch_and_running_rollouts_in_numbers() -> None:
    spec = load_spec(QUICKSTART, ["trainer.tokens_per_microbatch=auto", "cluster.gpu_memory_gb=24"]).spec
    on_gpu = spec.trainer.model_copy(update={"gpus_per_rank": 1, "gradient_checkpointing": "auto"})
    names = {"task and data", "model files", "tokenizer", "model", "micro-batch", "engine cache", "memory with weights"}
    engines = spec.rollout.model_copy(update={"gpus_per_engine": 1, "max_running_rollouts": "auto"})
    gpu_spec = spec.model_copy(update={"trainer": on_gpu, "rollout": engines})
    with StartChecks(gpu_spec, QUICKSTART.parent, notice=print) as checks:
        findings = {finding.check: finding for finding in checks.findings(names)}
        experiment = checks._experiment
    assert experiment is not None and findings["micro-batch"].found == "65,536 tokens a micro-batch"
    assert "activations" in findings["memory with weights"].found
    assert findings["engine cache"].found == "up to 512 rollouts at a time in each engine"
    recorded = dump_spec(experiment.spec, {})
    assert "tokens_per_microbatch: 65536" in recorded and "gradient_checkpointing: false" in recorded
    assert "max_running_rollouts: 512" in recorded
