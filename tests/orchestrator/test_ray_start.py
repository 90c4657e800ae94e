"""A run's own Ray starts although its first raylet ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.stack

PROGRAM = """
    import sys
    import tempfile

    import psutil
    import ray
    from ray._private.node import Node

    from asyncrl_cli.orchestrator.cluster import _start_ray

    failures, start_raylet = int(sys.argv[1]), Node.start_raylet
    starts = []

    def start_and_kill(node, *arguments, **keywords):
        start_raylet(node, *arguments, **keywords)
        starts.append(node)
        if len(starts) <= failures:
            (raylet,) = node.all_processes["raylet"]
            raylet.process.kill()

    Node.start_raylet = start_and_kill
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        try:
            _start_ray(num_cpus=1, object_store_memory=80_000_000, _temp_dir=folder)
        except Exception as error:
            print("failed:", error)
        names = [process.name() for process in psutil.Process().children(recursive=True)]
        print(len(starts), ray.is_initialized(), names.count("raylet"), names.count("gcs_server"))
        ray.shutdown()
"""


@pytest.mark.parametrize(
    ("failures", "expected"), [(1, ["2 True 1 1"]), (3, ["failed: the raylet ended", "3 False 0 0"])]
)
def test_another_node_is_started_if_a_raylet_ends(failures: int, expected: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), str(failures)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    lines = ended.stdout.splitlines()
    assert len(lines) == len(expected), ended.stdout + ended.stderr
    assert all(line.startswith(text) for line, text in zip(lines, expected, strict=True)), ended.stdout
