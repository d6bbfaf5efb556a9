"""Seconds from ``vime train`` to the end of the first optimizer step, and where they go."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import TINY, Case
from benchmarks.command import Trained, train
from benchmarks.measure import Result, Row, Spread

STEPS = {
    "command line, configuration, imports, Ray": "private Ray cluster at",
    "trainer": "trainer:",
    "engine (beside the trainer)": "engines:",
    "prompts, reward worker, first weight sync": "weights v0",
    "first rollout, log-probs, first optimizer step": "weights v1",
}
"""What comes up -> the first line of ``vime train`` that says it has."""


def run(repetitions: int, cases: Sequence[Case] = (TINY,)) -> Result:
    result = Result("start")
    result.notes.append("each part: seconds after the part before it was up; the sync after the step is left out")
    result.notes.append(bytecode())
    for case in cases:
        runs = [parts(train(case, ["run.num_rollouts=1"])) for _ in range(repetitions)]
        total = Spread.of([sum(found.values()) for found in runs])
        result.rows.append(Row(f"{case.name}: vime train to first optimizer step done", "s", total))
        for name in STEPS:
            seconds = Spread.of([found[name] for found in runs])
            share = Spread.of([found[name] / sum(found.values()) for found in runs])
            result.rows.append(Row(f"{case.name}: {name}", "s", seconds, total, share))
    return result


def parts(trained: Trained) -> dict[str, float]:
    """Seconds of each part, in the order of ``STEPS``."""
    marks = [trained.first(text) for text in STEPS.values()]
    marks[-1] -= trained.rows[0]["perf/sync_time"]
    return dict(zip(STEPS, (b - a for a, b in zip([0.0, *marks], marks, strict=False)), strict=True))


def bytecode() -> str:
    """Whether Python finds the libraries compiled. If not, that is most of a start."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    if Path(importlib.util.cache_from_source(spec.origin)).exists():
        return "the bytecode of the libraries is on disk"
    keeps = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "nothing has written it yet"
    return (
        f"the bytecode of the libraries is not on disk ({keeps}): every process compiles what it imports; "
        f"`{sys.executable} -m compileall -q -j 2 {Path(spec.origin).parents[1]}` writes it once"
    )
