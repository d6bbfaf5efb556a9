"""Memory of every process over several rounds: what grows at every step, and which rank holds more than its like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vime.align.bench import Bench, Learned
from vime.align.memory_ledger import Ledger
from vime.align.plots import steps
from vime.align.rounds import generate, memory_of, part_of
from vime.align.walk import Check
from vime.errors import CheckFailed
from vime.types import CheckResult, RolloutBatch, Verdict

NAME = "memory"
MB = 1 << 20
WARM_UP, ROUNDS = 2, 6
"""Short rounds before those that count (buffers that are made once, allocators that find their size), and those."""
SHORT_TOKENS, SHORT_RESPONSE = 512, 16
"""Of a short round: growth per step does not depend on the size of the step."""
GROWTH = 8 * MB
"""Bytes per round and process. Measured, clean, tiny model on a CPU: trainer ranks 0.04 to 0.28 MB, engines 0.3 to 1 MB
a round, from allocators that still find their size; a leak of 20 MB a step shows as 20 MB."""
SKEW_SHARE, SKEW = 1.25, 64 * MB
"""A rank that holds over a quarter and 64 MB more than another of its kind."""
LIMIT = f"growth {GROWTH / MB:.2g} MB a round; ranks of a kind within x {SKEW_SHARE:g}, or {SKEW // MB} MB"


def run(bench: Bench) -> CheckResult:
    first, second = bench.first, bench.second
    short = Ledger(list(_short_rounds(bench, second)))
    counted = Ledger(short.rounds[WARM_UP:])
    growth = counted.growing()
    whole = Ledger([first.memory, second.memory, *short.rounds])
    numbers = _numbers(whole, growth)
    shown = (*_sizes(whole), *(f"{p}, {k}: {g / MB:+.2f} MB a round" for (p, k), g in growth.items()))
    if max(growth.values(), default=0.0) > GROWTH:
        return replace(_grown(counted, growth, shown), numbers=numbers)
    most = max(growth.values(), default=0.0)
    measured = f"no out-of-memory in {len(whole.rounds)} rounds; largest growth {most / MB:.2f} MB a round"
    skewed = list(_skewed(bench, whole))
    if not skewed:
        return CheckResult(NAME, Verdict.PASS, measured, LIMIT, shown, numbers=numbers)
    return CheckResult(
        NAME,
        Verdict.WARN,
        f"{measured}; {skewed[0]}",
        LIMIT,
        (*skewed[1:], *shown),
        "one rank does more than its like, or holds what the others share",
        "look at the layout: uneven stages, a gather on one rank",
        numbers=numbers,
    )


def _grown(counted: Ledger, growth: Mapping[tuple[str, str], float], shown: tuple[str, ...]) -> CheckResult:
    """The process that grows most, and the phase in which it does."""
    grown = [key for key, value in growth.items() if value > GROWTH]
    process, kind = max(grown, key=lambda key: growth[key])
    most = f"{growth[process, kind] / MB:.3g} MB"
    measured = f"{process} keeps {most} ({kind}) more after every round; {len(grown)} of {len(growth)} grow"
    return CheckResult(
        NAME,
        Verdict.FAIL,
        measured,
        LIMIT,
        (_where(counted, process, kind), *shown),
        "something is kept at every step: tensors with their graph, buffers of a sync, answers, handles",
        f"look at what that phase appends to; a run of this model ends after free memory / {most} rounds",
    )


def _short_rounds(bench: Bench, second: Learned) -> Iterator[Mapping[str, Any]]:
    """Sync, a rollout of one prompt, log-probs, one step on few samples: again and again, measured after each phase."""
    small = few(second.batch, max(bench.config.parallel.dp, 2))
    data = part_of(second.data, len(small))
    for number in range(WARM_UP + ROUNDS):
        memory = {}
        bench.sync()
        memory["sync"] = memory_of(bench)
        generate(bench, second.batch, 3 + number, num_prompts=1, longest=SHORT_RESPONSE)
        memory["generate"] = memory_of(bench)
        bench.trainer.log_probs(small)
        memory["log_probs"] = memory_of(bench)
        try:
            bench.trainer.step(data)
        except CheckFailed:  # the check gradients says so; the step was computed all the same
            bench.say(f"round {number}: the trainer refused the step after its computation")
        memory["train"] = memory_of(bench)
        yield memory


def few(batch: RolloutBatch, at_least: int) -> RolloutBatch:
    """The first samples, up to ``SHORT_TOKENS`` tokens."""
    count = int(np.searchsorted(batch.offsets[1:], SHORT_TOKENS, side="right"))
    return batch.select(range(min(max(count, at_least), len(batch))))


def _sizes(ledger: Ledger) -> Iterator[str]:
    for process in ledger.processes():
        held = ", ".join(f"{k} {ledger.largest(process, k) / MB:.0f} MB" for k in ledger.kinds())
        yield f"{process}: at most {held}"


def _where(ledger: Ledger, process: str, kind: str) -> str:
    """The phase in which a process takes what it keeps: where its bytes rise, on average, from the phase before."""
    phases = ledger.phases()
    rises: dict[str, float] = {}
    for before, phase in zip([phases[-1], *phases], phases, strict=False):
        now, then = ledger.column(phase, process, kind), ledger.column(before, process, kind)
        pairs = zip(now[1:], then, strict=False) if before == phases[-1] else zip(now, then, strict=False)
        rises[phase] = float(np.median([a - b for a, b in pairs]))
    worst = max(rises, key=lambda phase: rises[phase])
    return f"{process} takes it in phase {worst}: {rises[worst] / MB:+.2f} MB"


def _skewed(bench: Bench, ledger: Ledger) -> Iterator[str]:
    """Trainer ranks of one pipeline stage, and engines, hold alike."""
    for title, members in _alike(bench, ledger.processes()).items():
        for kind in ledger.kinds():
            held = {process: ledger.largest(process, kind) for process in members}
            least, most = min(held, key=lambda p: held[p]), max(held, key=lambda p: held[p])
            if held[most] > SKEW_SHARE * held[least] and held[most] - held[least] > SKEW:
                yield (f"{title}: {most} holds {held[most] / MB:.0f} MB ({kind}), {least} {held[least] / MB:.0f} MB")


def _alike(bench: Bench, processes: list[str]) -> dict[str, list[str]]:
    layout = bench.config.parallel
    width = layout.world_size // layout.pp
    ranks = [process for process in processes if process.startswith("trainer rank ")]
    found: dict[str, list[str]] = {}
    for process in ranks:
        stage = int(process.rsplit(" ", 1)[1]) // width
        found.setdefault(f"ranks of stage {stage}", []).append(process)
    found["engines"] = [process for process in processes if process not in ranks]
    return {title: members for title, members in found.items() if len(members) > 1}


def _numbers(ledger: Ledger, growth: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    drawn = []
    for kind in ledger.kinds():
        at, held = ledger.steps(kind)
        in_mb = {p: [None if v is None else v / MB for v in values] for p, values in held.items()}
        drawn.append(steps(f"Memory of each process ({kind})", in_mb, at, "phase", "MB").as_dict())
    found: dict[str, dict[str, float]] = {}
    for (process, kind), value in growth.items():
        found.setdefault(process, {})[kind] = value
    return {"growth": found, "ledger": ledger.as_dict(), "plots": drawn}


CHECK = Check(
    name=NAME,
    step="11b",
    title="no out-of-memory, no growth, ranks alike",
    guide="second step: does it run out of memory?",
    run=run,
    is_live=True,
)
