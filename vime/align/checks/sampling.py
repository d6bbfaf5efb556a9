"""Do both sides mean the same distribution? Which temperature, truncation or penalty explains their difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.align.bench import Bench
from vime.align.gap import Compared, compared
from vime.align.hypotheses import Hypothesis, generation_config, tried
from vime.align.oracle import NEUTRAL
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "sampling"


def run(bench: Bench) -> CheckResult:
    found = compared(bench)
    if isinstance(found, str):
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=found)
    differing = list(_differing(bench))
    if found.band.verdict(found.gap) == Verdict.PASS:
        if differing:
            return _options_differ(found, differing, tuple(differing))
        measured = f"temperature {found.temperature:g} on both sides: {found.gap}{found.note}"
        return CheckResult(NAME, Verdict.PASS, measured, found.band.reason, numbers=found.gap.numbers())
    hypotheses, said = tried(bench, found)
    return _which(found, differing, hypotheses, said)


def _which(found: Compared, differing: list[str], tried: list[Hypothesis], said: tuple[str, ...]) -> CheckResult:
    """The verdict over ``tried``, the best first."""
    numbers = {**found.gap.numbers(), "tried": {one.text: one.mean for one in tried}}
    evidence = (*differing, *said, *map(str, tried[:4]))
    if tried and tried[0].explains(found.band):
        best = tried[0]
        measured = f"engine - trainer as the run says: {found.gap}; with {best}"
        return CheckResult(
            NAME, Verdict.FAIL, measured, found.band.reason, evidence, best.cause, best.next_step, numbers=numbers
        )
    if differing:
        return _options_differ(found, differing, evidence)
    if found.band.verdict(found.gap) == Verdict.WARN:
        measured = f"no other setting fits better than temperature {found.temperature:g}: {found.gap}{found.note}"
        return CheckResult(NAME, Verdict.PASS, measured, found.band.reason, evidence, numbers=numbers)
    cause = f"the sides differ ({found.gap}) by something else: no setting that was tried explains it"
    return CheckResult(NAME, Verdict.NOT_TESTED, "", found.band.reason, evidence, cause, numbers=numbers)


def _options_differ(found: Compared, differing: list[str], evidence: tuple[str, ...]) -> CheckResult:
    return CheckResult(
        NAME, Verdict.FAIL, f"{differing[0]}; gap {found.gap}", "the options of the run", evidence,
        "the engine samples with other options than the trainer computes log-probs for",
        "send every option with every request; set rollout.sampling to what is meant",
    )  # fmt: skip


def _differing(bench: Bench) -> Iterator[str]:
    """Options of the distribution that are not those of the run, in the live engine or the record, with origin."""
    own = bench.config.rollout.sampling
    who, options, origins = _in_effect(bench)
    file = generation_config(bench)
    for name in ("temperature", *NEUTRAL):
        value = getattr(own, name)
        is_greedy = not bench.is_live and _is_greedy(name, options)
        if name in options and float(options[name]) != float(value) and not is_greedy:
            origin = "generation_config.json" if file.get(name) == options[name] else origins.get(name, "unknown")
            yield f"{who} with {name} = {options[name]} (from {origin}), the run says {value}"


def _in_effect(bench: Bench) -> tuple[str, Mapping[str, Any], Mapping[str, str]]:
    if bench.is_live:
        # What the engine takes for its own configuration is not where a value comes from that the run does not say.
        return "the engine samples", bench.engine.describe()["sampling"], {}
    header = bench.batch.header
    return "the rollout was sampled", header.sampling, header.sampling_origin


def _is_greedy(name: str, options: Mapping[str, Any]) -> bool:
    """Temperature 0 in the record is greedy, whatever the run trains at: compared at temperature 1, and said."""
    return name == "temperature" and float(options[name]) == 0.0


CHECK = Check(
    NAME,
    "8a",
    "engine and trainer mean one distribution: temperature, top-p, penalties",
    "engine and trainer log-probs are of one distribution: temperature, top-p and top-k, penalties, raw or processed",
    run,
    explained_by=("loaded", "weights", "buffers"),
)
