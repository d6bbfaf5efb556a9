"""Who is who in a run: ``processes.json`` in the run folder, the processes below those, and the runs that are alive.

A pid alone names nobody: with the start of the process and the start of the machine it does.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vime.errors import UsageError
from vime.files import whole_file

FILE = "processes.json"
FORMAT, SCHEMA_VERSION = "vime-processes", 1
REWARD_WORKER = "vime.reward.worker"
"""In the command line of every process that runs a reward function."""


@dataclass(frozen=True, order=True)
class Member:
    """One process of a run.

    role     driver, trainer, engine, engine core, reward worker, child
    rank     of the trainer rank or engine; for others their place among their kind
    started  clock ticks between the start of the machine and that of the process
    boot     id of the machine's start; empty where the process was not found any more
    node     Ray's id of the node; empty without a cluster that was joined
    label    its name in messages; empty: role and rank
    """

    role: str
    rank: int
    pid: int
    host: str
    started: int
    boot: str
    node: str = ""
    label: str = ""

    @classmethod
    def here(cls, role: str, rank: int = 0, pid: int | None = None, node: str = "", label: str = "") -> Member:
        """A process of this machine; this one, unless ``pid`` is given."""
        number = os.getpid() if pid is None else pid
        return cls(role, rank, number, socket.gethostname(), start_ticks(number), boot_id(), node, label)

    @property
    def name(self) -> str:
        """How messages call it."""
        if self.label:
            return self.label
        if self.role == "trainer":
            return f"trainer rank {self.rank}"
        return self.role if self.role == "driver" else f"{self.role} {self.rank}"

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Of a process of this machine: whether it still is the one that was noted down."""
        return self.boot == boot_id() and self.started > 0 and start_ticks(self.pid) == self.started

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it: it could not answer."""
        return stat(self.pid)[0] in "Tt"


@dataclass
class Roster:
    """The processes of the run that this process drives. ``path``: where they are written down at every change."""

    path: Path | None = None
    members: list[Member] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, members: Iterable[Member]) -> None:
        """Note further processes; one that has the role and rank of another takes its place."""
        for new in members:
            self.members = [m for m in self.members if (m.role, m.rank) != (new.role, new.rank)] + [new]
        self.write()

    def drop(self, *roles: str) -> None:
        """Forget the processes with these roles: they have ended as they should."""
        self.members = [member for member in self.members if member.role not in roles]
        self.write()

    def write(self, **facts: Any) -> None:
        """Write the file whole, with further ``facts`` about the run."""
        self.facts |= facts
        if self.path is None:
            return
        content = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **self.facts}
        rows = [asdict(member) for member in sorted(self.members)]
        with whole_file(self.path) as file:
            file.write((json.dumps(content | {"processes": rows}, indent=1) + "\n").encode())


def read_roster(run_dir: Path) -> Roster:
    """The processes of the run in ``run_dir``. UsageError where there is no such file, or one of another kind."""
    path = run_dir / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found.pop("format"), found.pop("schema_version")) != (FORMAT, SCHEMA_VERSION):
            raise KeyError("schema_version")
        members = [Member(**row) for row in found.pop("processes")]
    except FileNotFoundError as error:
        hint = "name the folder (run.dir) of a run of vime train, rollout or replay"
        raise UsageError(f"{run_dir}: no {FILE} there: no run was started in it", hint) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no list of processes that this version can read: {error}") from error
    return Roster(path, members, found)


def is_live(roster: Roster) -> bool:
    """Whether the driver of that run lives, as far as can be told from this machine."""
    return any(m.role == "driver" and (m.is_alive or not m.is_here) for m in roster.members)


def live_runs() -> list[Path]:
    """Folders of this user's runs on this machine: a process that holds the lock of a folder and is its driver."""
    found = set()
    for pid in pids():
        for target in open_files(pid):
            if target.name == ".lock" and (target.parent / FILE).is_file():
                drivers = [m for m in read_roster(target.parent).members if m.role == "driver" and m.is_alive]
                found |= {target.parent for m in drivers if m.pid == pid}
    return sorted(found)


def find_run(run_dir: str | None) -> Path:
    """The folder asked for, or the only run that is alive. UsageError where there is none, or more than one."""
    if run_dir is not None:
        return Path(run_dir)
    runs = live_runs()
    if not runs:
        raise UsageError(
            "no run of yours is alive on this machine", "name the run folder: vime debug-attach stacks DIR"
        )
    if len(runs) > 1:
        listed = "\n".join(f"  {run}" for run in runs)
        raise UsageError(
            f"{len(runs)} runs of yours are alive on this machine, which one?\n{listed}", "name its folder"
        )
    return runs[0]


def family(members: Iterable[Member]) -> list[Member]:
    """``members`` of this machine with what they have started: engine cores, reward workers, forked children."""
    found = list(members)
    children = _children()
    for member in list(found):
        if not member.is_alive:
            continue
        below = children.get(member.pid, [])
        if member.role == "driver":  # its other children are Ray's own processes
            workers = [pid for pid in below if REWARD_WORKER in command_line(pid)]
            found += _named(workers, "reward worker", "reward worker", children)
        elif member.role == "engine":
            found += _named(below, "engine core", f"{member.name} core", children)
        else:
            found += _named(below, "child", f"child of {member.name}", children)
    return found


def _named(pids: Iterable[int], role: str, label: str, children: Mapping[int, list[int]]) -> Iterator[Member]:
    """Processes with the same parent, numbered where there are several, and all below them."""
    ordered = sorted(pids)
    for rank, pid in enumerate(ordered):
        own = label if len(ordered) == 1 else f"{label} {rank}"
        yield Member.here(role, rank, pid, label=own)
        yield from _named(children.get(pid, []), "child", f"child of {own}", children)


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def command_line(pid: int) -> str:
    """Empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def open_files(pid: int) -> list[Path]:
    """What the descriptors of a process point to; nothing where it is gone or another user's."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.append(Path(os.readlink(entry.path)))
    return found


def start_ticks(pid: int) -> int:
    """Clock ticks between the machine's start and that of the process; 0 where there is none, or a dead one."""
    fields = stat(pid)
    return 0 if fields[0] in "XZ" else int(fields[19])


@cache
def boot_id() -> str:
    """Names this start of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid in pids():
        found.setdefault(int(stat(pid)[1]), []).append(pid)
    return found


def stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` behind the name: state, parent, group, session, ... State X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0", "0", "0"]


def is_in_mask(pid: int, mask: str, signal: int) -> bool:
    """Whether a signal is in ``mask`` (SigCgt: caught, SigIgn: ignored) of a process; False where that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    found = next((int(line.split()[1], 16) for line in lines if line.startswith(f"{mask}:")), 0)
    return bool(found >> (signal - 1) & 1)
