"""Planted faults (``debug.inject``): known names, with a place in this run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from vime.align.faults import FAULTS, Fault, Place
from vime.config.load import Loaded, value_of
from vime.config.message import Finding

SURVIVES_A_SYNC = ("zero-rotary",)
"""Engine faults that no weight sync mends."""
REGENERATE = "replay --regenerate"
"""The command that asks engines what records hold."""
ALIGN_CHECK = "align-check"
AT_LEAST = re.compile(r"([\w.]+) >= (\d+)")


def faults(loaded: Loaded, command: str) -> tuple[list[str], list[str]]:
    """(problems, warnings): a fault that nothing would plant would pass for one that nobody caught."""
    problems, warnings = [], []
    for name in loaded.config.debug.inject:
        reasons = [_unknown(name)] if name not in FAULTS else list(_misplaced(loaded, command, name, FAULTS[name]))
        problems += [loaded.line(Finding("debug.inject", text)) for text in reasons]
        if not reasons:
            text = f"plants the fault {name}: {FAULTS[name].description}; the run is good for nothing else"
            warnings.append(loaded.line(Finding("debug.inject", text)))
    return problems, warnings


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, FAULTS, n=1, cutoff=0.5)
    nearest = f" (did you mean {near[0]}?)" if near else ""
    return f"{name!r} is no fault{nearest}; known: {', '.join(FAULTS)}"


def _misplaced(loaded: Loaded, command: str, name: str, fault: Fault) -> Iterator[str]:
    c = loaded.config
    if command == ALIGN_CHECK:
        return  # its bench knows what it can plant
    if fault.is_of_walk:
        yield f"{name} is planted by vime align-check alone"
    elif fault.place == Place.ENGINE:
        if not c.needs_engines:
            yield f"{name} is planted in the engines, and vime {command} starts none"
        elif c.rollout.engines:
            yield f"{name} is planted in engines of our own, and rollout.engines names somebody else's"
        elif c.needs_trainer and name not in SURVIVES_A_SYNC:
            yield f"{name} would be mended by the first weight sync of vime {command}; use vime rollout"
    elif fault.place == Place.PROMPTS:
        if not c.needs_engines or command == REGENERATE:
            yield f"{name} is planted in the rendering of prompts, and vime {command} reads none"
        elif not c.data.apply_chat_template:
            yield f"{name} needs data.apply_chat_template = true: no prompt is rendered"
    elif fault.place == Place.CHECKPOINT and not c.data.apply_chat_template:
        yield f"{name} needs data.apply_chat_template = true: without it no prompt has a marker"
    elif fault.place == Place.TRAINER:
        if not c.needs_trainer:
            yield f"{name} is planted in a trainer rank, and vime {command} starts none"
        elif (wanted := AT_LEAST.fullmatch(fault.needs)) and value_of(c, wanted[1]) < int(wanted[2]):
            yield f"{name} needs {fault.needs}"
