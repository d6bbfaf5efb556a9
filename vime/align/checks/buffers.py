"""Do buffers that no checkpoint carries survive sleep and wake? Digests at the start, after each, and after a sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vime.align.bench import Bench
from vime.align.walk import Check
from vime.errors import VimeError
from vime.types import CheckResult, Verdict

NAME = "buffers"
LIMIT = "every digest as at the start; no generation between a level-2 sleep and the next sync"
WHERE = "before any sleep"
GENERATES = "the engine generates between a level-2 sleep and the next sync"
Buffers = Mapping[str, list[list[str]]]


def run(bench: Bench) -> CheckResult:
    """Sleep levels 1 (weights kept aside) and 2 (weights dropped), as colocated runs use them; then a sync.

    Where the first sync did not carry every tensor nothing would bring all weights back, so level 2 is left out.
    """
    can_sync = _can_sync(bench)
    lines: list[str] = []
    lost = _lost(bench, WHERE, lines)
    for level in (1, 2) if can_sync else (1,):
        if not lost:
            lost = _slept(bench, level, lines)
    numbers: dict[str, Any] = {"lost": lost, "levels": [1, 2] if can_sync else [1]}
    if not can_sync:
        lines.append("level 2 not tried: a sync does not bring all weights back, see the check weights")
    if not lost:
        levels = "levels 1 and 2" if can_sync else "level 1"
        measured = f"no buffer changed over sleep and wake at {levels}"
        return CheckResult(NAME, Verdict.PASS, measured, LIMIT, tuple(lines), numbers=numbers)
    return CheckResult(NAME, Verdict.FAIL, "; ".join(lost), LIMIT, tuple(lines), *_cause(lost[0]), numbers=numbers)


def _cause(first: str) -> tuple[str, str]:
    """Likely cause and next step of what went wrong first."""
    if first.startswith(GENERATES):
        return (
            "the engine does not know that its weights are gone (case W21)",
            "cluster.colocate=false keeps engines awake until that is mended",
        )
    if f"{WHERE}: " in first:
        return (
            "a buffer is not what it was when the engine started, and no sleep came between: something writes to it",
            "restart the engine; vime align-check RUN.toml --bisect names the first operation that it spoils",
        )
    return (
        "a buffer lost its values, and neither checkpoint nor weight sync carries it (case W14)",
        "vLLM's sleep keeps registered buffers alone: register_buffer in the model; cluster.colocate=false shows if "
        "the release is the cause",
    )


def _can_sync(bench: Bench) -> bool:
    try:
        sent = bench.synced.tensors.keys()
        received = [sides[0] for sides in bench.engine.manifests().values()]
    except VimeError:  # the finding of the check weights
        return False
    return all(sent <= each.tensors.keys() for each in received)


def _slept(bench: Bench, level: int, lines: list[str]) -> list[str]:
    """Sleep, wake, and for level 2 a sync; returns what went wrong, in words."""
    engine = bench.engine
    wrong: list[str] = []
    engine.sleep(level)
    try:
        engine.wake()
    except VimeError as error:
        lines.append(f"level {level}, wake: {error.message.splitlines()[0]}")
        wrong.append(f"the engine refuses to wake from level {level}")
    wrong += _lost(bench, f"after sleep level {level} and wake", lines)
    if level == 2 and not wrong:
        wrong += _refuses(bench, lines)
    if level == 2:
        try:
            bench.sync()
        except VimeError as error:
            lines.append(f"sync after level {level}: {error.message.splitlines()[0]}")
            wrong.append(f"no sync after sleep level {level}")
        else:
            wrong += [] if wrong else _lost(bench, "after the sync that follows", lines)
    return wrong


def _lost(bench: Bench, when: str, lines: list[str]) -> list[str]:
    found: Buffers = bench.engine.changed_buffers()
    lost = [
        f"{name} ({engine}, rank {rank})"
        for engine, ranks in found.items()
        for rank, names in enumerate(ranks)
        for name in names
    ]
    lines.append(f"{when}: {', '.join(lost) + ' changed' if lost else 'all as at the start'}")
    many = "buffer" if len(lost) == 1 else "buffers"
    return [f"{len(lost)} {many} changed {when}: {', '.join(lost[:4])}"] if lost else []


def _refuses(bench: Bench, lines: list[str]) -> list[str]:
    """Between waking from level 2 and the sync the weights are unset: nothing may be generated (case W21)."""
    answer = _answer(lambda: bench.engine.score([np.array([0, 1], np.int32)]))
    lines.append(f"after level 2, before the sync: {answer or 'the engine generates'}")
    return [] if answer else [f"{GENERATES}, with lost weights"]


def _answer(ask: Callable[[], object]) -> str:
    """How the engine refuses; empty where it does not."""
    try:
        ask()
    except VimeError as error:
        return f"refused: {error.message.splitlines()[0]}"
    return ""


CHECK = Check(
    NAME,
    "4",
    "the engine's own buffers survive sleep and wake",
    "first step, 1: special buffers of vLLM may be released with the memory",
    run,
    is_live=True,
)
