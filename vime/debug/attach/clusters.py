"""Ray clusters on this machine, which of them is meant, and what their GCS says without a dashboard.

Ray's own discovery joins any cluster that it finds. Here nothing is guessed: one that is named, or the only one of
this user's; where there are several they are listed (case D12). The private clusters of vime's own runs are not
among them: nobody else has their tokens.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vime.debug.attach.words import clock
from vime.debug.processes import pids, start_ticks
from vime.debug.stop.records import Stop
from vime.errors import UsageError, VimeError

ADDRESS, LOCAL = "RAY_ADDRESS", "local"
CONNECT_SECONDS = 5.0
"""Ray itself would try for 40 s where nothing listens."""
ANSWERS, TOKEN_NEEDED, NO_CLUSTER = "answers", "token needed", "no cluster"
TOKEN_HINT = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
PRIVATE_PREFIX = "vime-run-"
"""Of the temporary folders of vime's own clusters."""
_JOB_KEY, _JOB_NAMESPACE = "_ray_internal_job_info_", b"job"
_PDB_PREFIX, _PDB_NAMESPACE = b"RAY_PDB_", b"ray_pdb"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Cluster:
    """A GCS on this machine. ``since``: Unix time of its start; ``auth``: its mode; "" where it is another user's."""

    address: str
    temp_dir: str
    pid: int
    since: float
    user: str
    auth: str = ""

    @property
    def is_mine(self) -> bool:
        return self.user == _user_name(os.getuid())


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


def local_clusters() -> list[Cluster]:
    """The clusters whose GCS is a process of this machine, but for vime's private ones."""
    found = [cluster for pid in pids() if (cluster := _cluster(pid)) is not None]
    return sorted(found, key=lambda cluster: (cluster.since, cluster.pid))


def chosen(address: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The address that is meant: the one given, RAY_ADDRESS, or this user's only cluster; None where there is none.

    UsageError for an address that is none, and where it would have to be guessed.
    """
    given = address or environment.get(ADDRESS)
    if given == LOCAL:
        return None
    if given:
        return checked(given, "--address" if address else ADDRESS)
    found = local_clusters()
    if not found:
        return None
    if len(found) > 1:
        raise UsageError(f"{len(found)} Ray clusters on this machine, which one?\n{listed(found)}", _NAME_IT)
    if not found[0].is_mine:
        raise UsageError(f"the Ray cluster on this machine is another user's\n{listed(found)}", _NAME_IT)
    return found[0].address


_NAME_IT = "name it: --address HOST:PORT; --address local for what runs without a cluster"


def checked(address: str, name: str) -> str:
    """HOST:PORT of a GCS, without Ray's prefix. UsageError for what is none."""
    if address == "auto":
        raise UsageError(f"{name} = 'auto': vime does not guess", _NAME_IT)
    if address.startswith(("http://", "https://")):
        raise UsageError(f"{name} = {address!r}: that is a dashboard; wanted is the GCS of the cluster", _NAME_IT)
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{name} = {address!r}: HOST:PORT of a GCS is wanted", _NAME_IT)
    return address


def listed(clusters: Sequence[Cluster]) -> str:
    """One line each."""
    return "\n".join(f"  {c.address}  {c.temp_dir}  pid {c.pid} ({c.user}), since {clock(c.since)}" for c in clusters)


def state_of(address: str) -> str:
    """Whether a GCS answers at ``address`` with the authentication that this process is set to (case D20)."""
    try:
        client(address)
    except TokenNeeded:
        return TOKEN_NEEDED
    except VimeError:
        return NO_CLUSTER
    return ANSWERS


class TokenNeeded(VimeError):
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
        why = (str(error).splitlines() or [type(error).__name__])[0]
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


def own_nodes() -> list[str]:
    """Ids of the nodes of any cluster whose raylet is a process of this machine."""
    words = [_command(pid) for pid in pids()]
    return [_option(found, "node_id") for found in words if Path(found[0]).name == "raylet"]


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


def started_at(pid: int) -> float:
    """Unix time of a process's start."""
    return _machine_start() + start_ticks(pid) / os.sysconf("SC_CLK_TCK")


@cache
def _machine_start() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("btime ")))


def _state(address: str) -> Any:
    from ray._raylet import GcsClientOptions, GlobalStateAccessor  # type: ignore[attr-defined]

    client(address)  # whether it is there, and lets us in: the accessor would wait, or end the process
    options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    accessor = GlobalStateAccessor(options)
    if not accessor.connect():
        raise VimeError(f"the cluster at {address} does not answer", "is it still there?")
    return accessor


def _cluster(pid: int) -> Cluster | None:
    """None where ``pid`` is no GCS, a private one of vime's, or has gone."""
    try:
        words = _command(pid)
        if Path(words[0]).name != "gcs_server":
            return None
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    session = Path(_option(words, "session-dir"))
    host, port = _option(words, "node-ip-address"), _option(words, "gcs_server_port")
    if port in ("", "0"):  # chosen by the GCS itself
        port = _text(session / f"gcs_server_port_{_option(words, 'node-id')}")
    temp_dir = session.parent
    if not port or PRIVATE_PREFIX in temp_dir.name:
        return None
    return Cluster(f"{host}:{port}", str(temp_dir), pid, started_at(pid), _user_name(uid), _auth(pid))


def _command(pid: int) -> list[str]:
    """Its words; one empty word where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]


def _option(words: Sequence[str], name: str) -> str:
    found = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found[0] if found else ""


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    """As the process was started with; empty where it is gone or another user's."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.partition("=")[::2] for word in words if "=" in word)


def _auth(pid: int) -> str:
    """Only the mode: a token is not looked at."""
    environment = environment_of(pid)
    return environment.get("RAY_AUTH_MODE", "disabled") if environment else ""


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
