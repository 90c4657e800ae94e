"""Ray for one run: started on this machine, or joined; and resources for its actors.

A local cluster lives and dies with the driver. Ray's own processes end with a driver that ends in order; a
reaper (``system.reaper``) ends the rest.

Whoever may call Ray runs code as this user, so a local cluster has a token of its own and listens on loopback alone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.reaper import MARK, running_reaper
from asyncrl_cli.system.remote import START_TIMEOUT_S, wait_for

FIRST_NOTICE_S, NOTICE_S = 15.0, 60.0
"""Seconds until a warning that an actor waits for resources, and between two notices."""
OBJECT_STORE_BYTES = 512 * 2**20
"""A local run keeps batches of tokens in Ray's object store, never weights."""

Resources = Mapping[str, float]
Look = Callable[[], tuple[Resources, Resources]]
"""What is free in the cluster, and what there is in all."""


@contextmanager
def ray_cluster(spec: ExperimentSpec, log_dir: Path) -> Iterator[None]:
    """Ray, for the length of the block. Raises ``RunError`` when it cannot be had."""
    if spec.cluster.address is not None:
        with joined(spec):
            yield
    else:
        with _local(spec, log_dir):
            yield


@contextmanager
def _local(spec: ExperimentSpec, log_dir: Path) -> Iterator[None]:
    mark = secrets.token_hex(8)
    # Only this user may enter the folder. Ray makes its own folder writable for everybody, so that is one below.
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-"))
    # Ray puts sockets there, and their paths have room for about 100 characters.
    ray_folder = folder / "r"
    temporary = folder / "tmp"
    temporary.mkdir(mode=0o700)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    settings = {
        MARK: mark,
        # setproctitle would overwrite the environment that the reaper reads.
        "SPT_NOENV": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray's workers give way to everything else on the machine (nice 15).
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Whoever reaches Ray's ports runs code as this user. Ray before 2.59 asks for no token of itself.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Ray's one setting that makes its servers listen on loopback alone: its cluster of one machine, as on laptops.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # A killed engine leaves vLLM's sockets and files where temporary files go.
        "TMPDIR": str(temporary),
    }
    with _environment(settings, without=("RAY_AUTH_TOKEN",)), running_reaper(mark, folder, log_dir / "reaper.log"):
        import ray

        _read_environment_again()
        try:
            needed = (
                spec.trainer.ranks * spec.trainer.threads_per_rank
                + spec.rollout.max_engines * spec.rollout.threads_per_engine
            )
            try:
                ray.init(
                    # Threads may share cores: the spec says how many there are, the machine how fast that is.
                    num_cpus=max(os.cpu_count() or 1, needed + 1),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(ray_folder),
                )
            except Exception as error:
                raise RunError(
                    f"Ray does not start: {type(error).__name__}: {error}",
                    location="cluster",
                    hint="free memory, disk or ports, or name a running cluster in cluster.address",
                ) from error
            yield
        finally:
            ray.shutdown()
    _read_environment_again()


def _read_environment_again() -> None:
    """Ray keeps what it read of the environment at its import, and the token that it first used."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # not in Ray's stub

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, True)


@contextmanager
def _environment(settings: Mapping[str, str], without: Collection[str]) -> Iterator[None]:
    """This process's environment with some variables set and others missing, for the length of the block."""
    before = {name: os.environ.get(name) for name in (*settings, *without)}
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def joined(spec: ExperimentSpec) -> Iterator[str]:
    """The cluster that the spec names, for the length of the block; gives what it has of what the run wants.

    Raises ``RunError`` when it cannot be reached, and when it lacks resources.
    """
    import ray

    address = spec.cluster.address

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise RunError(
            f"no Ray cluster answers at {address}: {type(error).__name__}: {error}",
            location="cluster.address",
            hint="start one with `ray start --head`, or leave cluster.address out to have one started here; a "
            "cluster with token authentication needs RAY_AUTH_MODE=token in this environment",
        ) from error
    try:
        yield check_resources(spec, ray.cluster_resources())
    finally:
        ray.shutdown()


def engine_wants(spec: ExperimentSpec) -> dict[str, float]:
    """Ray's resources of one engine."""
    return {"CPU": spec.rollout.threads_per_engine, "GPU": spec.rollout.gpus_per_engine}


def rank_wants(spec: ExperimentSpec) -> dict[str, float]:
    """Ray's resources of one trainer rank."""
    return {"CPU": spec.trainer.threads_per_rank, "GPU": spec.trainer.gpus_per_rank}


def check_resources(spec: ExperimentSpec, total: Resources) -> str:
    """The nodes of a joined cluster have what all engines and ranks want together. Raises ``RunError``."""
    engine, rank = engine_wants(spec), rank_wants(spec)
    sums = {kind: spec.rollout.min_engines * engine[kind] + spec.trainer.ranks * rank[kind] for kind in engine}
    wanted = {kind: amount for kind, amount in sums.items() if amount}
    there = _amounts({kind: total.get(kind, 0) for kind in wanted})
    if any(amount > total.get(kind, 0) for kind, amount in wanted.items()):
        raise RunError(
            f"the run needs {_amounts(wanted)}, and the cluster has {there}",
            location="cluster.address",
            hint="add nodes to the cluster first, or lower rollout.engines, trainer.ranks or their threads and GPUs",
        )
    return f"{_amounts(wanted)} needed, {there} in the cluster"


async def placed(
    answer: Awaitable[Any], who: str, wants: Resources, warn: Callable[[str], None], look: Look | None = None
) -> None:
    """Wait for an actor's first answer, and say what is missing meanwhile.

    Raises ``RunError`` after ``START_TIMEOUT_S`` seconds, and as ``wait_for`` does.
    """
    call = asyncio.ensure_future(wait_for(answer, who))
    started, pause_s = time.monotonic(), FIRST_NOTICE_S
    try:
        while not (await asyncio.wait({call}, timeout=pause_s))[0]:
            free, total = await asyncio.to_thread(look or _look)
            waits = shortage(wants, free, total)
            if time.monotonic() - started > START_TIMEOUT_S:
                raise RunError(
                    f"Ray found no room for {who} within {START_TIMEOUT_S:.0f} s: {waits}",
                    location="cluster",
                    hint="stop what else runs in the cluster, add nodes, or lower rollout.engines or trainer.ranks",
                )
            warn(f"{who} waits until Ray has room for it: {waits}")
            pause_s = NOTICE_S
        call.result()
    finally:
        call.cancel()


def shortage(wants: Resources, free: Resources, total: Resources) -> str:
    """What an actor wants, and how much of that is free."""
    kinds = [kind for kind, amount in wants.items() if amount]
    there = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in kinds)
    return f"it needs {_amounts({kind: wants[kind] for kind in kinds})}; free are {there}"


def _amounts(resources: Resources) -> str:
    return " and ".join(
        f"{f'{amount:g}' if amount else 'no'} {kind}{'s' if amount != 1 else ''}" for kind, amount in resources.items()
    )


def _look() -> tuple[Resources, Resources]:
    import ray

    return ray.available_resources(), ray.cluster_resources()
