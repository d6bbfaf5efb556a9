"""Whether a stopped process can be attached to from here, and what to do where it cannot (case D04)."""

from __future__ import annotations

import socket

from vime.debug.attach.clusters import CONNECT_SECONDS
from vime.debug.attach.sessions import is_here
from vime.debug.stop.records import ATTACHED, Stop
from vime.errors import UsageError


def check(stop: Stop) -> None:
    """UsageError where ``stop`` has a client already, is on another node, or its port is closed."""
    if stop.state == ATTACHED:
        raise UsageError(
            f"{stop.key} is attached to already, and a debug adapter takes one client", "detach that one first"
        )
    if not is_here(stop):
        raise UsageError(
            f"{stop.key} listens at {stop.host}:{stop.port} of {stop.hostname} ({stop.address}), not of this machine\n"
            + "\n".join(ways(stop)),
            "one of these, then attach a client to 127.0.0.1",
        )
    try:
        socket.create_connection((stop.host, stop.port), CONNECT_SECONDS).close()
    except OSError as error:
        raise UsageError(
            f"{stop.key}: nothing listens at {stop.host}:{stop.port} ({error.strerror or error}) although process "
            f"{stop.pid} lives: has it gone on, or does it run in a container with a network of its own?\n"
            + "\n".join(ways(stop)),
            "vime debug-attach list; from outside of a container, one of these",
        ) from error


def ways(stop: Stop) -> list[str]:
    """Lines to paste that bring the port of another node, or of a pod, to this machine."""
    port = stop.port
    return [
        f"  vime debug-attach connect {stop.key} --forward        # through Ray",
        f"  ssh -N -L {port}:{stop.host}:{port} {stop.address or stop.hostname}",
        f"  kubectl port-forward pod/{stop.hostname} {port}:{port}",
    ]
