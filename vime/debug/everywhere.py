"""The stacks of all processes of a run, also on other nodes of its cluster, and what they say."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vime.debug import places
from vime.debug.processes import Member, family
from vime.debug.stacks import MAIN, Dump, Frame, Thread, as_dict, dump_all, from_dict, in_full
from vime.errors import first_line

REMOTE_SECONDS = 60.0
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Picture:
    """Where every process of a run is, in the order of the roster."""

    dumps: tuple[Dump, ...]

    @property
    def culprit(self) -> str:
        """One sentence on the process that the others wait for; "" where the stacks single out none."""
        return places.culprit(self.dumps)

    def with_main(self, role: str, frames: tuple[Frame, ...]) -> Picture:
        """With other frames of the main thread, the innermost first, of the processes with this role."""
        main = Thread(MAIN, frames)
        changed = {d.who: replace(d, threads=(main, *d.threads[1:])) for d in self.dumps if d.who.role == role}
        return Picture(tuple(changed.get(d.who, d) for d in self.dumps))

    def short_lines(self) -> list[str]:
        """Processes that stand alike together, the odd one first."""
        return places.short_lines(places.groups_of(self.dumps))

    def in_full(self) -> str:
        return "\n".join([self.culprit, *self.short_lines(), "", in_full(self.dumps)]).lstrip("\n")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        groups = [
            {"processes": g.names, "at": g.problem or str(g.place), "num_other_threads": g.num_hidden}
            for g in places.groups_of(self.dumps)
        ]
        return {"culprit": self.culprit, "groups": groups, "processes": [as_dict(d) for d in self.dumps]}


def look(members: Sequence[Member], facts: Mapping[str, Any], native: bool = False) -> Picture:
    """Where all processes are: those of this machine with their children, the others through Ray. Bounded in time."""
    here = [m for m in members if m.is_here]
    away = [m for m in members if not m.is_here]
    dumps = dump_all(family(here), native)
    if away:
        dumps += _look_away(away, facts, native)
    return Picture(tuple(dumps))


def look_here(rows: Iterable[dict[str, Any]], native: bool) -> list[dict[str, Any]]:
    """On another node: the stacks of processes there and of their children, as plain data."""
    return [as_dict(found) for found in dump_all(family([Member(**row) for row in rows]), native)]


def _look_away(members: Sequence[Member], facts: Mapping[str, Any], native: bool) -> list[Dump]:
    """A task per node, over the connection that this process has, or one to the run's own cluster."""
    if _is_connected():
        return _ask_nodes(members, native)
    address = facts.get("ray_address")
    if not address:
        return [Dump(m, problem=f"not reached: it runs on {m.host}") for m in members]
    import ray

    try:
        host, _, port = str(address).removeprefix("ray://").rpartition(":")
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()  # Ray itself would try for minutes
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ray.exceptions.RayError, RuntimeError, ValueError) as error:
        why = f"no connection to {address}: {first_line(error)}"
        return [Dump(m, problem=f"not reached: it runs on {m.host}, and {why}") for m in members]
    try:
        return _ask_nodes(members, native)
    finally:
        ray.shutdown()


def _is_connected() -> bool:
    """Whether this process has a part in a cluster. Where ray is not imported yet it stays so: a session that comes
    later sets what ray reads on import.
    """
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def call_on(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """Reference to what ``function`` will answer there: a task that needs no CPU, and is tried once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
    return ray.remote(function).options(**options).remote(*args)


def _ask_nodes(members: Sequence[Member], native: bool) -> list[Dump]:
    import ray

    asked = {}
    for node in sorted({m.node for m in members if m.node}):
        rows = [vars(m) for m in members if m.node == node]
        asked[node] = call_on(node, look_here, rows, native)
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=REMOTE_SECONDS)
    found = [Dump(m, problem=f"not reached: it runs on {m.host}") for m in members if not m.node]
    for node, answer in asked.items():
        on_node = [m for m in members if m.node == node]
        if answer not in done:
            found += [Dump(m, problem=f"not reached: {m.host} had no answer in {REMOTE_SECONDS:g} s") for m in on_node]
            continue
        try:
            found += [from_dict(row) for row in ray.get(answer)]
        except ray.exceptions.RayError as error:
            found += [Dump(m, problem=f"not reached: on {m.host}: {first_line(error)}") for m in on_node]
    return found


def this_node() -> str:
    """Ray's id of this node; "" where this process has no part in a cluster."""
    return sys.modules["ray"].get_runtime_context().get_node_id() if _is_connected() else ""
