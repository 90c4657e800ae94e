"""Addresses of hosts, this host's network interfaces that lead to them, and proxies."""

from __future__ import annotations

import os
import socket

from asyncrl_cli.core.errors import RunError

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Variables that name a proxy, also in lower case."""
WITHOUT_PROXY = ("NO_PROXY", "no_proxy")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def proxies_in_force() -> list[str]:
    """The environment variables that name a proxy."""
    return [name for name in os.environ if name.upper() in PROXIES and os.environ[name]]


def bypass_proxies(*hosts: str) -> None:
    """Have this process and its children reach loopback, ``hosts`` and the user's own exceptions directly."""
    exceptions = [entry.strip() for name in WITHOUT_PROXY for entry in os.environ.get(name, "").split(",")]
    if "*" in exceptions:  # for all hosts; urllib knows it only alone
        return
    exceptions = list(dict.fromkeys(filter(None, (*exceptions, *LOOPBACK, *hosts))))
    os.environ.update(dict.fromkeys(WITHOUT_PROXY, ",".join(exceptions)))


def family_of(address: str) -> socket.AddressFamily:
    """The family of a numeric address, IPv6 or IPv4; a host name counts as IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_to(address: str) -> str:
    """The interface through which this host reaches an address. Sends nothing. Raises ``RunError`` if none does."""
    family = family_of(address)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket: only the route is looked up
        except OSError as error:
            raise RunError(
                f"this host has no route to {address}: {error.strerror}",
                location=socket.gethostname(),
                hint="put the hosts or the chosen nodes into one network (cluster.trainer, cluster.engines)",
            ) from None
        own_address = probe.getsockname()[0]
    if (name := _interface_with(own_address)) is not None:
        return name
    raise RunError(
        f"no network interface of this host has the address {own_address}, from which it reaches {address}",
        location=socket.gethostname(),
        hint="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME where Ray is started on this host",
    )


def _interface_with(address: str) -> str | None:
    import psutil

    family = family_of(address)
    for name, addresses in psutil.net_if_addrs().items():
        # An IPv6 address may carry its interface: fe80::1%eth0.
        if any(a.family == family and a.address.partition("%")[0] == address for a in addresses):
            return str(name)
    return None
