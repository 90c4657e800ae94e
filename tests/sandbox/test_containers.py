"""A sandbox in a container runs commands with a task's image, holds its limits, and ends with its worker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.sandbox.commands import ShellSandbox, open_sandbox
from asyncrl_cli.sandbox.container import control_groups
from asyncrl_cli.sandbox.trial import missing_program, problem
from asyncrl_cli.spec.inputs import SandboxSpec
from asyncrl_cli.system.process_tree import ENGINE_PROCESSES, is_engine
from asyncrl_cli.system.reaper import MARK, kill_marked
from asyncrl_cli.tasks.base import SPEC_FOLDER, ModelAccess
from asyncrl_cli.tasks.episode_sandbox import check_images, episode_sandbox, image_of
from asyncrl_cli.tasks.ready.command import Command
from tests.sandbox.kinds import SilentHandler, busybox_container, import_image, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def settings() -> Iterator[SandboxSpec]:
    with busybox_container("commands") as container:
        yield container


def in_container(settings: SandboxSpec, body: Callable[[ShellSandbox], Awaitable[Any]], **options: Any) -> Any:
    async def opened() -> Any:
        async with open_sandbox(settings, **options) as sandbox:
            return await body(sandbox)

    return asyncio.run(opened())


def container_names(name_filter: str) -> str:
    command = ["podman", "ps", "--all", "--filter", name_filter, "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def engines() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] in ENGINE_PROCESSES and process.info["cmdline"]:
            yield process


def test_commands_and_files_of_a_container(settings: SandboxSpec) -> None:
    async def body(sandbox: ShellSandbox) -> None:
        result = await sandbox.run('pwd; echo error >&2; echo "$A"; exit 7', env={"A": "it's $HOME\n\u00e4"})
        assert (result.status, result.output) == (7, "/sandbox\nerror\nit's $HOME\n\u00e4\n")
        result = await sandbox.run("echo reason >&2; echo 1; exit 3", errors_apart=True)
        assert (result.status, result.output, result.errors) == (3, "1\n", "reason\n")
        assert (await sandbox.run("sleep 1000 & echo started")).output == "started\n"
        assert (await sandbox.run("ps | grep -c 'sleep 1000$'")).output == "0\n"
        data = bytes(range(256)) * 1000
        await sandbox.write_file("folder/a 'file", data)
        assert await sandbox.read_file("folder/a 'file") == data
        await sandbox.write_file("/tests/test.sh", b"echo run")  # a container resolves any path inside
        assert (await sandbox.run("sh /tests/test.sh")).output == "run\n"
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("missing")
        with pytest.raises(OSError, match="not a file"):
            await sandbox.read_file("folder")
        await sandbox.run("mkfifo pipe")
        with pytest.raises(OSError, match="not a file"):
            await sandbox.write_file("pipe", b"nobody reads this")
        assert (await sandbox.run("cat /proc/net/dev | grep -c :")).output == "1\n"  # only loopback

    in_container(settings, body)


def test_limits_of_a_container_stop_a_command_and_the_next_one_runs(settings: SandboxSpec) -> None:
    commands = {
        "time": "sleep 1000",
        "time, with output": "yes",
        "memory": "x=a; while :; do x=$x$x; done",
        "processes": "bomb() { bomb | bomb & }; bomb; sleep 1000",
        "disk": "dd if=/dev/zero of=/large bs=1M count=50; sleep 1000",
    }

    async def body(sandbox: ShellSandbox) -> None:
        for limit, command in commands.items():
            result = await sandbox.run(command, time_s=2.0 if limit.startswith("time") else 60.0)
            assert (result.status, result.stopped) == (None, limit.partition(",")[0]), result
            assert (await sandbox.run("ps | grep -c 'sleep 1000$'")).output == "0\n"
        result = await sandbox.run("dd if=/dev/zero of=large bs=1M count=50")
        assert "No space left" in result.output

    in_container(settings, body)


def test_a_container_reaches_the_gateway_and_nothing_else(settings: SandboxSpec) -> None:
    class Answers(SilentHandler):
        def do_GET(self) -> None:
            self.answer(b"from the gateway")

    async def body(sandbox: ShellSandbox) -> None:
        result = await sandbox.run("wget -qO- $OPENAI_BASE_URL/models")
        assert result.output == "from the gateway", result
        result = await sandbox.run(f"wget -qO- {address}/")
        assert "refused" in result.output

    with serving(Answers) as address:
        in_container(settings.model_copy(update={"network": "gateway"}), body, gateway=f"{address}/v1")


@pytest.mark.skipif(shutil.which("runsc") is None, reason="gVisor's runsc is not installed")
def test_a_container_in_gvisor_runs_commands(settings: SandboxSpec) -> None:
    async def body(sandbox: ShellSandbox) -> None:
        assert (await sandbox.run("sleep 1000 & echo $A", env={"A": "1"})).output == "1\n"
        assert (await sandbox.run("ps | grep -c 'sleep 1000$'")).output == "0\n"
        await sandbox.write_file("a", b"2")
        assert await sandbox.read_file("a") == b"2"

    gvisor = settings.model_copy(update={"runtime": shutil.which("runsc"), "memory_mb": 512, "processes": 256})
    if reason := problem(gvisor):
        pytest.skip(f"gVisor does not start here: {reason}")
    in_container(gvisor, body)
    with pytest.raises(SandboxError, match="network of its own"):
        in_container(gvisor.model_copy(update={"network": "gateway"}), body, gateway="http://127.0.0.1:9/v1")


@pytest.mark.parametrize("moment", ["while it starts", "during a command"])
def test_a_killed_run_leaves_no_container(settings: SandboxSpec, moment: str) -> None:
    program = """
