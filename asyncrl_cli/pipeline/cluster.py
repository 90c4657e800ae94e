"""Ray for one run: started on this machine, or joined.

A local cluster lives and dies with the driver. Ray's own processes end with a driver that ends in order; a
guardian sees to the rest. It waits for the driver's end of a pipe to close, however that comes about, and
then kills every process that carries this run's mark in its environment, and removes Ray's session folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl_cli.runs.directory import RunError
from asyncrl_cli.runs.guardian import MARK
from asyncrl_cli.spec.sections import ExperimentSpec

OBJECT_STORE_BYTES = 512 * 2**20
"""A local run keeps batches of tokens in Ray's object store, never weights."""


@contextmanager
def ray_cluster(spec: ExperimentSpec, log_dir: Path) -> Iterator[None]:
    """Ray, for the length of the block. Raises ``RunError`` when it cannot be had."""
    if spec.cluster.address is not None:
        with _joined(spec.cluster.address):
            yield
    else:
        with _local(spec, log_dir):
            yield


@contextmanager
def _local(spec: ExperimentSpec, log_dir: Path) -> Iterator[None]:
    mark = secrets.token_hex(8)
    # Ray puts sockets below this folder, and their paths have room for about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-"))
    temporary = os.environ.get("TMPDIR")
    os.environ |= {
        MARK: mark,
        # setproctitle would overwrite the environment that the guardian reads.
        "SPT_NOENV": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray's workers give way to everything else on the machine (nice 15).
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # A killed engine leaves vLLM's sockets and files where temporary files go.
        "TMPDIR": str(folder),
    }
    with (log_dir / "guardian.log").open("ab") as log:
        guardian = subprocess.Popen(
            [sys.executable, "-m", "asyncrl_cli.runs.guardian", mark, str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={key: value for key, value in os.environ.items() if key != MARK},
            start_new_session=True,
        )
    import ray

    try:
        needed = (
            spec.trainer.ranks * spec.trainer.threads_per_rank + spec.rollout.engines * spec.rollout.threads_per_engine
        )
        try:
            ray.init(
                # Threads may share cores: the spec says how many there are, the machine how fast that is.
                num_cpus=max(os.cpu_count() or 1, needed + 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
            )
        except Exception as error:
            raise RunError(
                f"Ray does not start: {type(error).__name__}: {error}",
                place="cluster",
                mend="Free memory, disk or ports, or name a running cluster in cluster.address",
            ) from error
        yield
    finally:
        ray.shutdown()
        del os.environ[MARK], os.environ["TMPDIR"]
        if temporary is not None:
            os.environ["TMPDIR"] = temporary
        assert guardian.stdin is not None
        guardian.stdin.close()
        try:
            guardian.wait(timeout=20)
        except subprocess.TimeoutExpired:
            guardian.kill()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _joined(address: str) -> Iterator[None]:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise RunError(
            f"no Ray cluster answers at {address}: {type(error).__name__}: {error}",
            place="cluster.address",
            mend="Start one with `ray start --head`, or leave cluster.address out to have one started here; a "
            "cluster with token authentication needs RAY_AUTH_MODE=token in this environment",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
