"""Ports of loopback that nobody listens at, for what a test starts."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """So many different ones."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def free_port() -> int:
    return free_ports(1)[0]
