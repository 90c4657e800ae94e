"""The final model as a version in MLflow's model registry.

    models/step-000120/         an artifact of the run that mlflow.transformers can load
      MLmodel                   MLflow's description
      model/                    the run's model/
      components/tokenizer/     its files without weights

Invariant: a run has one version for each step at which it ended, even after several attempts. The version is created
after all files have arrived. Its tags have the run's id and step, which find it again.

``mlflow.transformers.save_model`` would copy the weights, and ask the Hugging Face hub for a licence.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version as installed_version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.directory import MODEL, RunDirectory

RUN_TAG, STEP_TAG = "asyncrl_run", "asyncrl_step"
TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
UPLOAD_S = 600
"""Seconds that a server may take to store one of the model's files."""


def register(client: Any, mlflow_run_id: str, run: RunDirectory, name: str) -> str:
    """Make the run's model a version of the registered model ``name``, unless it is one already. Returns the version.

    Raises MLflow's errors, and ``RunError`` if the run's folder has no model.
    """
    from mlflow.exceptions import MlflowException

    step = run.state.step
    for version in client.search_model_versions(f"name = '{name}' and tags.{RUN_TAG} = '{run.run_id}'"):
        if version.tags.get(STEP_TAG) == str(step):
            return str(version.version)
    config = run.path / MODEL / "config.json"
    if not config.is_file():
        raise RunError(
            "there is no final model to register; everything else is in MLflow",
            location=str(config),
            hint=f"restore it: asyncrl checkpoint export {run.argument} --to {run.path / MODEL}",
        )
    # A server needs more time for a large file than for the requests before.
    os.environ[TIMEOUT] = str(max(int(os.environ[TIMEOUT]), UPLOAD_S))
    artifact = f"models/step-{step:06d}"
    with TemporaryDirectory() as folder:
        model_folder, tokenizer_folder = Path(folder, "model"), Path(folder, "components/tokenizer")
        for copy in (model_folder, tokenizer_folder):
            copy.mkdir(parents=True)
            for file in config.parent.iterdir():
                if copy is model_folder or ".safetensors" not in file.name:
                    (copy / file.name).symlink_to(file.absolute())  # a link, because weights are large
        _describe(json.loads(config.read_text()), Path(folder, "MLmodel"))
        client.log_artifacts(mlflow_run_id, folder, artifact_path=artifact)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{client.get_run(mlflow_run_id).info.artifact_uri}/{artifact}"
    tags = {RUN_TAG: run.run_id, STEP_TAG: str(step)}
    created = client.create_model_version(name, source, run_id=mlflow_run_id, tags=tags, await_creation_for=0)
    return str(created.version)


def _describe(config: dict[str, Any], file: Path) -> None:
    """Write MLflow's description of a model, as its transformers flavor would."""
    from mlflow.models import Model

    description = Model()
    description.add_flavor(
        "transformers",
        transformers_version=installed_version("transformers"),
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=config["architectures"][0],
        source_model_name=config.get("_name_or_path", ""),
        model_binary="model",
        tokenizer_type="AutoTokenizer",
        components=["tokenizer"],
    )
    description.save(str(file))
