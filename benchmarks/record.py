"""The rollout record against upstream's debug dumps: written, read, sent through Ray, and its size."""

from __future__ import annotations

import tempfile

from benchmarks.measure import Goal, Result, Row, Spread, compare, interleave
from benchmarks.process import Side
from benchmarks.record_sides import Upstream

NUM_SAMPLES, LENGTH = 1024, 1500
MANY_SAMPLES, SHORT_LENGTH = 10_000, 300
RAY_WARMUPS = 16
"""Turns until the object store has used all of its memory once; pages that are new cost more than what is put there."""

FASTER = Goal(at_least=20.0)
SMALLER = Goal(at_most=0.7)


def run(repetitions: int, num_samples: int = NUM_SAMPLES, length: int = LENGTH) -> Result:
    result = Result("record")
    what = f"{num_samples} x {length} tokens"
    result.notes.append(
        "vime: read and write as a run does, with checksum, flush to the disk, rename and every check; upstream: "
        "torch.save of a list of dicts with Python lists of numbers, flushed to the disk, and torch.load; through Ray: "
        f"ray.get(ray.put(samples)) in one process, after {RAY_WARMUPS} turns that do not count"
    )
    with tempfile.TemporaryDirectory(prefix="vime-benchmark-") as folder:
        with (
            Side("benchmarks.record_sides:Vime", num_samples, length, folder) as vime,
            Side("benchmarks.record_sides:Upstream", num_samples, length, folder) as theirs,
        ):
            _compare(result, what, vime, theirs, repetitions)
        with Side("benchmarks.record_sides:Vime", MANY_SAMPLES, SHORT_LENGTH, folder) as many:
            seconds = interleave(
                {"write": lambda _: many.call("write"), "read": lambda _: many.call("read")}, repetitions
            )
            for name, values in seconds.items():
                what = f"{MANY_SAMPLES} x {SHORT_LENGTH} tokens: {name}"
                result.rows.append(Row(what, "s", Spread.of(values)))
    return result


def _compare(result: Result, what: str, vime: Side, theirs: Side, repetitions: int) -> None:
    for name, ours, other, warmups in (
        ("write", "write", "write", 1),
        ("read, against weights_only=True", "read", Upstream.read_safely.__name__, 1),
        ("read, against plain pickle", "read", Upstream.read_pickle.__name__, 1),
        ("through Ray", "through_ray", "through_ray", RAY_WARMUPS),
    ):
        sides = {"vime": lambda _, m=ours: vime.call(m), "upstream": lambda _, m=other: theirs.call(m)}
        found = interleave(sides, repetitions, warmups)
        rates = {side: [1 / seconds for seconds in values] for side, values in found.items()}
        result.rows.append(compare(f"{what}: {name}", "rollouts/s", rates["vime"], rates["upstream"], FASTER))
    sizes = [vime.call("size") / 1e6], [theirs.call("size") / 1e6]
    result.rows.append(compare(f"{what}: size on disk", "MB", *sizes, SMALLER))
