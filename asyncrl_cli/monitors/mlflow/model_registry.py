"""The final model as a version in MLflow's model registry.

    models/step-000120/         an artifact of the run that mlflow.transformers and mlflow.pyfunc can load
      MLmodel                   MLflow's description
      requirements.txt, python_env.yaml
      model/                    the run's model/
      components/tokenizer/     its files without weights

Invariant: a run has one version for each step at which it ended, even after several attempts. Each file is noted once
it has arrived, so the upload of a large model resumes where it was interrupted. The version is created after all files.
Its tags have the run's id and step, which find it again even if the answer to its creation was lost.

``mlflow.transformers.save_model`` would copy the weights, and ask the Hugging Face hub for a licence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from platform import python_version
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.monitors.mlflow.outbox import Outbox
from asyncrl_cli.runs.directory import MODEL, RunDirectory

RUN_TAG = "asyncrl_run"
STEP_TAG = "asyncrl_step"
WEIGHTS = (".safetensors", ".safetensors.index.json")
"""Suffixes of files with weights, and of their index."""
PACKAGES = ("mlflow", "transformers", "torch", "accelerate")
"""Packages needed to load the model."""
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
UPLOAD_S = 600
"""Seconds that a server may take to store one of the model's files."""


def register(client: Any, outbox: Outbox, run: RunDirectory, name: str) -> None:
    """Make the run's model a version of the registered model ``name``, unless it is one already.

    Raises MLflow's errors, and ``RunError`` if the run's folder has no model.
    """
    path = f"models/step-{run.state.step:06d}"
    key = f"{name}, {path}"
    if key in outbox.sent.registered:
        return
    config = run.path / MODEL / "config.json"
    if not config.is_file():
        raise RunError(
            "there is no final model to register; everything else is in MLflow",
            location=str(config),
            hint=f"restore it: asyncrl checkpoint export {run.argument} --to {run.path / MODEL}",
        )
    files = [file for file in (run.path / MODEL).iterdir() if file.is_file()]
    folders = {
        f"{path}/model": files,
        f"{path}/components/tokenizer": [f for f in files if not f.name.endswith(WEIGHTS)],
    }
    with _patience(), TemporaryDirectory() as description:
        for folder, wanted in folders.items():
            for file in outbox.files(folder, wanted):
                client.log_artifact(outbox.sent.run_id, str(file), artifact_path=folder)
        size = sum(file.stat().st_size for wanted in folders.values() for file in wanted)
        _describe(json.loads(config.read_text()), size, Path(description))
        client.log_artifacts(outbox.sent.run_id, description, artifact_path=path)
    version = _find(client, run, name) or _create(
        client, mlflow_run_id=outbox.sent.run_id, run=run, name=name, artifact=path
    )
    outbox.note(registered={**outbox.sent.registered, key: version})


def _describe(config: dict[str, Any], size: int, folder: Path) -> None:
    """Write MLflow's description of a model with ``size`` bytes, as its transformers flavor would."""
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, Schema

    texts = Schema([ColSpec("string")])
    described = Model(signature=ModelSignature(inputs=texts, outputs=texts))
    described.add_flavor(
        "transformers",
        transformers_version=installed("transformers"),
        code=None,
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=config["architectures"][0],
        source_model_name=config.get("_name_or_path", ""),
        model_binary="model",
        torch_dtype=None,
        tokenizer_type="AutoTokenizer",
        components=["tokenizer"],
    )
    pyfunc.add_to_model(described, loader_module="mlflow.transformers", python_env="python_env.yaml")
    described.model_size_bytes = size
    described.save(str(folder / "MLmodel"))
    # The part after `+` names a local build, which package indexes do not have.
    packages = [f"{package}=={installed(package).partition('+')[0]}\n" for package in PACKAGES]
    (folder / "requirements.txt").write_text("".join(packages))
    environment = {"python": python_version(), "dependencies": ["-r requirements.txt"]}
    (folder / "python_env.yaml").write_text(yaml.safe_dump(environment))


def _find(client: Any, run: RunDirectory, name: str) -> str:
    """The version that an earlier attempt has created; empty if there is none."""
    versions = client.search_model_versions(f"name = '{name}' and tags.{RUN_TAG} = '{run.run_id}'")
    return next((str(one.version) for one in versions if one.tags.get(STEP_TAG) == str(run.state.step)), "")


def _create(client: Any, mlflow_run_id: str, run: RunDirectory, name: str, artifact: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{client.get_run(mlflow_run_id).info.artifact_uri}/{artifact}"
    created = client.create_model_version(
        name,
        source=source,
        run_id=mlflow_run_id,
        tags={RUN_TAG: run.run_id, STEP_TAG: str(run.state.step)},
        await_creation_for=0,
    )
    return str(created.version)


@contextmanager
def _patience() -> Iterator[None]:
    """Wait longer for answers: a server needs more time for a large file than for other requests."""
    before = os.environ[TIMEOUT]
    os.environ[TIMEOUT] = str(max(int(before), UPLOAD_S))
    try:
        yield
    finally:
        os.environ[TIMEOUT] = before
