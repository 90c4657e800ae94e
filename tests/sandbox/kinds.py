"""Marks for tests that need bubblewrap or root, a run as another user, images for containers, and an HTTP server."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from asyncrl_cli.sandbox import bubblewrap
from asyncrl_cli.sandbox.trial import problem
from asyncrl_cli.spec.inputs import SandboxSpec

NO_LINKS: Mapping[str, str] = {}
_PROBLEM = problem(SandboxSpec())
NEEDS_BUBBLEWRAP = pytest.mark.skipif(bool(_PROBLEM), reason=f"no sandbox here: {_PROBLEM}")
NEEDS_ROOT = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be another user"
)


def run_as_ordinary_user(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user who owns no files. Skips the test if that user cannot read the repository."""
    # That user may not enter root's folders, where Python may be, so Python is mounted at an accessible place.
    repository, packages = Path(__file__).parents[2], ":".join(bubblewrap.packages())
    command = f'mount --bind {sys.base_prefix} /mnt && exec "$@"'
    as_user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    python = f"/mnt/bin/{Path(sys.executable).resolve().name}"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "sh", *as_user, python, "-c", script, *words],
        env={"PYTHONPATH": f"{repository}:{packages}", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    if any(word in result.stderr for word in ("mount:", "unshare:", "Permission denied", "No module named 'tests'")):
        pytest.skip(f"cannot be tried here: {result.stderr.strip().splitlines()[-1]}")
    return result


RUNTIME = shutil.which("runc", path="/usr/sbin:/usr/bin:/sbin")
"""Where the kernel mixes both versions of control groups, podman's default, crun, does not start."""
TEST_CONTAINER = SandboxSpec(
    kind="container", runtime=RUNTIME, network="none", time_s=30.0, memory_mb=64, processes=20, disk_mb=8
)


def import_image(name: str, files: Mapping[str, bytes], links: Mapping[str, str] = NO_LINKS, *options: str) -> None:
    """Make an image of programs and links to them; paths are relative to the root folder."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in ("bin", "tmp"):
            folder = tarfile.TarInfo(path)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(folder)
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o755
            tar.addfile(member, io.BytesIO(data))
        for path, target in links.items():
            link = tarfile.TarInfo(path)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    command = ["podman", "import", *options, "-", name]
    subprocess.run(command, input=archive.getvalue(), capture_output=True, check=True)


@contextmanager
def busybox_container(name: str) -> Iterator[SandboxSpec]:
    """A container's settings with a small image, which is removed afterwards. Skips the test without podman."""
    busybox = shutil.which("busybox")
    if not (busybox and shutil.which("podman")):
        pytest.skip("no containers here: install podman, runc and busybox-static")
    programs = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{program}": "busybox" for program in programs if program != "busybox"}
    settings = TEST_CONTAINER.model_copy(update={"image": f"localhost/asyncrl-test-{os.getpid()}:{name}"})
    import_image(str(settings.image), {"bin/busybox": Path(busybox).read_bytes()}, links)
    try:
        if reason := problem(settings):
            pytest.skip(f"no containers here: {reason}")
        yield settings
    finally:
        subprocess.run(["podman", "rmi", "--force", str(settings.image)], capture_output=True, check=False)


class SilentHandler(BaseHTTPRequestHandler):
    """Answers requests without logging them."""

    def log_message(self, *_: object) -> None: ...

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, data: bytes, status: int = 200, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server on this machine for the duration of the block; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
