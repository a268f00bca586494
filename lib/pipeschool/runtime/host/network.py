"""The network of one machine, over which its processes find each other in torch.distributed."""

from __future__ import annotations

import socket

import psutil

ADDRESSES = (socket.AF_INET, socket.AF_INET6)


def interfaces() -> list[str]:
    """Those that are up and have an address."""
    states = psutil.net_if_stats()
    return [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup and any(a.family in ADDRESSES for a in addresses)
    ]


def loopback() -> str | None:
    """The interface through which a machine talks to itself. gloo would look for the host's name,
    which a laptop without a network may not be able to find."""
    return next((name for name in interfaces() if name in ("lo", "lo0")), None)


def check_network() -> None:
    """ValueError where processes cannot find each other."""
    if not interfaces():
        raise ValueError(
            "the workers of this run meet over the network, and no interface of this machine is "
            "up: start the loopback, such as with `ip link set lo up`"
        )
