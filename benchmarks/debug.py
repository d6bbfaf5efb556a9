"""What a debug run costs before anything is stopped: a hot Python function, and the steps of a small training run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.cases import TINY, Case
from benchmarks.command import train
from benchmarks.measure import Goal, Result, compare, interleave
from vime.debug.launch.environment import of_a_process
from vime.debug.stop.spec import Point, Spec, Who
from vime.errors import VimeError

NUM_CALLS = 1_000_000
LIMIT_SECONDS = 300.0
PROGRAM = f"""\
import sys, time

def work(i):
    twice = 2 * i
    if twice < 0:
        twice = -twice
    return twice + 1

def run(number):
    for i in range(number):
        work(i)

run(10)  # a point that stops once has done so
began = time.perf_counter()
run({NUM_CALLS})
print(time.perf_counter() - began, sys.gettrace() is None)
"""
ENTRY_LINE, UNTAKEN_LINE = 4, 6
NOT_REACHED = (
    "vime.runs:replay",
    "vime.backends.megatron.step:_report_lost",
    "vllm.v1.engine.core:EngineCore.abort_requests",
)
"""Functions that the run does not call, in files that it loads in driver, trainer and engine core."""


@dataclass(frozen=True)
class Side:
    """A point of the function. ``goal``: of its time over that without any point."""

    title: str
    line: int
    condition: str = ""
    who: Who = field(default_factory=Who)
    goal: Goal | None = None


SIDES = {
    "untaken": Side("a point on a branch that is not taken", UNTAKEN_LINE, goal=Goal(at_most=1.1)),
    "other": Side("a point for another rank", ENTRY_LINE, who=Who(ranks=(7,))),
    "done": Side("a point that has stopped once and is over", ENTRY_LINE),
    "condition": Side("a point with a condition that is false", ENTRY_LINE, condition="i < 0"),
}


def run(repetitions: int, cases: Sequence[Case] = (TINY,)) -> Result:
    result = Result("debug")
    result.notes.append(
        f"{NUM_CALLS:,} calls of a Python function of four lines, each side in a process of its own, without and with "
        "a point; the one that is over was stopped for a moment, and nobody attached: no tracing is left"
    )
    with tempfile.TemporaryDirectory(prefix="vime-benchmark-") as scratch:
        _function(Path(scratch), repetitions, result)
    result.notes.append(
        f"step: perf/step_time of `vime train` under `vime debug-attach run` with {len(NOT_REACHED)} points that are "
        "not reached, over the same without; the first rollout left out"
    )
    points = [word for point in NOT_REACHED for word in ("-b", point)]
    asked = ["debug-attach", "run", "--local", *points, "--", "vime"]
    for case in cases:
        steps = [f"run.num_rollouts={repetitions + 1}"]
        debugged, plain = (
            [row["perf/step_time"] for row in train(case, steps, before).rows[1:]] for before in (asked, [])
        )
        result.rows.append(compare(f"{case.name}: step", "s", debugged, plain, Goal(at_most=1.05)))
    return result


def _function(scratch: Path, repetitions: int, result: Result) -> None:
    file = scratch / "work.py"
    file.write_text(PROGRAM, encoding="utf-8")
    calls = {name: partial(_seconds, file, side) for name, side in SIDES.items()}
    found = interleave({"plain": lambda turn: _seconds(file, None, turn), **calls}, repetitions)
    for name, side in SIDES.items():
        times = [value / NUM_CALLS * 1e9 for value in found[name]]
        against = [value / NUM_CALLS * 1e9 for value in found["plain"]]
        result.rows.append(compare(side.title, "ns/call", times, against, side.goal))


def _seconds(file: Path, side: Side | None, turn: int) -> float:
    """Of one process. VimeError where it fails, or where tracing is still on at its end."""
    environment = dict(os.environ)
    if side is not None:
        point = Point("p0", "work.py", str(file), side.line, condition=side.condition, who=side.who)
        folder = str(file.parent / f"registry-{turn}")
        spec = Spec("d-benchmark", (point,), wait_seconds=0.1, working_dir=str(file.parent), folder=folder)
        environment = of_a_process(os.environ, spec, has_rays_post_mortem=False).value
    runner = ["-m", "vime.debug.stop.runner"] if side is not None else []
    command = [sys.executable, *runner, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if done.returncode != 0:
        raise VimeError(f"{' '.join(command)}: exit code {done.returncode}:\n{done.stderr}")
    seconds, is_untraced = done.stdout.split()
    has_stopped = "stopped at" in done.stderr
    if is_untraced != "True" or has_stopped != (side is not None and side is SIDES["done"]):
        raise VimeError(f"{side}: {json.dumps([done.stdout, done.stderr])}")
    return float(seconds)
