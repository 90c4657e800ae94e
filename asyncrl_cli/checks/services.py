"""Checks of the addresses that a spec names: the gateway's, the tracking server's and the upload's."""

from __future__ import annotations

import socket
import urllib.request
from urllib.parse import urlsplit

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.network import family_of, proxies_in_force

SERVER_S = 3.0
"""Time limit for an MLflow server's answer in seconds."""


def check_gateway(spec: ExperimentSpec, used: bool) -> str:
    """Check that the gateway's address belongs to this host. If the run uses the gateway (``used``), also check that
    its port is free."""
    host = spec.rollout.gateway.host
    port = spec.rollout.gateway.port if used else 0
    try:
        with socket.socket(family_of(host), socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        key = "host" if isinstance(error, socket.gaierror | UnicodeError) or not port else "port"
        raise ConfigError(
            f"the gateway cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
            location=f"rollout.gateway.{key}",
            hint="set rollout.gateway.host to an address of this host, and rollout.gateway.port to a free port or 0",
        ) from None
    proxies = f"; agents reach it without the proxy of {', '.join(names)}" if (names := proxies_in_force()) else ""
    return f"{host}, {f'port {port}' if port else 'any free port'}{proxies if used else ' (not used by this task)'}"


def check_tracking(spec: ExperimentSpec, ask: bool) -> Result:
    """Check with ``ask`` that the MLflow server answers, if tracking.uri names one."""
    uri = spec.tracking.uri
    if not spec.tracking.mlflow:
        return "off"
    if uri is None:
        return f"a SQLite store in {spec.runs_dir}"
    host = urlsplit(uri).hostname  # never show the whole address: it may have a password
    if ask and uri.startswith(("http://", "https://")):
        try:
            urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=SERVER_S).close()
        except (OSError, ValueError) as error:
            hint = "start it, or correct tracking.uri; the run keeps its data, and `asyncrl track` sends it later"
            return Warned(f"the MLflow server at {host} does not answer: {error}", hint)
    return f"MLflow at {host or 'a local store'}"


def check_upload(spec: ExperimentSpec) -> Result:
    """Check that fsspec supports the protocol of `checkpoints.upload`."""
    if spec.checkpoints.upload is None:
        return "off"
    protocol = spec.checkpoints.upload.partition("://")[0]
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"fsspec cannot write {protocol}:// here: {error}",
            location="checkpoints.upload",
            hint=f"install the package of {protocol}://",
        ) from None
    return f"{protocol}://"
