"""``model.chat_template`` is the template of every tokenizer that a run creates."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.data.tokenizer import load_tokenizer
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.model.initial import model_key, model_stub, prepare_model
from tests.train.test_train_episodes import experiment

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
INIT = {"architecture": "qwen3", "config": {**SIZES, "num_key_value_heads": 1, "head_dim": 8}}


def spec(runs: Path, **model: Any) -> ExperimentSpec:
    return experiment(model=model, runs_dir=runs)


def chat_of(folder: Path) -> str:
    """How a tokenizer in a folder writes a message."""
    text = load_tokenizer(folder, None).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    return str(text)


def test_model_stub_and_model_have_it_whatever_the_model_is_made_from(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    plain = prepare_model(spec(tmp_path, init=INIT))
    assert chat_of(plain) == "hi"
    made = spec(tmp_path, init=INIT, chat_template=str(template))
    folder = prepare_model(made)
    assert folder != plain, "a model in runs/models keeps its own template"
    assert chat_of(folder) == chat_of(model_stub(made, tmp_path / "made")) == "<hi>"

    saved = spec(tmp_path, path=str(plain), chat_template=str(template))
    copied = model_stub(saved, tmp_path / "copied")
    assert copied == tmp_path / "copied"
    assert chat_of(copied) == "<hi>"
    configs = [json.loads((one / "config.json").read_text()) for one in (plain, copied)]
    assert configs[0] == configs[1]
    assert load_tokenizer(plain, str(template)).get_vocab() == load_tokenizer(plain, None).get_vocab()

    key = model_key(made)
    template.write_text("{% for m in messages %}({{ m.content }}){% endfor %}")
    assert model_key(made) != key


def test_an_invalid_template_is_named_with_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(ConfigError, match=r"broken\.jinja is not a chat template: line 2") as raised:
        model_stub(spec(tmp_path, init=INIT, chat_template=str(broken)), tmp_path / "made")
    again = pickle.loads(pickle.dumps(raised.value))  # as when an actor's error reaches the driver
    assert (type(again), str(again)) == (ConfigError, str(raised.value))
    # A template that does not accept a single message is still a valid template.
    broken.write_text("{{ raise_exception('a system message comes first') }}")
    model_stub(spec(tmp_path, init=INIT, chat_template=str(broken)), tmp_path / "made")
