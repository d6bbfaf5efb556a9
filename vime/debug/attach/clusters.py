"""Ray clusters on this machine, and which of them is meant.

Ray's own discovery joins any cluster that it finds. Here nothing is guessed: one that is named, or the only one of
this user's; where there are several they are listed (case D12). The private clusters of vime's own runs are not
among them: nobody else has their tokens.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vime.debug.attach.words import clock
from vime.debug.processes import pids, start_ticks
from vime.errors import UsageError

ADDRESS, LOCAL = "RAY_ADDRESS", "local"
KEEP_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0 Ray joins a cluster on loopback there; else it takes this machine's outer address, and tries for minutes."""
_LOOPBACK = ("127.0.0.1", "localhost")
PRIVATE_PREFIX = "vime-run-"
"""Of the temporary folders of vime's own clusters."""


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


def is_on_loopback(address: str) -> bool:
    """Whether that is a cluster of this machine which is reached through loopback alone."""
    host, _, port = address.rpartition(":")
    return host in _LOOPBACK and any(c.address == f"{_LOOPBACK[0]}:{port}" for c in local_clusters())


def found_by_ray(environment: Mapping[str, str]) -> str:
    """The cluster that ``ray.init()`` without an address joins; "" where it starts one. Source: ray 2.60,
    ``ray._private.utils.read_ray_address``.
    """
    folder = environment.get("RAY_TMPDIR", environment.get("TMPDIR", "/tmp"))
    address = _text(Path(folder, "ray", "ray_current_cluster"))
    return address if address and any(c.address == address for c in local_clusters()) else ""


def own_nodes() -> list[str]:
    """Ids of the nodes of any cluster whose raylet is a process of this machine."""
    words = [_command(pid) for pid in pids()]
    return [_option(found, "node_id") for found in words if Path(found[0]).name == "raylet"]


def started_at(pid: int) -> float:
    """Unix time of a process's start."""
    return _machine_start() + start_ticks(pid) / os.sysconf("SC_CLK_TCK")


@cache
def _machine_start() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("btime ")))


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
