"""Settings under which engine and trainer would agree on a rollout, and what each would leave of their difference.

Temperatures are tried on the trainer, over the whole rollout. Truncation and penalties need whole distributions: those
come from the Hugging Face model, on the samples that differ most.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vime.align.bench import Bench, Forward
from vime.align.gap import Band, Compared, Gap, compared_tokens, joined, whole_sequences
from vime.align.oracle import NEUTRAL, Oracle
from vime.align.processed import Position, log_probs

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
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
"""Tried on the trainer beside those that engine and record name."""
TRUNCATIONS = ("top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A setting that may explain the difference. max, mean: what it would leave, nats; before: the mean without it."""

    text: str
    max: float
    mean: float
    before: float
    cause: str
    next_step: str

    @classmethod
    def of(cls, text: str, left_K: np.ndarray, before: float, cause: str, next_step: str) -> Hypothesis:
        """``left_K``: differences that it leaves; what is no number counts as infinite."""
        size = np.abs(left_K)
        size[np.isnan(size)] = np.inf
        return cls(text, float(size.max(initial=0.0)), float(size.mean()), before, cause, next_step)

    def __str__(self) -> str:
        return f"{self.text}: max {self.max:.2g}, mean {self.mean:.2g}"

    def explains(self, band: Band) -> bool:
        """In float32 what is left must be rounding: twice the limit, since truncation and penalties divide again."""
        is_rounding = band.fail_max > band.pass_max or self.max <= 2.0 * band.pass_max
        return self.mean * FACTOR <= self.before and is_rounding


def tried(bench: Bench, found: Compared) -> tuple[list[Hypothesis], tuple[str, ...]]:
    """Every hypothesis, the best first; and what else was learned, or why some were not tried."""
    first = sorted([*_temperatures(bench, found), *_trainer_without(bench, found)], key=lambda one: one.mean)
    if first and first[0].explains(found.band):
        return first, ()
    more, said = _of_oracle(bench, found)
    return sorted([*more, *first], key=lambda one: (not one.explains(found.band), one.mean)), said


def generation_config(bench: Bench) -> dict[str, Any]:
    """What the model's folder wants; {} where it has no such file."""
    file = Path(bench.config.model.path) / "generation_config.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _described(bench: Bench) -> Mapping[str, Any]:
    return bench.engine.describe() if bench.is_live else {}


def _temperatures(bench: Bench, found: Compared) -> Iterator[Hypothesis]:
    """The trainer at other temperatures against the engine as it answered."""
    own, about, batch = found.temperature, _described(bench), found.gap.batch
    said = [batch.header.sampling, about.get("sampling", {})]
    values = {*TEMPERATURES, *(float(options.get("temperature", own)) or 1.0 for options in said)}
    mode = str(about.get("log_probs_mode", "mode unknown"))
    for value in sorted(values - {own}):
        trainer_T = bench.trainer.log_probs(batch, how=Forward(temperature=value))
        cause = f"the engine's log-probs are those of temperature {value:g}, the trainer's of {own:g}"
        step = f"rollout.sampling.temperature = {value:g}"
        if value == 1.0 and mode != "processed_logprobs":
            cause = (
                f"the engine reports raw log-probs, of temperature 1 and before any option ({mode}), the trainer those "
                f"of temperature {own:g}"
            )
            step = "engine: logprobs_mode = processed_logprobs"
        left_K = Gap.of(batch, found.gap.ours_T, trainer_T).difference_K
        yield Hypothesis.of(f"trainer at temperature {value:g}", left_K, found.gap.mean, cause, step)


def _trainer_without(bench: Bench, found: Compared) -> Iterator[Hypothesis]:
    """The trainer as it answered against the engine's fresh scores, which are of temperature 1."""
    if not bench.is_live or found.temperature == 1.0:
        return
    batch = found.gap.batch
    scores_T = np.concatenate(bench.engine.score(whole_sequences(batch, range(len(batch)))))
    left_K = Gap.of(batch, scores_T, found.gap.theirs_T).difference_K
    yield _left_out("the engine at temperature 1", left_K, found.gap.mean, found.temperature)


