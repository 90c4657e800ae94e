"""The Ray actor of one trainer rank: a thin shell around the DeepSpeed engine.

Every rank gets the same calls with the same batch, plans the same micro-batches and takes its share. So ranks exchange
no messages except in collective calls. Calls that move weights are collective: all ranks get them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.files import require_folder
from asyncrl_cli.core.imports import large_imports, set_environment
from asyncrl_cli.records.training import Probe, RankLocation, StepReport, SupervisedBatch, TrainingBatch
from asyncrl_cli.runs.checkpoints import Checkpoint, Digest
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import engine_memory_share, engines_sleep, memory_share, shares_gpus
from asyncrl_cli.system.logs import bound_log, redirect_output
from asyncrl_cli.system.network import family_of
from asyncrl_cli.weights.layout import TensorSlot

LOOPBACK = "127.0.0.1"
"""Address at which ranks on one host meet."""


def limit_gpu_memory(spec: ExperimentSpec) -> None:
    """Limit torch to the rank's share of the GPU if an engine uses the rest.

    Otherwise the first long batch could take memory that an engine needs for a restart. If engines sleep during a step,
    the rank may use their memory until the step ends (``free_gpu_cache``).
    """
    import torch

    if shares_gpus(spec) and not engines_sleep(spec):
        torch.cuda.set_per_process_memory_fraction(memory_share(spec.trainer.gpus_per_rank))


def free_gpu_cache(spec: ExperimentSpec) -> None:
    """After a step, free the memory that torch has cached if an engine that wakes up needs it.

    Otherwise the next step would ask the driver for the same memory again, and wait for the GPU.
    """
    import torch

    if not engines_sleep(spec):
        return
    free_bytes, gpu_bytes = torch.cuda.mem_get_info()
    if free_bytes < engine_memory_share(spec) * gpu_bytes:
        torch.cuda.empty_cache()


class FullGpu(RunError):
    """A rank ran out of GPU memory. Its process lives, but other ranks may wait for it in a collective call."""


@contextmanager
def explaining_a_full_gpu(spec: ExperimentSpec, rank: int) -> Iterator[None]:
    """When the block runs out of GPU memory, raise ``FullGpu`` with the block's peak, and the keys that lower it."""
    import torch

    if trainer_has_gpu := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    except torch.OutOfMemoryError as error:
        peak = f"; torch's peak: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if trainer_has_gpu else ""
        raise FullGpu(
            f"the GPU's memory is full: {str(error).splitlines()[0]}{peak}",
            location=f"trainer-{rank}",
            hint=f"lower trainer.tokens_per_microbatch ({spec.trainer.microbatch_tokens}), or set "
            "trainer.gradient_checkpointing to true or trainer.offload to optimizer; `asyncrl validate-spec SPEC "
            "--memory` estimates the need",
        ) from error


