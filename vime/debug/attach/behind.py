"""Who waits behind the processes that have stopped, and how long until the first of them gives up.

Of a run of vime its driver has noted how many processes there are and which limits are in force; of another program the
stopped process has noted its group of torch.distributed. What neither says is not known, and that is said.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vime.debug.attach.sessions import members_of
from vime.debug.attach.words import span
from vime.debug.stop.hold import GROUP, NOTE
from vime.debug.stop.records import Stop
from vime.debug.stop.registry import FolderRegistry, Registry

POST_MORTEM = "post-mortem"
OF_ROLE = {
    "trainer": ("train.step_timeout_seconds", "weights.timeout_seconds"),
    "engine": ("rollout.timeout_seconds", "weights.timeout_seconds"),
    "engine core": ("rollout.timeout_seconds", "weights.timeout_seconds"),
    "reward worker": ("reward.timeout_seconds", "rollout.timeout_seconds"),
}
"""Which of vime's limits may run out while a process of this role has stopped."""


def behind(stops: Sequence[Stop], registry: Registry, now: float | None = None) -> list[str]:
    """One line per role that has stopped, in the order of ``stops``; none where nothing has. A limit counts from the
    start of a wait, which was before the stop: what is left is said as a bound.
    """
    moment = time.time() if now is None else now
    if not stops:
        return []
    facts = registry.get(f"{stops[0].session}/{NOTE}")
    lines = [_vime(found, facts, moment) if facts else _group(found, registry, moment) for found in _by_role(stops)]
    return [line for line in lines if line]


def _by_role(stops: Sequence[Stop]) -> list[list[Stop]]:
    roles = dict.fromkeys(stop.role for stop in stops)
    return [[stop for stop in stops if stop.role == role] for role in roles]


def _vime(stops: Sequence[Stop], facts: Mapping[str, Any], now: float) -> str:
    """Of a run of vime. The driver calls all the others, so that whoever is not called does not wait."""
    role, names = stops[0].role, _names(stops)
    if role == "driver":
        count = facts["trainers"] + facts["engines"]
        if count == 0 or all(stop.point == POST_MORTEM for stop in stops):
            return f"nothing waits for {names}" + ("" if count == 0 else ": the rest of its run has ended")
        return f"{_count(count, 'process', 'processes')} of the run wait for {names}: without a time-out"
    who = "the driver"
    if role == "trainer":
        others = facts["trainers"] - len({stop.rank for stop in stops})
        who = f"at most {_count(others, 'trainer rank')} and the driver" if others else who
    left = [(seconds - (now - _first(stops)), name) for name, seconds in facts["limits"].items() if name in _of(role)]
    if not left:
        return f"who waits for {names} is not known"
    seconds, name = min(left)
    wait = "waits" if who == "the driver" else "wait"
    return f"{who} {wait} for {names}; smallest time-out: {name}, at most {span(max(0.0, seconds))} left"


def _of(role: str) -> tuple[str, ...]:
    return OF_ROLE.get(role, ())


def _group(stops: Sequence[Stop], registry: Registry, now: float) -> str:
    """Of a program that is not vime's; "" for one that has no other process."""
    names = _names(stops)
    found = [registry.get(f"{stop.session}/{GROUP}/{stop.key}") for stop in stops]
    groups = [facts for facts in found if facts is not None]
    if not groups and isinstance(registry, FolderRegistry) and members_of(stops[0].session) == [stops[0].pid]:
        return ""
    if not groups:
        return f"who waits for {names} is not known: it has no group of torch.distributed"
    others = max(facts["size"] for facts in groups) - len(stops)
    if others <= 0:
        return f"no other rank waits for {names}"
    left = min(facts["seconds"] for facts in groups) - (now - _first(stops))
    who = f"at most {_count(others, 'rank')} {'waits' if others == 1 else 'wait'} for {names} in collectives"
    return f"{who}; time-out of the group ({groups[0]['backend']}): at most {span(max(0.0, left))} left"


def _names(stops: Sequence[Stop]) -> str:
    return ", ".join(dict.fromkeys(stop.who for stop in stops))


def _first(stops: Sequence[Stop]) -> float:
    return min(stop.since for stop in stops)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
