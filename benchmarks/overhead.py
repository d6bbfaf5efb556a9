"""The share of a step in which nothing is generated, scored or trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.cases import QUICKSTART, Case
from benchmarks.command import train
from benchmarks.measure import Goal, Result, Row, Spread

GOAL = Goal(at_most=0.02)


def run(repetitions: int, cases: Sequence[Case] = (QUICKSTART,)) -> Result:
    result = Result("overhead")
    result.notes.append(
        "one `vime train`, its first rollout left out; per rollout, from metrics.jsonl: other = perf/other_time / "
        "perf/step_time, where perf/other_time = perf/step_time - generate - log_probs - train - sync; "
        "sync = perf/sync_time / perf/step_time. The phases are timed in the driver, so each holds its own remote calls"
    )
    for case in cases:
        rows = train(case, [f"run.num_rollouts={repetitions + 1}", "parallel.dp=1"]).rows[1:]
        result.rows += [
            share(case, rows, "other_time", GOAL),
            share(case, rows, "sync_time", None),
        ]
    return result


def share(case: Case, rows: Sequence[Mapping[str, float]], part: str, goal: Goal | None) -> Row:
    """``perf/<part>`` over ``perf/step_time``, rollout by rollout."""
    parts = [row[f"perf/{part}"] for row in rows]
    steps = [row["perf/step_time"] for row in rows]
    ratio = Spread.of([a / b for a, b in zip(parts, steps, strict=True)])
    return Row(f"{case.name}: perf/{part} of perf/step_time", "s", Spread.of(parts), Spread.of(steps), ratio, goal)
