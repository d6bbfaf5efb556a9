"""What the GCS of a cluster says, without a dashboard and without a part in the cluster (cases D05, D20)."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vime.debug.stop.records import Stop
from vime.errors import UsageError, VimeError, first_line

CONNECT_SECONDS = 5.0
"""Ray itself would try for 40 s where nothing listens."""
ANSWERS, TOKEN_NEEDED, NO_CLUSTER = "answers", "token needed", "no cluster"
TOKEN_HINT = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
_JOB_KEY, _JOB_NAMESPACE = "_ray_internal_job_info_", b"job"
_PDB_PREFIX, _PDB_NAMESPACE = b"RAY_PDB_", b"ray_pdb"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Paused:
    """A worker that waits in Ray's own debugger. ``where``: where Ray knows it (its older debugger does)."""

    kind: str
    pid: int
    address: str
    node: str
    port: int
    where: str = ""
    threads: int = 1


@dataclass(frozen=True)
class Node:
    """A node of a cluster."""

    is_alive: bool
    hostname: str


@dataclass(frozen=True)
class Worker:
    """A row of the cluster's table of workers and drivers."""

    pid: int
    node: str
    address: str
    is_alive: bool
    paused_threads: int
    debugger_port: int


def state_of(address: str) -> str:
    """Whether a GCS answers at ``address`` with the authentication that this process is set to (case D20)."""
    try:
        client(address)
    except TokenNeeded:
        return TOKEN_NEEDED
    except VimeError:
        return NO_CLUSTER
    return ANSWERS


class TokenNeeded(UsageError):
    """The cluster is there and wants a token, or another one."""


def client(address: str) -> Any:
    """Ray's client of the GCS at ``address``: it joins nothing. VimeError where there is none, in bounded time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise VimeError(f"no cluster at {address}: {error.strerror or error}", "is it still there?") from error
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    try:
        with _quiet():
            return GcsClient(address=address)
    except ray.exceptions.AuthenticationError as error:
        raise TokenNeeded(f"token needed: the cluster at {address} refuses this one, or none", TOKEN_HINT) from error
    except (ray.exceptions.RayError, RuntimeError) as error:
        why = first_line(error)
        raise VimeError(f"no cluster at {address}: {why}", "is that the address of its GCS?") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's C++ writes to stderr what it raises as well."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def workers(address: str) -> list[Worker]:
    """All workers and drivers that the cluster knows, dead ones too."""
    from ray.core.generated.gcs_pb2 import WorkerTableData

    found = []
    for row in _state(address).get_worker_table():
        data = WorkerTableData.FromString(row)
        place = data.worker_address
        known = (data.is_alive, data.num_paused_threads, data.debugger_port)
        found.append(Worker(data.pid, place.node_id.hex(), place.ip_address, *known))
    return found


def nodes(address: str) -> dict[str, Node]:
    """All nodes that the cluster knows, by id, dead ones too."""
    rows = _state(address).get_node_table()
    return {row["NodeID"]: Node(row["Alive"], row["NodeManagerHostname"]) for row in rows}


def node_of(stop: Stop, known: Mapping[str, Node]) -> str:
    """Id of the node where a process has stopped. A child of a worker knows its host alone; "": no node of it."""
    if stop.node:
        return stop.node
    found = [number for number, node in known.items() if node.is_alive and node.hostname == stop.hostname]
    return found[0] if found else ""


def paused(address: str, table: Sequence[Worker]) -> list[Paused]:
    """What waits in Ray's own debugger, and in its older one (``RAY_DEBUG=legacy``)."""
    found = [
        Paused("ray", w.pid, w.address, w.node, w.debugger_port, threads=w.paused_threads)
        for w in table
        if w.is_alive and w.paused_threads
    ]
    asked = client(address)
    for key in asked.internal_kv_keys(_PDB_PREFIX, _PDB_NAMESPACE, CONNECT_SECONDS):
        value = asked.internal_kv_get(key, _PDB_NAMESPACE, CONNECT_SECONDS)
        if value is not None:
            row = json.loads(value)
            host, _, port = str(row["pdb_address"]).rpartition(":")
            where = f"{row.get('filename', '')}:{row.get('lineno', '')}"
            found.append(Paused("ray legacy", 0, host, str(row.get("node_id", "")), int(port), where))
    return found


def is_job_alive(asked: Any, job: str) -> bool:
    """Whether a submitted job has not ended, by what the cluster's store says of it."""
    value = asked.internal_kv_get(f"{_JOB_KEY}{job}".encode(), _JOB_NAMESPACE, CONNECT_SECONDS)
    return value is not None and json.loads(value).get("status") not in _ENDED


def has_dashboard(asked: Any) -> bool:
    """Whether the cluster's dashboard, which editors and ``ray job submit`` talk to, is up."""
    return bool(asked.internal_kv_get(b"webui:url", b"dashboard", CONNECT_SECONDS))


def _state(address: str) -> Any:
    from ray._raylet import GcsClientOptions, GlobalStateAccessor  # type: ignore[attr-defined]

    client(address)  # whether it is there, and lets us in: the accessor would wait, or end the process
    options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    accessor = GlobalStateAccessor(options)
    if not accessor.connect():
        raise VimeError(f"the cluster at {address} does not answer", "is it still there?")
    return accessor
