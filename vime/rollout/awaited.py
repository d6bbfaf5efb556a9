"""Where asynchronous code of the user waits: what no stack shows, since a coroutine that waits is on none."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Collection
from typing import Any

from vime.reward.function import is_users

Where = tuple[str, int, str]
"""(file, line, function)."""


def awaited(tasks: Collection[asyncio.Task[Any]], everything: Collection[asyncio.Task[Any]]) -> str:
    """ "gen.py:12 solve (3 times)": where most of ``tasks`` wait, or the tasks that they have started; "" outside of
    the user's code. ``everything``: all tasks of the loop.
    """
    waiting = [task for task in everything if not task.done() and task is not _current()]
    started = [task for task in waiting if task not in tasks]
    ends = Counter(end for task in started or tasks if (end := _innermost(task)) is not None and is_users(end[0]))
    if not ends:
        return ""
    (file, line, function), count = ends.most_common(1)[0]
    return f"{os.path.basename(file)}:{line} {function}" + (f" ({count} times)" if count > 1 else "")


def _innermost(task: asyncio.Task[Any]) -> Where | None:
    """The last coroutine in the chain of those that wait for one another."""
    found: Where | None = None
    at: Any = task.get_coro()
    while (frame := getattr(at, "cr_frame", None)) is not None:
        if os.path.basename(os.path.dirname(frame.f_code.co_filename)) != "asyncio":  # asyncio.sleep and its like
            found = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        at = at.cr_await
    return found


def _current() -> asyncio.Task[Any] | None:
    """The task that asks; none outside of a loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
