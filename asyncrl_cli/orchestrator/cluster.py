"""Starts Ray on this machine for one run, or joins a cluster.

A local cluster ends with the driver. Ray ends its own processes if the driver exits normally; a reaper
(``system.reaper``) ends the rest.

Every process that can call Ray can run code as this user, so a local cluster has its own token and listens only on
loopback.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, NoReturn, TypeVar

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.interrupts import GROUP_SIGNALS, Interrupted, Stop
from asyncrl_cli.orchestrator.nodes import check_resources, live_nodes
from asyncrl_cli.sizing.host import OBJECT_STORE_BYTES, stored_bytes
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.reaper import MARK, running_reaper
from asyncrl_cli.system.remote import CONNECT_S, head_answers

HEAD_LOST_S = 40.0
"""Seconds without an answer from Ray's head after which a run ends. After 60 seconds Ray itself would end the driver
without a message. If the head restarts in time, the run continues."""
LOOK_S = 1.0
"""Seconds between two checks of Ray's processes."""
RAYLET_START_S = 90.0
"""Seconds that a node of Ray may take to appear."""
RAY_STARTS = 3
"""Nodes of Ray that are tried."""
T = TypeVar("T")

_lost = Event()


def ray_is_lost() -> bool:
    """True once ``while_ray_lives`` has seen Ray's own processes end: calls to Ray may then block for a minute."""
    return _lost.is_set()


class Actors(NamedTuple):
    """Numbers of engines and trainer ranks that a command starts."""

    engines: int
    ranks: int

    @classmethod
    def of(cls, spec: ExperimentSpec) -> Actors:
        """The numbers at the start of a run."""
        return cls(spec.rollout.min_engines if spec.stop.total else 0, spec.trainer.ranks)


@contextmanager
def ray_cluster(spec: ExperimentSpec, log_dir: Path, actors: Actors | None = None) -> Iterator[None]:
    """Start Ray or join a cluster, and leave it after the block. Raises ``RunError`` if this fails.

    A joined cluster must have room for ``actors``, by default the actors that a run starts with.
    """
    _lost.clear()
    if spec.cluster.address is None:
        with _local(spec, log_dir):
            yield
        return
    demand = actors or Actors.of(spec)
    with connected(spec.cluster.address):
        check_resources(spec, nodes=live_nodes(), engines=demand.engines, ranks=demand.ranks)
        yield


