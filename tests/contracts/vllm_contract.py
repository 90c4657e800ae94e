"""Requirements on vLLM other than calls: arguments, values, environment variables, base classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from asyncrl_cli.rollout.engine_settings import CPU_ENVIRONMENT, ENVIRONMENT
from asyncrl_cli.spec.inputs import SLOT_RANKS
from tests.contracts.source import Package
from tests.contracts.uses import ASYNCRL

LITERALS = {
    "mode": ("rollout/engine.py", "vllm.v1.engine.PauseMode"),
    "quantization": ("spec/rules/quantization.py", "vllm.model_executor.layers.quantization.QuantizationMethods"),
    "kv_cache_dtype": ("spec/rules/quantization.py", "vllm.config.cache.CacheDType"),
    "logprobs_mode": ("rollout/engine_settings.py", "vllm.config.model.LogprobsMode"),
}
"""For each argument: where asyncrl writes it, and the type that lists its values."""
TRANSFER = "vllm.distributed.weight_transfer.base.WeightTransferEngine"

SAMPLER = {
    "vllm.v1.worker.gpu_worker.Worker.determine_available_memory": (
        "self.available_kv_cache_memory_bytes",
        "self.cache_config.kv_cache_memory_bytes",
    ),
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler": ("self.forward", "torch.ops._C.fused_gumbel_argmax"),
    "vllm.v1.sample.sampler.Sampler": ("self.topk_topp_sampler", "self.logprobs_mode", "self.use_fp64_gumbel"),
    "vllm.v1.sample.sampler.Sampler.sample": (
        "self.topk_topp_sampler",
        "sampling_metadata.generators",
        "sampling_metadata.top_k",
        "sampling_metadata.top_p",
    ),
    "vllm.v1.worker.gpu_input_batch.InputBatch.refresh_metadata": ("self.sampling_metadata",),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states": ("sampling_params.seed",),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._prepare_inputs": ("self.seq_lens[:num_reqs]",),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample": ("self.input_batch.sampling_metadata",),
    "vllm.v1.worker.gpu.sample.states.SamplingStates.add_request": ("sampling_params.seed", "self.seeds.np"),
    "vllm.v1.worker.gpu.sample.sampler.Sampler": (
        "gumbel_sample",
        "self.sampling_states.seeds.gpu",
        "input_batch.positions[input_batch.logits_indices]",
    ),
}
"""asyncrl relies on the meaning of these in V2 of the model runner."""
OUTPUTS = {
    "vllm.v1.engine.core.EngineCoreProc.process_output_sockets": ("self.output_queue.get()",),
    "vllm.v1.engine.core.EngineCoreProc._handle_client_request": ("self.output_queue.put_nowait",),
    "vllm.v1.engine.core.EngineCore._attach_weight_version": ("self._weight_version",),
    "vllm.v1.outputs.LogprobsLists.slice_request": (
        "LogprobsLists(self.logprob_token_ids[req_idx:end_idx], self.logprobs[req_idx:end_idx], "
        "self.sampled_token_ranks[req_idx:end_idx], None)",
    ),
}
CORE = {"vllm.v1.engine.utils.CoreEngineProcManager.__init__": ("get_mp_context()", "context.Process")}
EXPRESSIONS = {"rollout/vllm_sampler.py": SAMPLER, "rollout/vllm_core.py": OUTPUTS | CORE}
"""For each of our files and function of vLLM: expressions in that function which our file relies on."""


def problems(package: Package) -> Iterator[str]:
    """Everything that does not fit this release."""
    yield from _engine_arguments(package)
    yield from _values(package)
    yield from _environment(package)
    yield from _slots(package)
    yield from _transfer_engine(package)
    yield from _expressions(package)
    seeing = package.find("vllm.model_executor.models.interfaces.SupportsMultiModal")
    if seeing is None or package.member(seeing, "get_language_model") is None:
        yield "weights/engine_layers.py: vLLM's models with vision have no get_language_model()"
    for kind, name in (
        ("tool", "vllm.tool_parsers._TOOL_PARSERS_TO_REGISTER"),
        ("reasoning", "vllm.reasoning._REASONING_PARSERS_TO_REGISTER"),
    ):
        table = package.find(name)
        if table is None or not isinstance(table.node, ast.Assign) or not isinstance(table.node.value, ast.Dict):
            yield f"rollout/engine_settings.py: {kind}_parsers() finds no table of parsers in vLLM's source"


def written_arguments() -> set[str]:
    """The names that ``engine_args`` and the functions that it calls pass to vLLM."""
    functions = _functions("rollout/engine_settings.py")
    whole = functions["engine_args"]
    called = {ast.unparse(node.func) for node in ast.walk(whole) if isinstance(node, ast.Call)}
    found: set[str] = set()
    for function in (whole, *(functions[name] for name in called & set(functions))):
        for node in ast.walk(function):
            if isinstance(node, ast.Dict):
                found |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "args":
                assert isinstance(node.slice, ast.Constant)
                found.add(str(node.slice.value))
    return found


def _engine_arguments(package: Package) -> Iterator[str]:
    known = package.find("vllm.engine.arg_utils.AsyncEngineArgs")
    fields = {one.name for one in package.fields(known)} if known else set()
    for name in sorted(written_arguments() - fields):
        yield f"rollout/engine_settings.py: vLLM's AsyncEngineArgs has no {name!r}"


def _values(package: Package) -> Iterator[str]:
    for argument, (file, kind) in LITERALS.items():
        listed = package.find(kind)
        known = _constants(listed.node) if listed is not None and listed.node is not None else set()
        for value in sorted(_written_values(file, argument) - known):
            yield f"{file}: {kind} has no {value!r}, but {sorted(known)}"


def _slots(package: Package) -> Iterator[str]:
    listed = package.find("vllm.config.lora.MaxLoRARanks")
    nodes = ast.walk(listed.node) if listed is not None and listed.node is not None else ()
    ranks = {node.value for node in nodes if isinstance(node, ast.Constant)}
    if not ranks >= set(SLOT_RANKS):
        yield f"spec/inputs.py: vLLM has slots for adapters of the ranks {ranks}"


def _written_values(file: str, argument: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse((ASYNCRL / file).read_text())):
        if isinstance(node, ast.keyword) and node.arg == argument:
            found |= _constants(node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == argument:
                    found |= _constants(value)
    assert found, f"{file} writes no {argument}"
    return found


def _environment(package: Package) -> Iterator[str]:
    known = package.find("vllm.envs.environment_variables")
    names = _constants(known.node) if known is not None and known.node is not None else set()
    for name in sorted({*ENVIRONMENT, *CPU_ENVIRONMENT}):
        if name.startswith("VLLM_") and name not in names:
            yield f"rollout/engine_settings.py: vLLM reads no variable {name}"


def _transfer_engine(package: Package) -> Iterator[str]:
    """Our weight transfer engine has the methods that vLLM requires, and accepts the arguments that vLLM passes."""
    base = package.find(TRANSFER)
    if base is None or not isinstance(base.node, ast.ClassDef):
        yield f"weights/vllm_worker.py: there is no {TRANSFER}"
        return
    tree = ast.parse((ASYNCRL / "weights/vllm_worker.py").read_text())
    ours = next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "ReplicaTransferEngine")
    own = {one.name: one for one in ours.body if isinstance(one, ast.FunctionDef)}
    for method in (one for one in base.node.body if isinstance(one, ast.FunctionDef)):
        abstract = any(ast.unparse(one).endswith("abstractmethod") for one in method.decorator_list)
        if method.name in own:
            theirs = [one.arg for one in method.args.args]
            if [one.arg for one in own[method.name].args.args] != theirs:
                yield f"weights/vllm_worker.py: vLLM's {method.name} has the parameters {theirs}"
        elif abstract:
            yield f"weights/vllm_worker.py: ReplicaTransferEngine has no {method.name}, which vLLM asks for"
    for line in ours.body:
        if isinstance(line, ast.Assign) and package.member(base, ast.unparse(line.targets[0])) is None:
            yield f"weights/vllm_worker.py: vLLM's WeightTransferEngine has no {ast.unparse(line.targets[0])}"


def _expressions(package: Package) -> Iterator[str]:
    """vLLM's code has not changed where asyncrl replaces a part of it (decisions 0064 and 0010)."""
    for file, name, expressions in ((file, *item) for file, of in EXPRESSIONS.items() for item in of.items()):
        found = package.find(name)
        owner, _, member = name.rpartition(".")
        if found is None and (kind := package.find(owner)) is not None:
            found = package.member(kind, member)
        written = {ast.unparse(node) for node in ast.walk(found.node)} if found and found.node else set()
        for expression in expressions:
            if expression not in written:
                yield f"{file}: {name} has no {expression}"


def _functions(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ASYNCRL / file).read_text())
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}


def _constants(node: ast.AST) -> set[str]:
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