import asyncio, json, sys
from asyncrl_cli.sandbox.commands import open_sandbox
from asyncrl_cli.spec.inputs import SandboxSpec
async def main():
    async with open_sandbox(SandboxSpec(**json.loads(sys.argv[1]))) as sandbox:
        print("open", flush=True)
        await sandbox.run("sleep 1000", time_s=1000.0)
asyncio.run(main())
"""
    mark = f"killed-{os.getpid()}"
    worker = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(settings.model_dump())],
        stdout=subprocess.PIPE,
        env=os.environ | {MARK: mark},
    )
    assert worker.stdout is not None
    label = f"label=asyncrl.run={mark}"
    if moment == "during a command":
        assert worker.stdout.readline() == b"open\n"
    while not (name := container_names(label)):  # the test's time limit ends it
        pass
    reaping = Thread(target=worker.wait)
    reaping.start()
    kill_marked(mark)  # as the reaper of a killed run, which kills all descendants
    reaping.join()
    while container_names(label) or any(name in process.info["cmdline"] for process in engines()):
        pass
    remaining_containers = subprocess.run(
        ["podman", "ps", "--all", "--external"], capture_output=True, text=True, check=True
    ).stdout
    assert name not in remaining_containers


@pytest.mark.nightly
def test_64_containers_at_once(settings: SandboxSpec) -> None:
    async def written_and_read(index: int) -> str:
        async with open_sandbox(settings) as sandbox:
            await sandbox.write_file("index", b"%d" % index)
            result = await sandbox.run("cat index", time_s=300.0)
            return result.output

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(written_and_read(index) for index in range(64)))

    assert asyncio.run(all_of_them()) == [str(index) for index in range(64)]


def test_an_unusable_image_is_named(settings: SandboxSpec) -> None:
    def fault(image: str, check: Callable[[SandboxSpec], str] = problem) -> str:
        return check(settings.model_copy(update={"image": image}))

    arm64_image, shell_less = f"{settings.image}-arm64", f"{settings.image}-empty"
    import_image(arm64_image, {}, {}, "--arch", "arm64", "--os", "linux")
    import_image(shell_less, {"bin/true": b""})
    try:
        assert fault("localhost/missing:1", missing_program).startswith("there is no image localhost/missing:1 here")
        assert "is for linux/arm64" in fault(arm64_image, missing_program)
        assert not fault(shell_less, missing_program)
        assert "/bin/sh" in fault(shell_less)
    finally:
        subprocess.run(["podman", "rmi", arm64_image, shell_less], capture_output=True, check=False)


def test_images_of_rows_are_checked_before_a_start(settings: SandboxSpec) -> None:
    def row(uid: str, **fields: str) -> Prompt:
        return Prompt(uid, "fix it", fields)

    image = str(settings.image)
    by_row = settings.model_copy(update={"image": image.replace(":commands", ":{tag}")})
    assert image_of(by_row, row("a", tag="commands")) == image
    assert check_images(by_row, [[row("a", tag="commands"), row("b", tag="commands")]], "task") == "1 image, 1 tried"
    with pytest.raises(TaskError, match="row b has no sandbox here: there is no image") as caught:
        check_images(by_row, [[row("a", tag="commands"), row("b", tag="other")]], "task")
    assert caught.value.location == "task.sandbox.image"
    with pytest.raises(SandboxError, match="names no image: '--privileged'"):
        image_of(settings.model_copy(update={"image": "{tag}"}), row("a", tag="--privileged"))
    with pytest.raises(TaskError, match="row a does not fill"):
        check_images(by_row, [[row("a")]], "task")


def test_a_container_that_ends_is_an_error(settings: SandboxSpec) -> None:
    async def body(sandbox: ShellSandbox) -> None:
        name = container_names(f"ancestor={settings.image}")
        subprocess.run(["podman", "kill", name], capture_output=True, check=True)
        with pytest.raises(SandboxError):
            await sandbox.write_file("a", b"")

    in_container(settings, body)


def test_only_engines_of_episodes_survive_the_end_of_a_run() -> None:
    name = "asyncrl-sandbox-0123456789abcdef"
    assert is_engine(f"podman\0run\0--name\0{name}\0".encode())
    assert is_engine(f"/usr/bin/conmon\0-n\0{name}\0".encode())
    for command_line in (f"podman\0run\0--name\0my-{name}\0", "docker\0run\0--name\0asyncrl-sandbox-1\0", ""):
        assert not is_engine(command_line.encode())


def test_a_command_starts_in_the_image_and_reads_the_specs_folder(
    settings: SandboxSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.sh").write_text(
        'test "$PWD" = /sandbox && test ! -e /sandbox/cwd && test "$HOME" = /sandbox/home || exit 3\n'
        'grep -q \'"answer": "4"\' "$ASYNCRL_PROMPT_FILE" || exit 4\n'
        'echo "$OPENAI_API_KEY" | grep -q secret || exit 5\n'
        'touch "$ASYNCRL_FOLDER/a" 2>/dev/null && exit 6\n'
        "echo 0.5\n"
    )
    monkeypatch.setenv(SPEC_FOLDER, str(tmp_path))
    task = Command('sh "$ASYNCRL_FOLDER/agent.sh"')
    prompt, access = Prompt("a", "2+2=", {"answer": "4"}), ModelAccess("http://127.0.0.1:9/v1", "secret", "policy")

    async def episode() -> object:
        async with episode_sandbox(task, settings, access.base_url, prompt) as sandbox:
            return await task.run(prompt, access, sandbox)

    assert asyncio.run(episode()) == 0.5


def test_control_groups_of_both_versions() -> None:
    scope = "machine.slice/libpod-1.scope"
    group = Path("/sys/fs/cgroup", scope)
    assert control_groups(f"0::/{scope}/container\n") == {"memory": group, "pids": group}
    hybrid = f"9:memory:/{scope}\n8:cpu,pids:/{scope}\n0::/other\n"
    root = Path("/sys/fs/cgroup")
    assert control_groups(hybrid) == {"memory": root / "memory" / scope, "pids": root / "pids" / scope}
