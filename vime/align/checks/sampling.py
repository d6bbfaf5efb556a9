"""Do both sides mean the same distribution? Which temperature, truncation or penalty explains their difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vime.align.bench import Bench, Forward
from vime.align.gap import Compared, Gap, compared, joined, whole_sequences
from vime.align.oracle import NEUTRAL, Oracle
from vime.align.processed import Position, log_probs
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "sampling"
FACTOR = 3.0
"""A setting explains a difference whose mean it makes so many times smaller (in float32 it leaves rounding alone)."""
SAMPLES = 4
"""Samples whose whole distributions the Hugging Face model computes."""
USUAL: dict[str, tuple[float, ...]] = {
    "top_p": (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    "top_k": (1, 5, 10, 20, 40, 50, 64, 100),
    "min_p": (0.01, 0.05, 0.1),
    "repetition_penalty": (1.05, 1.1, 1.15, 1.2, 1.3),
    "presence_penalty": (0.5, 1.0, 1.5),
    "frequency_penalty": (0.5, 1.0),
}
"""Values that are tried beside those that engine, record and generation_config.json name."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A setting under which the two sides would agree. gap: what would be left, max and mean |difference|, nats."""

    text: str
    max: float
    mean: float
    cause: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.text}: max {self.max:.2g}, mean {self.mean:.2g}"


def run(bench: Bench) -> CheckResult:
    found = compared(bench)
    if isinstance(found, str):
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=found)
    differing = list(_differing(bench))
    verdict = found.band.verdict(found.gap)
    if verdict == Verdict.PASS:
        return _without_gap(found, differing)
    tried, unknown = _tried(bench, found)
    best = min(tried, key=lambda one: one.mean, default=None)
    numbers = {**found.gap.numbers(), "tried": {one.text: one.mean for one in tried}}
    evidence = (*differing, *map(str, sorted(tried, key=lambda one: one.mean)[:4]), *unknown)
    if best is not None and _explains(best, found):
        measured = f"engine - trainer as the run says: {found.gap}; with {best}"
        return CheckResult(
            NAME, Verdict.FAIL, measured, found.band.reason, evidence, best.cause, best.next_step, numbers=numbers
        )
    if differing:
        return _options_differ(found, differing, evidence)
    if verdict == Verdict.WARN:
        measured = f"no other setting fits better than temperature {found.temperature:g}: {found.gap}{found.note}"
        return CheckResult(NAME, Verdict.PASS, measured, found.band.reason, evidence, numbers=numbers)
    cause = f"the sides differ ({found.gap}) by something else: no temperature, truncation or penalty explains it"
    return CheckResult(NAME, Verdict.NOT_TESTED, "", found.band.reason, evidence, cause, numbers=numbers)


def _without_gap(found: Compared, differing: list[str]) -> CheckResult:
    if differing:
        return _options_differ(found, differing, tuple(differing))
    measured = f"temperature {found.temperature:g} on both sides: {found.gap}{found.note}"
    return CheckResult(NAME, Verdict.PASS, measured, found.band.reason, numbers=found.gap.numbers())


def _options_differ(found: Compared, differing: list[str], evidence: tuple[str, ...]) -> CheckResult:
    return CheckResult(
        NAME, Verdict.FAIL, f"{differing[0]}; gap {found.gap}", "the options of the run", evidence,
        "the engine samples with other options than the trainer computes log-probs for",
        "send every option with every request; set rollout.sampling to what is meant",
    )  # fmt: skip


def _differing(bench: Bench) -> Iterator[str]:
    """Options of the distribution that are not those of the run, in the record and in the live engine, with origin."""
    own = bench.config.rollout.sampling
    places: list[tuple[str, Mapping[str, Any], Mapping[str, str]]] = [
        ("the rollout was sampled", bench.batch.header.sampling, bench.batch.header.sampling_origin)
    ]
    if bench.is_live:
        about = bench.engine.describe()
        places = [("the engine samples", about.get("sampling", {}), about.get("sampling_origin", {}))]
    asked = {name: getattr(own, name) for name in ("temperature", *NEUTRAL)}
    file = _generation_config(bench)
    for who, options, origins in places:
        for name, value in asked.items():
            if name in options and float(options[name]) != float(value) and not _is_greedy(name, options):
                origin = "generation_config.json" if file.get(name) == options[name] else origins.get(name, "")
                where = f" (from {origin})" if origin else ""
                yield f"{who} with {name} = {options[name]}{where}, the run says {value}"


def _is_greedy(name: str, options: Mapping[str, Any]) -> bool:
    """Temperature 0 in the record is greedy, whatever the run trains at: compared at temperature 1, and said."""
    return name == "temperature" and float(options[name]) == 0.0


def _generation_config(bench: Bench) -> dict[str, Any]:
    file = Path(bench.config.model.path) / "generation_config.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _explains(one: Hypothesis, found: Compared) -> bool:
    """In float32 what is left must be rounding: twice the limit, since truncation and penalties divide once more."""
    is_rounding = found.band.fail_max > found.band.pass_max or one.max <= 2.0 * found.band.pass_max
    return one.mean * FACTOR <= found.gap.mean and is_rounding


# ---- what is tried -------------------------------------------------------------------------------------------------


def _tried(bench: Bench, found: Compared) -> tuple[list[Hypothesis], tuple[str, ...]]:
    """Every hypothesis with what it leaves, and why some were not tried."""
    tried = [*_temperatures(bench, found), *_trainer_without(bench, found)]
    if tried and _explains(min(tried, key=lambda one: one.mean), found):
        return tried, ()
    more, unknown = _of_oracle(bench, found)
    return [*tried, *more], unknown


