"""Who is who in a run, and how long each of its phases may take: what ``vime.debug.watchdog`` needs to know."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from vime.config.schema import Config
from vime.debug.processes import FILE, Member, Roster
from vime.debug.stop.hold import held, note_run
from vime.debug.watchdog import UNUSUAL_SECONDS, Limit, Watchdog
from vime.log import Progress, answer_stack_requests
from vime.observe import Observer
from vime.rollout.groups import CANCEL_TIMEOUT_SECONDS
from vime.run_folder import RunFolder

GRACE_SECONDS = CANCEL_TIMEOUT_SECONDS + 5.0
"""After its own limit, how long a wait may take to come back."""


def watchdog(command: str, config: Config, folder: RunFolder, say: Progress) -> Watchdog:
    """The watchdog of a run, whose ``processes.json`` is written with this process as its driver."""
    answer_stack_requests()
    note_run(config, folder.path)
    roster = Roster(folder.path / FILE)
    roster.facts |= {"command": command, "name": config.run.name, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    roster.add([Member.here("driver")])
    unusual = held(UNUSUAL_SECONDS)
    return Watchdog(folder.path, say, roster, limits_of(config), unusual_seconds=unusual)


def limits_of(config: Config) -> dict[str, Limit]:
    """The limit of each phase of the loop. A driver that is still in one of the last two long after it is stuck."""
    step = Limit("train.step_timeout_seconds", config.train.step_timeout_seconds)
    found = dict.fromkeys(("log_probs", "train", "save", "load", "export"), step)
    found["sync"] = Limit("weights.timeout_seconds", config.weights.timeout_seconds)
    if config.needs_engines:
        seconds = config.rollout.timeout_seconds
        turn = config.weights.timeout_seconds + step.seconds if config.cluster.colocate else 0.0  # of the devices
        overdue = {"generate": seconds + turn, "eval": seconds * len(config.evaluation_sets)}
        for name, limit in overdue.items():
            found[name] = Limit("rollout.timeout_seconds", seconds, limit + GRACE_SECONDS)
    return found


def explaining(observer: Observer) -> AbstractContextManager[None]:
    """A limit that is reached inside is explained by the stacks of all processes, where the run has a watchdog."""
    return nullcontext() if observer.watchdog is None else observer.watchdog.explaining()
