"""Whether a stopped process can be attached to from here, and what to do where it cannot (case D04).

Nothing connects to find that out: a debug adapter (debugpy 1.8) that loses a connection before it has greeted it takes
no other one any more.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from vime.debug.attach.sessions import is_here
from vime.debug.stop.records import WAITING, Stop
from vime.errors import UsageError

_LISTEN, _ANY = "0A", "0.0.0.0"


def check(stop: Stop) -> None:
    """UsageError where ``stop`` has a client already, is on another node, or its port is closed."""
    if stop.state != WAITING:
        raise UsageError(
            f"{stop.key} is attached to already, and a debug adapter takes one client", "detach that one first"
        )
    if not is_here(stop):
        raise UsageError(
            f"{stop.key} listens at {stop.host}:{stop.port} of {stop.hostname} ({stop.address}), not of this machine\n"
            + "\n".join(ways(stop)),
            "one of these, then attach a client to 127.0.0.1",
        )
    if not listens(stop.host, stop.port):
        raise UsageError(
            f"{stop.key}: nothing listens at {stop.host}:{stop.port} although process {stop.pid} lives: has it gone "
            "on, or does it run in a container with a network of its own?\n" + "\n".join(ways(stop)),
            "vime debug-attach list; from outside of a container, one of these",
        )


def listens(host: str, port: int) -> bool:
    """Whether a process of this machine, in this network namespace, listens there."""
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, number = fields[1].rpartition(":")
            if fields[3] == _LISTEN and int(number, 16) == port and (file == "tcp6" or _is_for(address, host)):
                return True
    return False


def _is_for(address: str, host: str) -> bool:
    """``address``: as the kernel writes it, its bytes in the order of this machine."""
    found = socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder))
    return found in (_ANY, socket.gethostbyname(host))


def ways(stop: Stop) -> list[str]:
    """Lines to paste that bring the port of another node, or of a pod, to this machine."""
    port = stop.port
    return [
        f"  vime debug-attach connect {stop.key} --forward        # through Ray",
        f"  ssh -N -L {port}:{stop.host}:{port} {stop.address or stop.hostname}",
        f"  kubectl port-forward pod/{stop.hostname} {port}:{port}",
    ]
