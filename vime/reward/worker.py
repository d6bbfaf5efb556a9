"""The process that runs a reward function: started by ``vime.reward.pool``.

It answers one message with one message and ends when its parent's pipe closes. A separate process, because only that
can be ended whatever the function does: a loop in C, a blocked signal, an exit, a crash.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from vime.config import schema
from vime.errors import UsageError
from vime.forks import die_with_parent
from vime.log import answer_stack_requests
from vime.reward import registry
from vime.reward.breakpoints import DEBUG_SPEC, Ignored, held, ignore
from vime.reward.function import add_import_paths
from vime.reward.role import introduce
from vime.types import Sample

START_TIMEOUT_SECONDS = 120.0
GRACE_SECONDS = 5.0
WORKER = "reward worker"
on_error: list[Callable[[BaseException], object]] = []
"""Called with what a function has raised, before that is answered: a debug run may stop there."""


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a worker."""

    config: schema.Reward
    import_paths: tuple[str, ...]
    ignored: Ignored


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a call, or to Start: values with their extra metrics, or what went wrong in one line."""

    values: tuple[tuple[float, dict[str, Any]], ...] = ()
    problem: str | None = None
    index: int = 0  # which sample of the call the problem is about


def main(read_fd: int, write_fd: int, rank: int = 0) -> None:
    """Serve until the parent goes away. ``rank``: its place among the workers."""
    introduce(WORKER, rank)
    if os.environ.get(DEBUG_SPEC):
        die_with_parent()  # its limits are those of a stop: hours
    answer_stack_requests()
    requests, replies = Connection(read_fd, writable=False), Connection(write_fd, readable=False)
    start: Start = pickle.loads(requests.recv_bytes())
    add_import_paths(start.import_paths)
    ignore(Ignored((*start.ignored.calls, "pdb.set_trace"), start.ignored.places))  # nobody is at its standard input
    end_after(held(START_TIMEOUT_SECONDS) + GRACE_SECONDS)
    try:
        score = registry.make(start.config)
    except UsageError as error:
        replies.send_bytes(pickle.dumps(Reply(problem=error.message)))
        return
    replies.send_bytes(pickle.dumps(Reply()))
    end_after(0.0)
    while True:
        try:
            samples = pickle.loads(requests.recv_bytes())
        except EOFError:
            return
        end_after(start.config.timeout_seconds + GRACE_SECONDS)
        reply = answer(score, samples, start.config.per_group)
        end_after(0.0)
        replies.send_bytes(pickle.dumps(reply))


def end_after(seconds: float) -> None:
    """Let the kernel end this process after ``seconds`` (0: never).

    The parent does so sooner; if it is gone and the function hangs, nobody else is left to do it.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def answer(score: registry.Score, samples: Sequence[Sample], per_group: bool) -> Reply:
    """Call the function and check what it returns; whatever it raises becomes the problem."""
    try:
        results = score(list(samples)) if per_group else [score(samples[0])]
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt of a user's function as well
        for hear in on_error:
            hear(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        return Reply(problem=f"raised {type(error).__name__}: {error} ({place})")
    if per_group and (not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(samples)):
        size = f"{len(results)} values" if isinstance(results, Sequence) else f"a {type(results).__name__}"
        return Reply(problem=f"returned {size}, expected a list of {len(samples)} rewards, one per sample of the group")
    values = []
    for index, result in enumerate(results):
        value, extras, problem = number_of(result)
        if problem:
            return Reply(problem=problem, index=index)
        values.append((value, extras))
    return Reply(values=tuple(values))


def number_of(result: Any) -> tuple[float, dict[str, Any], str | None]:
    """(reward, extra metrics, problem) of what a reward function returned for one sample."""
    extras: dict[str, Any] = {}
    if isinstance(result, dict):
        if "reward" not in result:
            return 0.0, extras, f"returned a dict without the key 'reward' (keys: {', '.join(map(str, result))})"
        extras = {str(k): v for k, v in result.items() if k != "reward"}
        result = result["reward"]
    if hasattr(result, "item") and getattr(result, "ndim", 1) == 0:  # numpy and torch scalars
        result = result.item()
    if not isinstance(result, int | float):
        return 0.0, extras, f"returned {result!r:.60} ({type(result).__name__}), expected a finite number"
    if not math.isfinite(result):
        return 0.0, extras, f"returned {result}, expected a finite number"
    return float(result), extras, None
