"""Times and files as messages say them."""

from __future__ import annotations

import os
import time


def short_path(file: str) -> str:
    """Relative to the current folder where it lies below it."""
    folder = os.getcwd()
    return os.path.relpath(file, folder) if file.startswith(folder + os.sep) else file


def span(seconds: float) -> str:
    """9.4 -> "9 s", 560 -> "9 min 20 s", 7300 -> "2 h 1 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def short(seconds: float) -> str:
    """For a table: 9.4 -> "9s", 560 -> "9m20s", 7300 -> "2h1m"."""
    return span(seconds).replace(" min", "m").replace(" ", "")


def clock(moment: float) -> str:
    """Local date and time to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
