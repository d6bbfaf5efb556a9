"""How long the others wait for a process that has stopped: all of a debug run's limits that a stop can outlast.

``Spec.hold_seconds`` decides. The settings are raised once, where a command of vime begins, and config.toml keeps what
was asked for; constants go through ``held``; what libraries read from the environment is there already. Outside of a
debug run nothing is changed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.debug.stop.records import RUNNING, Stop, stops
from vime.debug.stop.registry import Registry, registry_here
from vime.debug.stop.spec import Spec, current
from vime.reward.breakpoints import held as held

if TYPE_CHECKING:
    from vime.config.load import Loaded
    from vime.config.schema import Config

NOTE, GROUP = "note/vime", "note/group"
"""In the registry, below the session, for ``vime.debug.attach.behind``: of a run of vime; of a stopped process, by its
key.
"""
SETTINGS = (
    "train.step_timeout_seconds",
    "rollout.timeout_seconds",
    "weights.timeout_seconds",
    "cluster.start_timeout_seconds",
    "reward.timeout_seconds",
)
"""Every wait of vime for another process, and with the first the collectives of torch and Megatron."""
LOOK_SECONDS, SETTLE_SECONDS = 0.5, 2.0


@dataclass(frozen=True)
class Raised:
    """One setting of a debug run. In seconds."""

    path: str
    was: float
    seconds: float


def raised(config: Config, spec: Spec | None = None) -> tuple[Config, list[Raised]]:
    """``config`` with time for stops, and what was changed. ``spec``: that of this process, unless given."""
    spec = spec or current()
    if spec is None:
        return config, []
    rows = [Raised(path, found, spec.hold_seconds) for path, found in limits(config).items()]
    rows = [row for row in rows if row.was < row.seconds]
    for row in rows:
        table, _, name = row.path.partition(".")
        section = getattr(config, table).model_copy(update={name: row.seconds})
        config = config.model_copy(update={table: section})
    return config, rows


def raised_run(loaded: Loaded) -> tuple[Loaded, str]:
    """The same of what a command was given, and a line that says so; "" where nothing was changed."""
    config, rows = raised(loaded.config)
    if not rows:
        return loaded, ""
    changes = ", ".join(f"{row.path} {row.was:g}" for row in rows)
    text = (
        f"debug run: the others wait up to {rows[0].seconds:g} s for a process that has stopped; raised from {changes}"
    )
    return replace(loaded, config=config, asked=loaded.asked or loaded.config), text


def limits(config: Config) -> dict[str, float]:
    """Seconds by setting."""
    found = {}
    for path in SETTINGS:
        table, _, name = path.partition(".")
        found[path] = float(getattr(getattr(config, table), name))
    return found


def note_run(config: Config, run_dir: Path) -> None:
    """The driver of a run of vime says what waits for what, and where the run writes."""
    spec = current()
    if spec is None:
        return
    facts: dict[str, Any] = {
        "run_dir": str(run_dir.absolute()),
        "trainers": config.parallel.world_size if config.needs_trainer else 0,
        "engines": config.rollout.num_engines if config.needs_engines and not config.rollout.engines else 0,
        "limits": limits(config),
    }
    registry_here(spec).put(f"{spec.session}/{NOTE}", facts)


def note_group(registry: Registry, stop: Stop) -> None:
    """A process that stops says how many others may wait for it in collectives, and how long they will."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    size, backend = int(distributed.get_world_size()), str(distributed.get_backend())
    seconds = distributed.group.WORLD._get_backend(distributed.group.WORLD._device_types[0]).options._timeout
    facts = {"size": size, "backend": backend, "seconds": seconds.total_seconds()}
    registry.put(f"{stop.session}/{GROUP}/{stop.key}", facts)


@contextmanager
def while_stopped(say: Callable[[str], None]) -> Iterator[None]:
    """Nothing is ended, for whatever reason the block is left, while somebody looks at a process of the run (D19).

    An interrupt is not held up, nor anything outside of a debug run; the wait is no longer than a stop may take.
    """
    try:
        yield
    except Exception as error:
        _wait(say, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        raise
    _wait(say, "")


def _wait(say: Callable[[str], None], why: str) -> None:
    spec = current()
    if spec is None or not _are_left(spec):
        return
    names = ", ".join(f"{stop.who} ({stop.key})" for stop in others(spec))
    say(f"the run ends{f' with {why}' if why else ''}, but not before these go on: {names}")
    deadline = time.monotonic() + spec.hold_seconds
    while others(spec) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def _are_left(spec: Spec) -> bool:
    """Of one that was let go on just now, that is noted a moment later."""
    end = time.monotonic() + SETTLE_SECONDS
    while (left := bool(others(spec))) and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
    return left


def others(spec: Spec) -> list[Stop]:
    """Processes of the debug run that have stopped, beside this one. Of other machines as they are noted."""
    found = stops(registry_here(spec), spec.session)
    return [
        stop
        for stop in found
        if stop.pid != os.getpid() and stop.state != RUNNING and (stop.member.is_alive or not stop.member.is_here)
    ]
