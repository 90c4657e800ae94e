"""`asyncrl serve` until a process would start: the served model, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import typer
from typer.testing import CliRunner

from asyncrl_cli.cli.app import app
from asyncrl_cli.cli.serve import _ready_text
from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.interrupts import Interrupted
from asyncrl_cli.orchestrator.serving import Address, Served, served_run, without_training
from asyncrl_cli.runs.checkpoints import Checkpoint, seal
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.system.logs import writable_folder
from tests.conftest import not_writable

SPEC = "model: {path: org/model}\ntask: {use: chain_sum}\npipeline: {publish_every: 2}\nstop: {steps: 10}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "runs", "mine")
    run.write_json("manifest.json", {"started": "2026-11-21T10:00:00"})
    run.write_text("spec.yaml", SPEC)
    return run


def served(run: RunDirectory, step: int | None = None) -> Served:
    return served_run(run, load_spec(run.path / "spec.yaml").spec, step)


def test_a_finished_run_serves_its_final_model_and_others_their_newest_checkpoint(
    run: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"has saved no model yet.*asyncrl serve .*spec.yaml"):
        served(run)
    (run.path / "model").mkdir()
    run.update(phase="finished", step=10)
    final = served(run)
    assert final.model(tmp_path) == run.path / "model"
    assert (final.name, final.version) == (run.run_id, 5)

    run.update(phase="interrupted", step=12)  # the final model is of step 10
    checkpoint = Checkpoint.from_folder(tmp_path / "step-000012")
    with patch("asyncrl_cli.orchestrator.serving.verified_checkpoint", return_value=checkpoint) as newest:
        assert (served(run).description, served(run).version) == (f"step 12 of {run.run_id}", 6)
        run.update(phase="finished")
        assert served(run, 12).description.startswith("step 12"), "an explicit step has priority over the final model"
        newest.assert_called_with(run, 12)


def test_a_run_in_a_read_only_folder_is_served_and_replayed_with_logs_elsewhere(archive: Path) -> None:
    run = RunDirectory.create(archive, "mine")
    run.write_text("spec.yaml", SPEC)
    (run.path / "model").mkdir()
    run.update(phase="finished", step=10)
    spec = load_spec(run.path / "spec.yaml").spec
    with not_writable(run.path / "logs"):
        folders = [served_run(run, spec, None).logs, writable_folder(run.path / "logs" / "replay")]
    for folder in folders:
        assert not folder.is_relative_to(archive) and not list(folder.iterdir())
        folder.rmdir()
    assert served(run).logs == run.path / "logs" / "serve"


def test_engines_of_a_saved_model_have_nothing_of_its_training(run: RunDirectory) -> None:
    on_gpus = [
        "rollout.gpus_per_engine=1",
        "trainer.gpus_per_rank=1",
        "rollout.dtype=bfloat16",
        "trainer.dtype=bfloat16",
    ]
    trained = ["model.lora={serve: adapter}", "algorithm.router_replay=true", *on_gpus]
    spec = load_spec(run.path / "spec.yaml", trained).spec
    engines = without_training(spec)
    assert (engines.model.lora, engines.algorithm.router_replay) == (None, False)
    assert engines.rollout == spec.rollout
    assert engines.trainer.gpus_per_rank == 0, "no GPU is asked for a trainer that does not run"


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_served_merged(run: RunDirectory, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl_cli.train.model.initial import build_initial_model
    from asyncrl_cli.train.model.lora import add_adapters

    init = (
        "{init: {architecture: llama, config: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, "
        "num_attention_heads: 2, num_key_value_heads: 1}}, lora: {rank: 4, alpha: 8.0}}"
    )
    run.write_text("spec.yaml", SPEC.replace("{path: org/model}", init))
    model = load_spec(run.path / "spec.yaml").spec.model
    assert model.init is not None
    assert model.lora is not None
    build_initial_model(model.init, 64, 3, run.model_stub)
    plain = AutoModelForCausalLM.from_pretrained(run.model_stub)
    ids = torch.arange(3, 20)[None]
    start = plain(ids).logits
    add_adapters(plain, model.lora, seed=0)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    trained = plain(ids).logits
    assert not torch.allclose(trained, start, atol=0.01)

    folder = run.path / "checkpoints/step-000012"
    (folder / "state").mkdir(parents=True)
    state = {"module": {f"model.{name}": tensor for name, tensor in plain.state_dict().items()}}
    torch.save(state, folder / "state/mp_rank_00_model_states.pt")
    trainer = {"ranks": 1, "zero_stage": 0, "dtype": "float32"}
    (folder / "run.json").write_text(json.dumps({"step": 12, "trainer": trainer}))
    seal(folder)

    merged = AutoModelForCausalLM.from_pretrained(served(run, 12).model(tmp_path / "merged"))
    torch.testing.assert_close(merged(ids).logits, trained, rtol=1e-4, atol=1e-4)


def test_serve_prints_the_address_and_ends_with_130(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    (run.path / "model").mkdir()
    run.update(phase="finished", step=10)
    address = Address("http://127.0.0.1:1/v1", "secret", run.run_id)

    def serve(served: Served, ready, check, status, warn) -> None:  # type: ignore[no-untyped-def]
        assert (served.spec.rollout.gateway.host, served.spec.rollout.gateway.port) == ("::1", 8000)
        ready(address)
        raise Interrupted

    with patch("asyncrl_cli.orchestrator.serving.serve", serve):
        arguments = ["serve", "mine", "--runs-dir", str(run.path.parent), "--host", "::1", "--port", "8000"]
        ended = CliRunner().invoke(app, [*arguments, "--json"])
        assert ended.exit_code == 130
        out, err = capfd.readouterr()
        assert err == "stopped\n"
        assert json.loads(out) == {"base_url": "http://127.0.0.1:1/v1", "api_key": "secret", "model": run.run_id}
        ended = CliRunner().invoke(app, arguments)
        assert ended.exit_code == 130
        out = capfd.readouterr().out
        assert "Authorization: Bearer secret" in out
        assert _ready_text(served(run), address) in out


def test_logs_of_a_served_spec_are_in_the_given_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    arguments = ["serve", str(tmp_path / "spec.yaml"), "--runs-dir", str(tmp_path / "elsewhere")]
    with (
        patch("asyncrl_cli.cli.serve.initial_model"),
        patch("asyncrl_cli.orchestrator.serving.served_folder", side_effect=RunError("not started")) as served_folder,
    ):
        CliRunner().invoke(app, arguments)
    assert served_folder.call_args.kwargs["logs"].parent == tmp_path / "elsewhere/serve"


def test_a_spec_has_no_steps(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    ended = CliRunner().invoke(app, ["serve", str(tmp_path / "spec.yaml"), "--step", "3"])
    assert ended.exit_code == typer.BadParameter.exit_code
    assert "name a run" in ended.output