def _left_out(text: str, left_K: np.ndarray, before: float, temperature: float) -> Hypothesis:
    cause = f"the trainer leaves the temperature of {temperature:g} out: its log-probs are those of temperature 1"
    step = "divide the trainer's logits by it; rollout.sampling.temperature=1 shows the rest without this fault"
    return Hypothesis.of(text, left_K, before, cause, step)


# ---- whole distributions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The sampled tokens K of a few samples under engine and trainer, and the logits of the Hugging Face model."""

    positions: Sequence[Position]
    engine_K: np.ndarray
    trainer_K: np.ndarray
    options: Mapping[str, Any]  # the run's

    def under(self, **changes: float) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs [K], log S [K]) of the Hugging Face model under the run's options with ``changes``."""
        parts = [log_probs(position, {**self.options, **changes}) for position in self.positions]
        return joined([p for p, _ in parts]), joined([s for _, s in parts])


def _of_oracle(bench: Bench, found: Compared) -> tuple[list[Hypothesis], tuple[str, ...]]:
    """Truncation, penalties and, from a record, a temperature that the trainer left out."""
    scored = _scored(bench, found)
    if isinstance(scored, str):
        return [], (f"truncation and penalties not tried: {scored}",)
    own_K, _ = scored.under()
    engine, trainer = (float(np.abs(side - own_K).mean()) for side in (scored.engine_K, scored.trainer_K))
    # An engine that agrees with the model as it is needs no other option to explain it.
    before = min(engine, float(np.abs(scored.engine_K - scored.trainer_K).mean()))
    every = [_option(scored, name, value, before) for name, value in _candidates(bench)]
    if found.temperature != 1.0:
        left_K = scored.trainer_K - scored.under(temperature=1.0)[0]
        every.append(_left_out("Hugging Face at temperature 1", left_K, trainer, found.temperature))
    said = f"against Hugging Face under the run's options: engine mean {engine:.2g}, trainer mean {trainer:.2g}"
    return every, (said,)


def _scored(bench: Bench, found: Compared) -> Scored | str:
    batch, own = found.gap.batch, bench.config.rollout.sampling
    oracle = Oracle(bench.config.model.path, SAMPLES, {"temperature": found.temperature})
    rows = [one.row for one in found.gap.by_sample()[:SAMPLES]]
    positions = []
    for row in rows:
        position = oracle.position(batch, row)
        if isinstance(position, str):
            return position
        positions.append(position)
    sides = [joined([compared_tokens(found.gap, side, row) for row in rows]) for side in (0, 1)]
    options = {name: getattr(own, name) for name in NEUTRAL} | {"temperature": found.temperature}
    return Scored(positions, sides[0], sides[1], options)


def _candidates(bench: Bench) -> Iterator[tuple[str, float]]:
    """(option, value): what record, engine and generation_config.json say, then what is usual; none twice."""
    named: list[Mapping[str, Any]] = [bench.batch.header.sampling, generation_config(bench)]
    named.append(_described(bench).get("sampling", {}))
    for name, usual in USUAL.items():
        own = float(getattr(bench.config.rollout.sampling, name))
        said = [float(options[name]) for options in named if options.get(name) is not None]
        for value in dict.fromkeys([*said, *usual]):
            if value != own:
                yield name, value


def _option(scored: Scored, name: str, value: float, before: float) -> Hypothesis:
    """What is left between engine and Hugging Face with one option changed."""
    found_K, log_s_K = scored.under(**{name: value})
    left_K, shown = scored.engine_K - found_K, f"{name} = {value:g}"  # inf where it would have dropped the token
    if name in TRUNCATIONS:
        cause = (
            f"truncation bias: the engine normalises over the tokens that {shown} keeps, the trainer over all: "
            f"mean log S = {log_s_K.mean():.4g}, residual after correction max {np.abs(left_K).max():.2g}"
        )
        return Hypothesis.of(shown, left_K, before, cause, f"rollout.sampling.{name} neutral")
    cause = f"the engine applies {shown}, which the trainer does not know"
    step = f"rollout.sampling.{name} neutral, and sent with every request (generation_config.json may set it)"
    return Hypothesis.of(shown, left_K, before, cause, step)
