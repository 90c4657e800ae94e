"""The warm start learns from the right tokens, and its result is reproducible bit for bit."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from calculator import TOOL, Calculator
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.data.tokenizer import CHAT_TEMPLATE, character_tokenizer
from asyncrl_cli.gateway.chat import ChatFormat
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import ModelInit, WarmStart
from asyncrl_cli.tasks.function_task import FunctionTask
from asyncrl_cli.train.conversations import Rows
from asyncrl_cli.train.model.initial import build_initial_model
from asyncrl_cli.train.warm_start import (
    IGNORED,
    _accumulate_gradients,
    _Chat,
    _optimizers,
    _threads,
    _tokenized,
    collate,
    warm_start,
)
from tests.spell_backward import SpellBackward

pytestmark = pytest.mark.slow

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
TASK = SpellBackward(min_letters=3, max_letters=3)
PRINTS_JSON = CHAT_TEMPLATE.replace("arguments if arguments is string else ", "")
"""Like the templates of most models: it would put a text into quotes."""


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("initial")
    build_initial_model(ModelInit(architecture="qwen3", config=CONFIG), 32, 0, folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_loss_falls_and_the_result_repeats_to_the_bit(initial: Path, tmp_path: Path) -> None:
    spec = WarmStart(steps=40, batch_size=16, warmup_steps=5, threads=1)
    parallel = spec.model_copy(update={"threads": 3})
    threads = torch.get_num_threads()
    calls: list[tuple[int, int, float, int]] = []
    warm_start(initial, TASK, spec, 32, 7, tmp_path / "a", lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(update, 40) for update in range(1, 41)]
    assert calls[0][2] > 4
    assert calls[-1][2] < 3
    assert torch.get_num_threads() == threads

    torch.manual_seed(99)
    warm_start(initial, TASK, parallel, 32, 7, tmp_path / "b")
    warm_start(initial, TASK, spec, 32, 8, tmp_path / "c")
    first, same, other = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_rows_are_learned_in_an_order_that_repeats(initial: Path, tmp_path: Path) -> None:
    rows = Rows([Prompt(str(row), f"{row}>", {"answer": f"{row + 1}"}) for row in range(30)], str)
    long = Prompt("long", "1" * 40, {"answer": "2"})
    losses: dict[str, list[float]] = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        spec = WarmStart(steps=12, batch_size=8, warmup_steps=2, threads=1 + (name == "b"), response_column="answer")
        calls: list[tuple[int, int, float, int]] = []
        source = Rows([*rows.prompts, long], str)
        warm_start(initial, source, spec, 32, seed, tmp_path / name, lambda *call, calls=calls: calls.append(call))
        losses[name] = [call[2] for call in calls]
        assert [call[3] for call in calls] == [1] * 12
    assert losses["a"] == losses["b"] != losses["c"]
    assert losses["a"][-1] < 0.7 * losses["a"][0]


def test_the_result_is_a_complete_model_directory(initial: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    warm_start(initial, TASK, WarmStart(steps=1, batch_size=2, threads=1), 32, 0, tmp_path)
    assert (tmp_path / "config.json").read_text() == (initial / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(tmp_path).encode("sun>") == AutoTokenizer.from_pretrained(initial).encode(
        "sun>"
    )


def test_the_first_part_of_the_updates_sees_clean_demonstrations_only(initial: Path, tmp_path: Path) -> None:
    asked: list[bool] = []

    class Watched(SpellBackward):
        def demonstration(self, rng: random.Random, clean: bool) -> tuple[str, str]:
            asked.append(clean)
            return super().demonstration(rng, clean)

    spec = WarmStart(steps=4, batch_size=3, clean_fraction=0.75, threads=1)
    warm_start(initial, Watched(), spec, 32, 0, tmp_path)
    assert asked == [True] * 9 + [False] * 3


EXAMPLE = st.lists(st.integers(3, 98), min_size=2, max_size=12).flatmap(
    lambda ids: st.tuples(
        st.just(ids),
        st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1).map(lambda rest: [False, *rest]),
    )
)


@given(st.lists(EXAMPLE, min_size=1, max_size=6))
@settings(deadline=None)
def test_labels_are_the_learned_tokens_and_nothing_else(examples: list[tuple[list[int], list[bool]]]) -> None:
    inputs, labels = collate(examples, pad_id=0)
    assert inputs.shape == labels.shape == (len(examples), max(len(ids) for ids, _ in examples) - 1)
    for (ids, learned), seen, row in zip(examples, inputs.tolist(), labels.tolist(), strict=True):
        assert seen == ids[:-1] + [0] * (len(seen) - len(ids) + 1)
        expected = [token if counts else IGNORED for token, counts in zip(ids, learned, strict=True)][1:]
        assert row == expected + [IGNORED] * (len(row) - len(expected))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PRINTS_JSON], ids=["its own", "prints JSON"])
def test_a_conversation_is_learned_as_the_gateway_shows_it(template: str) -> None:
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = template
    task, chat = Calculator(), ChatFormat(tokenizer)
    for seed in range(8):
        messages = task.demonstration(random.Random(seed), clean=True)
        ((ids, learned, _),) = _tokenized(
            [messages], _Chat(tokenizer, False, ChatTemplate(tokenizer)), 256, chat.end_tokens
        )
        prompt = learned.index(True)
        assert all(learned[prompt:])
        assert ids[:prompt] == chat.render(messages[:-1]).ids
        reply = chat.parse(ids[:prompt], ids[prompt:], [TOOL])
        calls = [[call["function"] for call in message.get("tool_calls", ())] for message in (reply, messages[-1])]
        assert calls[0] == calls[1] and (reply["content"] or None) == messages[-1]["content"]


def test_a_demonstration_ends_where_the_model_ends_a_turn() -> None:
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}#\n{% endif %}{% endfor %}"
    )
    ends = frozenset({tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("#")})
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    ((ids, learned, _),) = _tokenized([conversation], _Chat(tokenizer, True, ChatTemplate(tokenizer)), 256, ends)
    assert tokenizer.decode(ids[learned.index(True) :]) == "yes#"
    ((ids, learned, _),) = _tokenized([("hi", "yes")], _Chat(tokenizer, False, ChatTemplate(tokenizer)), 256, ends)
    assert tokenizer.decode(ids[learned.index(True) :]) == "yes<eos>"
    assert _tokenized([("hi", "yes")], _Chat(tokenizer, True, ChatTemplate(tokenizer)), 256, ends) == _tokenized(
        [conversation], _Chat(tokenizer, True, ChatTemplate(tokenizer)), 256, ends
    ), "a text is a user's message, as in the prompts of the run"


def test_gradients_do_not_depend_on_the_grouping_by_length(initial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(initial)
    rng = random.Random(0)
    examples = [
        ([rng.randrange(3, 99) for _ in range(length)], [index >= length // 2 for index in range(length)])
        for length in range(4, 16)
    ]
    results = []
    for size in (12, 5, 1):
        monkeypatch.setattr("asyncrl_cli.train.warm_start.MICROBATCH", size)
        model.zero_grad()
        with ThreadPoolExecutor(2) as pool:
            loss = _accumulate_gradients(model, examples, 0, pool)
        results.append((loss, [parameter.grad.clone() for parameter in model.parameters()]))
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        for gradient, expected in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rope", "threads"), [({}, 2), ({"rope_type": "dynamic", "factor": 2.0}, 1)])
def test_a_model_with_state_between_passes_has_one_thread(rope: dict[str, Any], threads: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {name: value for name, value in CONFIG.items() if name != "initializer_range"}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=8, rope_parameters={"rope_theta": 1e4, "rope_type": "default"} | rope)
    )
    assert _threads(model, WarmStart(steps=1, threads=2)) == threads


@pytest.mark.parametrize("tied", [True, False])
def test_muon_has_the_blocks_matrices_and_adamw_all_the_rest(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    build_initial_model(
        ModelInit(architecture="qwen3", config={**CONFIG, "tie_word_embeddings": tied}), 32, 0, tmp_path
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = (
        [names.pop(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
        for optimizer in _optimizers(model, WarmStart(steps=1), ThreadPoolExecutor(1))
    )
    assert not names, "every parameter is in exactly one of them"
    assert len(muon) == 7
    assert all("proj" in name for name in muon)
    assert "model.embed_tokens.weight" in adamw
    assert ("lm_head.weight" in adamw) != tied


def test_tasks_and_demonstrations_that_cannot_be_used(initial: Path, tmp_path: Path) -> None:
    spec = WarmStart(steps=2, batch_size=2, threads=1)
    with pytest.raises(UserError, match="the task has no demonstrations"):
        warm_start(initial, FunctionTask(lambda prompt, response: 0.0, "m:f"), spec, 32, 0, tmp_path)
    with pytest.raises(UserError, match=r"more than model\.max_length 7"):
        warm_start(initial, TASK, spec, 7, 0, tmp_path)
    assert not list(tmp_path.iterdir())
