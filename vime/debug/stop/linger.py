"""A main program that has ended stays while something of its debug run is stopped: its end would end that as well."""

from __future__ import annotations

import os
import sys
import time

from vime.debug.stop.records import RUNNING, Stop, stops
from vime.debug.stop.registry import Registry, registry_here
from vime.debug.stop.say import say
from vime.debug.stop.spec import Spec
from vime.debug.stop.targets import spec_here
from vime.errors import VimeError

STARTED_SECONDS = 60.0
"""How long tasks that were started and not waited for may take to reach a point."""
POLL_SECONDS = 0.5
ENDING = "note/ending"
"""In the registry, below the session: the debug run is being ended, nothing waits for anything any more."""


def linger() -> None:
    """Return when nothing of the debug run is stopped any more, or its limit is over."""
    spec = spec_here()
    if spec is None or not (spec.points or spec.post_mortem):
        return
    try:
        registry = registry_here(spec)
        if registry.get(f"{spec.session}/{ENDING}") is not None:
            return
        _wait_for_started(registry, spec)
        _wait_for_stopped(registry, spec)
    except VimeError as error:
        say(f"the main program ends; whether something is still stopped is not known: {error.message}")


def _wait_for_started(registry: Registry, spec: Spec) -> None:
    """Tasks of Ray's that nobody waits for would end with the driver, before they have reached anything."""
    end, is_told = time.monotonic() + min(STARTED_SECONDS, spec.wait_seconds), False
    while (number := _num_started()) and not _held(registry, spec) and time.monotonic() < end:
        if not is_told:
            is_told = True
            say(
                f"the main program has ended; it stays for up to {end - time.monotonic():.0f} s, because {number} "
                "task(s) that it has started have not ended and may reach a point"
            )
        time.sleep(POLL_SECONDS)


def _wait_for_stopped(registry: Registry, spec: Spec) -> None:
    end, told = time.monotonic() + spec.wait_seconds, set[str]()
    while (held := _held(registry, spec)) and time.monotonic() < end:
        for stop in held:
            if stop.key not in told:
                told.add(stop.key)
                say(f"the main program has ended; it stays until {stop.key} ({stop.who}, {stop.state}) goes on")
        time.sleep(POLL_SECONDS)


def _held(registry: Registry, spec: Spec) -> list[Stop]:
    """What is stopped and would be lost, or is gone already and cannot be told from here."""
    if registry.get(f"{spec.session}/{ENDING}") is not None:
        return []
    return [s for s in stops(registry, spec.session) if s.state != RUNNING and not _is_over(s)]


def _is_over(stop: Stop) -> bool:
    """Of this machine: whether the process has gone. A main thread that gets here is not stopped."""
    if stop.pid == os.getpid() and stop.thread == "MainThread":
        return True
    return stop.member.is_here and not stop.member.is_alive


def _num_started() -> int:
    """Tasks of this driver that have not ended."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 0
    worker = ray._private.worker.global_worker
    return len(worker.core_worker.get_pending_children_task_ids(worker.current_task_id))
