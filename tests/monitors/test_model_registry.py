"""The final model in MLflow's registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.monitors.mlflow.sender import PROGRESS, Sender
from asyncrl_cli.runs.directory import RunDirectory

from .mlflow_runs import Logged, do_steps, local, started_run, tracking_at

NAME = "speller"
PLACE = "models/step-000003"
pytestmark = pytest.mark.stack


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = started_run(tmp_path)
    do_steps(run, 1, 3)
    run.update(phase="running", step=3)
    save_model(run, b"weights of step 3")
    return run


def save_model(run: RunDirectory, weights: bytes) -> None:
    """A folder in Hugging Face's layout, with weights that are not loaded."""
    (run.path / "model").mkdir(exist_ok=True)
    run.write_text("model/config.json", '{"architectures": ["Qwen3ForCausalLM"]}')
    run.write_text("model/tokenizer.json", "{}")
    (run.path / "model/model.safetensors").write_bytes(weights)


def versions(uri: str) -> dict[str, dict[str, str]]:
    """The tags of every version of the model."""
    found = Logged(uri).client.search_model_versions(f"name = '{NAME}'")
    return {str(one.version): one.tags for one in found}


def test_repeated_attempts_register_one_version(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path, NAME)
    first = Sender(run, target)
    first.send("FINISHED")
    assert first.model_version == "1"
    Sender(run, target).send("FINISHED")
    (run.path / PROGRESS).unlink()  # as if killed before anything was noted
    again = Sender(run, target)
    again.send("FINISHED")
    assert again.model_version == "1"
    assert versions(target.uri) == {"1": {"asyncrl_run": "spelling-1", "asyncrl_step": "3"}}
    logged = Logged(target.uri)
    assert {name for name in logged.files() if name.startswith("models/")} == {
        f"{PLACE}/MLmodel",
        f"{PLACE}/model/config.json",
        f"{PLACE}/model/model.safetensors",
        f"{PLACE}/model/tokenizer.json",
        f"{PLACE}/components/tokenizer/config.json",
        f"{PLACE}/components/tokenizer/tokenizer.json",
    }
    version = logged.client.get_model_version(NAME, "1")
    assert version.run_id == logged.run.info.run_id
    assert version.source == f"{logged.run.info.artifact_uri}/{PLACE}"


def test_only_a_finished_run_is_registered_and_only_on_request(run: RunDirectory, tmp_path: Path) -> None:
    for status in ("RUNNING", "FAILED", "KILLED"):
        Sender(run, local(tmp_path, NAME)).send(status)
    silent = Sender(run, local(tmp_path))
    silent.send("FINISHED")
    assert silent.model_version == ""
    assert Logged(local(tmp_path).uri).client.search_registered_models() == []
    assert not any(name.startswith("models/") for name in Logged(local(tmp_path).uri).files())


def test_a_continued_run_adds_a_version_and_keeps_the_first(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path, NAME)
    Sender(run, target).send("FINISHED")
    do_steps(run, 4, 6)
    run.update(phase="running", step=6)
    save_model(run, b"weights of step 6")
    later = Sender(run, target)
    later.send("FINISHED")
    assert later.model_version == "2"
    assert {version: tags["asyncrl_step"] for version, tags in versions(target.uri).items()} == {"1": "3", "2": "6"}
    logged = Logged(target.uri)
    assert logged.content(f"{PLACE}/model/model.safetensors") == b"weights of step 3"
    assert logged.content("models/step-000006/model/model.safetensors") == b"weights of step 6"


def test_two_runs_are_versions_of_one_model(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path, NAME)
    Sender(run, target).send("FINISHED")
    other = started_run(tmp_path / "other")
    other = RunDirectory(other.path.rename(other.path.with_name("spelling-2")))
    other.update(step=3)
    save_model(other, b"other weights")
    Sender(other, target).send("FINISHED")
    from mlflow.tracking import MlflowClient

    found = MlflowClient(target.uri).search_model_versions(f"name = '{NAME}'")
    assert {str(one.version): one.tags["asyncrl_run"] for one in found} == {"1": "spelling-1", "2": "spelling-2"}


def test_a_version_is_made_only_after_all_files_have_arrived(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    def cut_off(client: Any, run_id: str, folder: str, artifact_path: str | None = None) -> None:
        raise ConnectionError("cut off")

    target = local(tmp_path, NAME)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifacts", cut_off)
        with pytest.raises(ConnectionError):
            Sender(run, target).send("FINISHED")
    assert Logged(target.uri).client.search_registered_models() == []
    Sender(run, target).send("FINISHED")
    assert list(versions(target.uri)) == ["1"]


def test_transformers_loads_the_version_as_it_was_saved(run: RunDirectory, tmp_path: Path) -> None:
    import mlflow
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from asyncrl_cli.data.tokenizer import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer(64)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **heads))
    model.save_pretrained(run.path / "model")
    tokenizer.save_pretrained(run.path / "model")
    (run.path / "model/model.safetensors").touch()
    target = local(tmp_path, NAME)
    Sender(run, target).send("FINISHED")

    with tracking_at(target.uri):
        pipeline = mlflow.transformers.load_model(f"models:/{NAME}/1")
    answers = pipeline("abc", max_new_tokens=4)
    loaded = pipeline.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert pipeline.tokenizer.encode("abc") == tokenizer.encode("abc")
    assert len(answers) == 1
    assert answers[0]["generated_text"].startswith("abc")