def _temperatures(bench: Bench, found: Compared) -> Iterator[Hypothesis]:
    """The trainer at other temperatures against the engine as it answered."""
    own, mode = found.temperature, ""
    said = {1.0, float(bench.batch.header.sampling.get("temperature", own)) or 1.0}
    if bench.is_live:
        about = bench.engine.describe()
        said.add(float(about.get("sampling", {}).get("temperature", own)) or 1.0)
        mode = str(about.get("log_probs_mode", ""))
    for value in sorted(said - {own}):
        trainer_T = bench.trainer.log_probs(found.gap.batch, how=Forward(temperature=value))
        left = Gap.of(found.gap.batch, found.gap.ours_T, trainer_T)
        is_raw = value == 1.0 and mode != "processed_logprobs"
        cause = (
            f"the engine reports raw log-probs, of temperature 1 and before any option ({mode or 'mode unknown'}), the "
            f"trainer those of temperature {own:g}"
            if is_raw
            else f"the engine's log-probs are those of temperature {value:g}, the trainer's of {own:g}"
        )
        step = "engine: logprobs_mode = processed_logprobs" if is_raw else f"rollout.sampling.temperature = {value:g}"
        yield Hypothesis(f"trainer at temperature {value:g}", left.max, left.mean, cause, step)


def _trainer_without(bench: Bench, found: Compared) -> Iterator[Hypothesis]:
    """The trainer as it answered against the engine's fresh scores, which are of temperature 1."""
    own = found.temperature
    if not bench.is_live or own == 1.0:
        return
    batch = found.gap.batch
    scores = bench.engine.score(whole_sequences(batch, range(len(batch))))
    left = Gap.of(batch, np.concatenate(scores), found.gap.theirs_T)
    cause = f"the trainer leaves the temperature of {own:g} out: its log-probs are those of temperature 1"
    yield Hypothesis(
        "the engine at temperature 1", left.max, left.mean, cause, "divide the trainer's logits by the temperature"
    )


def _of_oracle(bench: Bench, found: Compared) -> tuple[list[Hypothesis], tuple[str, ...]]:
    """Settings of the whole distribution, from the logits of the Hugging Face model, on the worst few samples."""
    batch, own = found.gap.batch, bench.config.rollout.sampling
    oracle = Oracle(bench.config.model.path, SAMPLES, {"temperature": found.temperature})
    rows = [one.row for one in found.gap.by_sample()[:SAMPLES]]
    positions: list[Position] = []
    for row in rows:
        position = oracle.position(batch, row)
        if isinstance(position, str):
            return [], (f"truncation and penalties not tried: {position}",)
        positions.append(position)
    here = [slice(int(batch.offsets[row]), int(batch.offsets[row + 1])) for row in rows]
    masks = [batch.loss_mask_T[s] for s in here]
    engine = joined([found.gap.ours_T[s][m] for s, m in zip(here, masks, strict=True)])
    trainer = joined([found.gap.theirs_T[s][m] for s, m in zip(here, masks, strict=True)])
    base = {"temperature": found.temperature} | {name: getattr(own, name) for name in NEUTRAL}
    tried = [_option(positions, engine, base, name, value) for name, value in _candidates(bench)]
    if found.temperature != 1.0 and not bench.is_live:
        plain, _ = _scores(positions, base | {"temperature": 1.0})
        size = np.abs(trainer - plain)
        cause = f"the trainer leaves the temperature of {found.temperature:g} out"
        step = "divide the trainer's logits by the temperature"
        tried.append(Hypothesis("Hugging Face at temperature 1", float(size.max()), float(size.mean()), cause, step))
    return tried, ()


def _candidates(bench: Bench) -> Iterator[tuple[str, float]]:
    """(option, value): what record, engine and generation_config.json say, then what is usual; none twice."""
    named: list[Mapping[str, Any]] = [bench.batch.header.sampling, _generation_config(bench)]
    if bench.is_live:
        named.append(bench.engine.describe().get("sampling", {}))
    for name, usual in USUAL.items():
        own = float(getattr(bench.config.rollout.sampling, name))
        said = [float(options[name]) for options in named if options.get(name) is not None]
        for value in dict.fromkeys([*said, *usual]):
            if value != own:
                yield name, value


def _option(
    positions: list[Position], engine: np.ndarray, base: Mapping[str, Any], name: str, value: float
) -> Hypothesis:
    """What is left between the engine and the oracle with one option changed."""
    found, log_s = _scores(positions, {**base, name: value})
    size = np.abs(engine - found)  # inf where the option would have dropped the token
    size[np.isnan(size)] = np.inf
    shown = f"{name} = {value:g}"
    if name in ("top_p", "top_k", "min_p"):
        cause = (
            f"truncation bias: the engine normalises over the tokens that {shown} keeps, the trainer over all: "
            f"mean log S = {log_s.mean():.4g}, residual after correction max {size.max():.2g}"
        )
        return Hypothesis(shown, float(size.max()), float(size.mean()), cause, f"rollout.sampling.{name} neutral")
    cause = f"the engine applies {shown}, which the trainer does not know"
    step = f"rollout.sampling.{name} neutral, and sent with every request (generation_config.json may set it)"
    return Hypothesis(shown, float(size.max()), float(size.mean()), cause, step)


def _scores(positions: list[Position], options: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs, log S) of the sampled tokens of all samples."""
    parts = [log_probs(position, options) for position in positions]
    return joined([p for p, _ in parts]), joined([s for _, s in parts])


CHECK = Check(
    NAME,
    "8a",
    "sampling semantics",
    "engine and trainer log-probs are of one distribution: temperature, top-p and top-k, penalties, raw or processed",
    run,
    explained_by=("loaded", "weights", "buffers"),
)