class TrainerWorker:
    """One rank. Methods run one at a time, except ``ping`` and ``write_checkpoint``."""

    def __init__(self, spec: ExperimentSpec, log_dir: str, environment: Mapping[str, str] | None = None) -> None:
        set_environment(environment or {})
        self._spec = spec
        self._log_dir = log_dir
        self._listener: socket.socket | None = None
        self._base_logprobs: dict[tuple[int, ...], Any] = {}  # of the newest probe, without adapters

    def visit(self, search_path: str) -> RankLocation:
        """Return where Ray has put this process, before any heavy import.

        Raises ``ConfigError`` when this host lacks the folder of the model or of the user's functions.
        """
        import ray

        model, algorithm = self._spec.model.path, self._spec.algorithm
        for path, location in ((model, "model.path"), (algorithm.reference_path, "algorithm.reference_path")):
            if path is not None and os.path.isabs(path):
                require_folder(path, location)
        for key in ("advantage", "loss"):
            if ":" in getattr(algorithm, key):
                require_folder(search_path, f"algorithm.{key}")
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return RankLocation(str(ray.get_runtime_context().get_node_id()), ray.util.get_node_ip_address(), gpus)

    def preload(self, rank: int, one_host: bool) -> tuple[str, int]:
        """Become this rank, and import the libraries of ``start``. ``one_host``: all ranks are on this host.

        Returns the address and port at which other ranks reach this one. The port is held until ``start``.
        """
        redirect_output(self._log_dir, f"trainer-{rank}")
        self._rank = rank
        import ray

        with large_imports():
            import deepspeed  # noqa: F401
            import transformers.models.auto.modeling_auto  # noqa: F401

        address = LOOPBACK if one_host else ray.util.get_node_ip_address()
        self._listener = socket.create_server((address, 0), family=family_of(address))
        return address, self._listener.getsockname()[1]

    def prepare_model(self) -> str:
        """Make the initial model if the spec asks for it, on rank 0; returns its folder."""
        from asyncrl_cli.train.model.initial import prepare_model

        return str(prepare_model(self._spec))

    def ping(self) -> int:
        """Return how many micro-batches this rank has finished since ``start``; the answer shows that it lives."""
        return self._learner.finished_microbatches

    def start(self, model_dir: str, address: str, port: int, checkpoint: str | None, search_path: str) -> None:
        """Join the other ranks and load the model, then a checkpoint's state over it.

        Modules of the user's functions are searched in ``search_path`` first. Raises ``RunError`` when a trainer of
        this spec cannot load the checkpoint, or engines would apply its adapters to other weights, and ``UserError``
        when a function cannot be imported.
        """
        import torch

        from asyncrl_cli.data.tokenizer import load_tokenizer
        from asyncrl_cli.train import checkpoints
        from asyncrl_cli.train import deepspeed_engine as ds
        from asyncrl_cli.train.algorithms.objective import Objective
        from asyncrl_cli.train.model.lora import base_bits
        from asyncrl_cli.train.model.reference import load_reference
        from asyncrl_cli.train.nonfinite_guard import SkipLimit
        from asyncrl_cli.train.precompute import Learner
        from asyncrl_cli.train.shards import adapter_layout, engine_layout
        from asyncrl_cli.weights.layout import chunks_of, pages_of
        from asyncrl_cli.weights.mapped import MappedReplica, copies_of

        trainer = self._spec.trainer
        if trainer.gpus_per_rank == 0:
            torch.set_num_threads(trainer.threads_per_rank)
        limit_gpu_memory(self._spec)
        torch.manual_seed(self._spec.seed)
        self._model_dir = model_dir
        sources: dict[str, checkpoints.Source] = {}
        if checkpoint is not None:
            saved = Checkpoint.from_folder(Path(checkpoint))
            engine_names = ["", checkpoints.CRITIC] if self._spec.algorithm.needs_critic else [""]
            sources = {
                engine_name: checkpoints.find_source(saved, trainer, engine_name) for engine_name in engine_names
            }
        load_universal = any(source.is_universal for source in sources.values())
        if load_universal and self._rank == 0:
            # Before rank 0 joins: the other ranks wait for it in ``join_process_group`` and then read these files
            # (decision 0009).
            for source in sources.values():
                checkpoints.to_universal(source)
        ds.join_process_group(
            self._rank,
            trainer.ranks,
            address=address,
            port=port,
            gpu=trainer.gpus_per_rank > 0,
            listener=self._listener if self._rank == 0 else None,
        )
        objective = Objective.of(self._spec.algorithm, Path(search_path))
        # The engines of policy and critic are collective: all ranks start them in this order.
        self._engine = ds.start_engine(self._spec, model_dir, load_universal)
        self._model = self._engine.module.model
        reference = load_reference(self._spec, model_dir, self._engine)
        critic = ds.start_critic(self._spec, model_dir, load_universal) if self._spec.algorithm.needs_critic else None
        self._learner = Learner(
            spec=self._spec,
            rank=self._rank,
            objective=objective,
            engine=self._engine,
            limit=SkipLimit(trainer.max_skipped_updates),
            reference=reference,
            critic=critic,
            vision=self._engine.module.vision,
        )
        make_layout = engine_layout if self._spec.model.published_adapter is None else adapter_layout
        self._layout = make_layout(self._model, getattr(torch, self._spec.rollout.dtype))
        local_pages = pages_of(chunk for chunk in chunks_of(self._layout, trainer.ranks) if chunk.rank == self._rank)
        self._copies = copies_of(self._engine.device)
        self._replica = MappedReplica(self._layout, self._copies, local_pages)
        self._snapshot = checkpoints.Snapshot()
        self._tokenizer = load_tokenizer(model_dir, self._spec.model.chat_template)
        base = base_bits(self._model) if self._spec.model.published_adapter is not None else []
        # Last, because loading the models above may draw random numbers, and this restores their states. Collective:
        # policy before critic on all ranks.
        for engine_name, source in sources.items():
            engine = critic if critic is not None and engine_name == checkpoints.CRITIC else self._engine
            checkpoints.load_state(engine, source, self._rank)
        if base and base_bits(self._model) != base:  # engines would apply the adapters to other weights (decision 0053)
            raise RunError(
                f"this checkpoint's adapters were trained on another model than the one in {model_dir}",
                location=str(checkpoint),
                hint="restore that model there: with model.lora.serve: adapter engines read its weights themselves",
            )

    def train_step(self, batch: TrainingBatch) -> StepReport:
        """Make all optimizer updates of one step."""
        bound_log()  # the user's objective may print
        from asyncrl_cli.train.step import train_batch

        with explaining_a_full_gpu(self._spec, self._rank):
            report = train_batch(self._learner, batch)
        free_gpu_cache(self._spec)
        return report

    def supervised_step(self, batch: SupervisedBatch) -> StepReport:
        """Make one supervised update (``model.warm_start``)."""
        from asyncrl_cli.train.supervised import train_rows

        with explaining_a_full_gpu(self._spec, self._rank):
            return train_rows(self._learner, batch)

    def layout(self) -> tuple[TensorSlot, ...]:
        """Return the layout of the weights that engines get; it is the same on every rank."""
        return self._layout

    def write(self, version: int, paths: Sequence[str], prompt_ids: Sequence[int] = ()) -> Probe | None:
        """Write this rank's shard of the weights into the memory at ``paths[rank]``.

        Rank 0 returns the probe that proves them, made from ``prompt_ids`` of the task's prompts. Collective: a rank
        that does not find its memory still takes part, and then raises ``ReplicaGone``.
        """
        from asyncrl_cli.train.model.lora import without_adapters
        from asyncrl_cli.train.shards import adapter_shards, shards, write_shard
        from asyncrl_cli.weights.manifest import ReplicaGone

        trainer = self._spec.trainer
        adapter_only = self._spec.model.published_adapter is not None
        own_shards = adapter_shards if adapter_only else shards
        lost_memory: ReplicaGone | None = None
        tensors: dict[str, Any] = {}
        with ExitStack() as writing:
            try:
                tensors = writing.enter_context(self._replica.open(paths[self._rank], version))
            except ReplicaGone as gone:
                lost_memory = gone
            # All weights, with or without memory: the other ranks gather adapters together with this one.
            for name, begin, elements in own_shards(self._model, self._rank, trainer.ranks, trainer.zero_stage):
                if lost_memory is None:
                    write_shard(tensors[name], begin=begin, elements=elements, copies=self._copies)
            # On all ranks, because the forward pass is collective (decision 0003). A GPU copies the weights during it.
            probe = self._probe(prompt_ids)
            base = self._base_logprobs.get(probe.ids)
            if adapter_only and base is None:
                with without_adapters(self._model):
                    base = self._probe(prompt_ids).logprobs
                self._base_logprobs = {probe.ids: base}
        if lost_memory is not None:
            raise lost_memory
        return replace(probe, base_logprobs=base) if self._rank == 0 else None

    def save_model(self, folder: str, adapter_folder: str) -> None:
        """Write the weights as a Hugging Face directory with the tokenizer, and adapters to their own. Rank 0
        writes."""
        from asyncrl_cli.data.tokenizer import load_tokenizer
        from asyncrl_cli.train.model.adapter_folder import save_adapter
        from asyncrl_cli.train.model.lora import full_weights, gathered
        from asyncrl_cli.train.model.saving import save_while_gathered
        from asyncrl_cli.train.shards import engine_layout

        # Collective: ranks that write nothing must iterate, too.
        weights = full_weights(self._model, self._spec.trainer.zero_stage)
        if self._rank == 0:
            layout = engine_layout(self._model, self._model.dtype)  # ``self._layout`` may have only the adapters
            save_while_gathered(self._model, source=self._model_dir, folder=folder, slots=layout, weights=weights)
            load_tokenizer(self._model_dir, self._spec.model.chat_template).save_pretrained(folder)
        else:
            for _ in weights:
                pass
        if (lora := self._spec.model.lora) is not None:
            matrices = {name: matrix for name, matrix in self._model.named_parameters() if matrix.requires_grad}
            with gathered(list(matrices.values()), self._spec.trainer.zero_stage):
                if self._rank == 0:
                    Path(adapter_folder).mkdir(exist_ok=True)
                    save_adapter(matrices, lora, self._model_dir, Path(adapter_folder))

    def save_checkpoint(self, folder: str, sharers: int) -> None:
        """Copy this rank's shard of weights and optimizer, its counter and random-number states.

        Collective. Training may continue when all ranks have returned. ``sharers``: ranks on this host.
        """
        from asyncrl_cli.train.checkpoints import CRITIC, save_state

        root, snapshot = Path(folder), self._snapshot
        with snapshot.recording(sharers):
            # Policy before critic on every rank: DeepSpeed's saving has barriers.
            save_state(self._engine, snapshot, folder=root, rank=self._rank)
            if (critic := self._learner.critic) is not None:
                save_state(critic, snapshot, folder=root / CRITIC, rank=self._rank)

    def write_checkpoint(self, folder: str) -> dict[str, Digest]:
        """Write the copies of ``save_checkpoint``, while other methods may run.

        Returns the checksums of this rank's files by path in ``folder``. All files are on disk.
        """
        return {path.relative_to(folder).as_posix(): digest for path, digest in self._snapshot.write().items()}

    def _probe(self, prompt_ids: Sequence[int]) -> Probe:
        import torch

        from asyncrl_cli.train.model.probe import PROBE_TOKENS, probe_ids

        vocabulary = self._model.config.get_text_config().vocab_size
        policy = self._engine.module
        image = None if policy.vision is None else policy.vision.stand_in(policy.model)
        length = min(PROBE_TOKENS, self._spec.model.max_length - 1 - (image.length if image else 0))
        ids = torch.tensor([probe_ids(prompt_ids, tokenizer=self._tokenizer, vocabulary=vocabulary, length=length)])
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        ids, mask, images, first_scored = ids.to(self._engine.device), mask.to(self._engine.device), {}, 1
        if image is not None:
            ids, mask, images["images"] = policy.vision.with_image(policy.model, ids, mask)
            first_scored = image.end
        # For engines the probe is a prompt, and they compute a prompt's log-probs at temperature 1.
        temperature, policy.temperature = policy.temperature, 1.0
        try:
            with torch.no_grad():
                logprobs = self._engine(ids, mask, **images)
        finally:
            policy.temperature = temperature
        return Probe(
            tuple(ids[0].tolist()),
            logprobs[0, first_scored:].float().cpu().numpy(),
            images=() if image is None else (image,),
        )