def object_store_bytes(spec: ExperimentSpec) -> int:
    """Size of a local run's object store: room for two batches, because Ray spills what does not fit to disk; at most
    nine tenths of the free space in /dev/shm, because Ray would put a larger store on disk."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return max(OBJECT_STORE_BYTES, min(stored_bytes(spec), free * 9 // 10))


@contextmanager
def _local(spec: ExperimentSpec, log_dir: Path) -> Iterator[None]:
    with running_reaper(log_dir / "reaper.log") as folder, _environment(_settings(folder)):
        _read_environment_again()
        try:
            cpu_count = (
                spec.trainer.ranks * spec.trainer.threads_per_rank
                + spec.rollout.max_engines * spec.rollout.threads_per_engine
            )
            # Ray's processes inherit this: a closed terminal and Slurm signal the driver's whole process group.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
            try:
                _start_ray(
                    # More than the machine's cores if the spec has more threads: they may share cores.
                    num_cpus=max(os.cpu_count() or 1, cpu_count + 1),
                    object_store_memory=object_store_bytes(spec),
                    # One level below: Ray makes its folder writable for everybody, and ours is private.
                    _temp_dir=str(folder / "r"),
                )
            except Exception as error:
                hint = "free memory, disk or ports, or name a running cluster in cluster.address"
                if "AF_UNIX" in str(error):  # the path of a socket is too long
                    hint = f"set TMPDIR to a shorter path than {tempfile.gettempdir()}, such as /tmp"
                message = f"Ray does not start: {type(error).__name__}: {error}"
                raise RunError(message, location="cluster", hint=hint) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            yield
        finally:
            _leave()
    _read_environment_again()


def _settings(folder: Path) -> dict[str, str | None]:
    """Make a token and a temporary folder in ``folder``; return the environment of a local cluster that uses them."""
    temporary = folder / "tmp"
    temporary.mkdir(mode=0o700)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        MARK: str(folder),
        # setproctitle would overwrite the environment that the reaper reads.
        "SPT_NOENV": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default gcs_server keeps events of the last 100,000 actor calls, about 350 MiB, for the dashboard, which
        # does not run here.
        "RAY_task_events_report_interval_ms": "0",
        # By default Ray's workers have a low priority (nice 15).
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # By default, Ray before 2.59 requires no token.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_AUTH_TOKEN": None,  # it would have precedence over the file
        # Despite its name, the only setting that makes Ray's servers listen only on loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # A killed engine leaves vLLM's sockets and files among the temporary files; the reaper removes this folder.
        "TMPDIR": str(temporary),
    }


def _start_ray(**options: Any) -> None:
    """Start Ray's processes. Ray chooses ports that another process may take before a raylet does. Such a raylet ends
    or never joins its node, and another node is started."""
    import ray

    for attempt in range(1, RAY_STARTS + 1):
        nodes: list[Any] = []
        try:
            with _changed_ray_start(nodes):
                # "local": not the cluster in RAY_ADDRESS, which is set in Ray's own jobs.
                ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", **options)
            return
        except Exception:
            for node in nodes:
                node.kill_all_processes(check_alive=False, wait=True)
            if attempt == RAY_STARTS or not nodes:
                raise


@contextmanager
def _changed_ray_start(nodes: list[Any]) -> Iterator[None]:
    """Within the block, keep Ray from starting its autoscaler, dashboard and log monitor, and watch the raylet.

    A cluster of one machine does not need these processes, and they cost each run two seconds; ``include_dashboard``
    and ``log_to_driver`` do not prevent them (decision 0044). A Ray version without these methods starts everything.
    Ray gives its node 30 seconds, too few on a busy machine, and does not notice the raylet's end. ``nodes`` gets each
    node with a raylet.
    """
    from ray._private import services
    from ray._private.node import Node

    get_node, start_raylet = services.get_node, Node.start_raylet

    def start_watched_raylet(node: Any, *arguments: Any, **keywords: Any) -> None:
        nodes.append(node)
        start_raylet(node, *arguments, **keywords)

    def wait_for_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + RAYLET_START_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                processes = [info.process for node in nodes for info in node.all_processes.get("raylet", ())]
                if any(process.poll() is not None for process in processes):
                    raise ChildProcessError("the raylet ended at its start") from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    names = [name for name in ("start_monitor", "start_log_monitor", "start_api_server") if hasattr(Node, name)]
    methods = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda *_, **__: None)
    services.get_node, Node.start_raylet = wait_for_node, start_watched_raylet
    try:
        yield
    finally:
        services.get_node, Node.start_raylet = get_node, start_raylet
        for name, method in methods.items():
            setattr(Node, name, method)


def _read_environment_again() -> None:
    """Have Ray read the environment again: it caches the values at its import and its first token."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # not in Ray's stub

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, True)


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Within the block, environment variables have these values; None: they are not set."""
    saved_values = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(saved_values)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Join a running cluster, and leave it after the block. Raises ``RunError`` if it cannot be reached."""
    import ray

    try:
        _connect_once(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise RunError(
            f"no Ray cluster answers at {address}: {type(error).__name__}: {error}",
            location="cluster.address",
            hint="start one with `ray start --head`, or remove cluster.address to have one started here; a "
            "cluster with token authentication needs RAY_AUTH_MODE=token in this environment",
        ) from error
    try:
        yield
    finally:
        _leave()


def _leave() -> None:
    import ray

    if not ray_is_lost():
        ray.shutdown()
    else:
        # It would wait for the lost head until Ray ends this process, and the error would not be shown.
        atexit.unregister(ray.shutdown)


def _connect_once(address: str) -> None:
    """Raise ``OSError`` if a cluster's port is closed: Ray itself would try for ten minutes."""
    if address == "auto":  # without RAY_ADDRESS, Ray looks on this host and fails immediately
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


async def while_ray_lives(coroutine: Awaitable[T], hint: str, stop: Stop | None = None) -> T:
    """The result of ``coroutine``. If Ray's own processes end first, cancel it and raise ``RunError`` with ``hint``:
    Ray would end this process after a minute, without a message. If ``stop`` comes first, raise ``Interrupted``."""
    working, watching = asyncio.ensure_future(coroutine), asyncio.create_task(_until_ray_ends(hint))
    stopping = asyncio.create_task((asyncio.Event() if stop is None else stop.event).wait())
    try:
        await asyncio.wait([working, watching, stopping], return_when=asyncio.FIRST_COMPLETED)
        if watching.done() or (working.done() and not working.cancelled() and working.exception() and _dead()):
            _lost.set()
            await watching  # raises the cause; the error of ``working`` is only a consequence
        if not working.done():
            raise Interrupted
        return await working
    finally:
        for task in (working, watching, stopping):
            task.cancel()
        await asyncio.gather(working, watching, stopping, return_exceptions=True)


async def _until_ray_ends(hint: str) -> NoReturn:
    answered = time.monotonic()
    while True:
        if dead := _dead():
            raise RunError(f"Ray's process {dead}", location="cluster", hint=hint)
        if await head_answers():
            answered = time.monotonic()
        elif time.monotonic() - answered > HEAD_LOST_S:
            message = f"Ray's head has not answered for {HEAD_LOST_S:.0f} s"
            raise RunError(message, location="cluster", hint=hint)
        await asyncio.sleep(LOOK_S)


def _dead() -> str:
    """Name the first process of the local Ray that has ended, and how it ended. Empty if all run or Ray was joined."""
    from ray._private import worker

    for name, process in worker._global_node.dead_processes():
        code = process.returncode
        return f"{name} {f'was ended by {signal.Signals(-code).name}' if code < 0 else f'ended with exit code {code}'}"
    return ""
