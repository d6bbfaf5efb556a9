"""Planted faults (``debug.inject``): known names, with a place in this run."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from vime.align.faults import FAULTS, Fault, Place, unmet
from vime.config.load import Loaded
from vime.config.message import Finding
from vime.config.schema import Config
from vime.models import ModelSpec

SURVIVES_A_SYNC = ("zero-rotary",)
"""Engine faults that no weight sync mends."""
REGENERATE = "replay --regenerate"
"""The command that asks engines what records hold."""
ALIGN_CHECK = "align-check"


def faults(loaded: Loaded, command: str, spec: ModelSpec | None = None) -> tuple[list[str], list[str]]:
    """(problems, warnings): a fault that nothing would plant would pass for one that nobody caught."""
    problems, warnings = [], []
    asked = loaded.config.debug.inject
    if twice := sorted({name for name in asked if asked.count(name) > 1}):
        problems.append(loaded.line(Finding("debug.inject", f"{twice[0]} stands there twice")))
    for name in dict.fromkeys(asked):
        reasons = (
            [_unknown(name)] if name not in FAULTS else list(_misplaced(loaded, command, name, FAULTS[name], spec))
        )
        problems += [loaded.line(Finding("debug.inject", text)) for text in reasons]
        if not reasons:
            text = f"plants the fault {name}: {FAULTS[name].description}; the run is good for nothing else"
            warnings.append(loaded.line(Finding("debug.inject", text)))
    return problems, warnings


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, FAULTS, n=1, cutoff=0.5)
    nearest = f" (did you mean {near[0]}?)" if near else ""
    return f"{name!r} is no fault{nearest}; known: {', '.join(FAULTS)}"


def _misplaced_in_walk(c: Config, name: str, fault: Fault, spec: ModelSpec | None) -> Iterator[str]:
    """What can be known of it; what else a fault takes, the bench knows."""
    if reason := unmet(name, c):
        yield reason
    elif fault.needs == "experts" and spec is not None and not spec.is_moe:
        yield f"{name} needs a mixture of experts, and {c.model.path} is none"
    elif fault.needs == "float32" and c.model.dtype != "float32":
        yield f"{name} needs model.dtype = float32: nothing else is rounded"
    elif fault.place in (Place.PROMPTS, Place.CHECKPOINT) and not c.data.apply_chat_template:
        yield f"{name} needs data.apply_chat_template = true: no prompt is rendered"
    elif not c.needs_engines and fault.place in (Place.ENGINE, Place.SYNC, Place.ANSWERS, Place.PROMPTS):
        yield f"{name} is planted where engines take part, and a walk over records starts none"


def _misplaced(loaded: Loaded, command: str, name: str, fault: Fault, spec: ModelSpec | None) -> Iterator[str]:
    c = loaded.config
    if command == ALIGN_CHECK:
        yield from _misplaced_in_walk(c, name, fault, spec)
        return
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
        elif reason := unmet(name, c):
            yield reason
