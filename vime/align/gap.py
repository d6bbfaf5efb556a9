"""Per-token differences between two sets of log-probs of one batch, and how large they may be.

Axes: T tokens of all samples, K the tokens that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vime.align.bench import Bench, Forward
from vime.align.first_step import engine_limit
from vime.align.plots import scatter
from vime.types import RolloutBatch, Verdict

MAX_POINTS = 4096
"""Tokens whose differences go into the report."""
CONTEXT = 12
"""Tokens before a token that are shown with it."""


@dataclass(frozen=True, slots=True)
class Band:
    """What two healthy implementations may differ by, nats. Above ``pass_*`` it is a warning, above ``fail_*`` wrong.

    float32 has one limit, of the largest difference, for a wrong weight, temperature or token shows as 1e-3 and more.
    bfloat16 rounds to 8 bits, and single tokens are off by a lot. transformers in bfloat16 against float32, sampled
    tokens: the tiny model (4 layers) max 0.39, mean 0.010, worst sample 0.034; SmolLM2-135M (30 layers) max 0.34, mean
    0.049, worst sample 0.094; at temperature 0.7 max 0.69 for both, mean 0.014 and 0.074, worst sample 0.056 and 0.14.
    So its limits are of means, over all tokens and over each sample.
    """

    pass_max: float
    fail_max: float
    pass_mean: float = np.inf
    fail_mean: float = np.inf
    fail_sample: float = np.inf
    reason: str = ""

    @classmethod
    def of(cls, dtype: str, num_layers: int, temperature: float = 1.0) -> Band:
        """A temperature below 1 multiplies every difference of logits; 0 (greedy) stands for 1."""
        scale = 1.0 / min(1.0, temperature or 1.0)
        at = f", temperature {temperature:g}" if scale > 1.0 else ""
        if dtype != "bfloat16":
            limit = scale * engine_limit(dtype, num_layers)
            return cls(limit, limit, reason=f"max {limit:.2g} ({dtype}, {num_layers} layers{at})")
        found = cls(scale * engine_limit(dtype, num_layers), scale * 2.0, scale * 1e-2, scale * 0.15, scale * 0.5)
        passes = f"max {found.pass_max:.2g}, mean {found.pass_mean:.2g}"
        fails = f"mean {found.fail_mean:.2g}, of a sample {found.fail_sample:.2g}"
        return replace(found, reason=f"{passes}; wrong above {fails} ({dtype}, {num_layers} layers{at})")

    @classmethod
    def of_bench(cls, bench: Bench, temperature: float | None = None) -> Band:
        """For the run's model; ``temperature``: None is the run's."""
        own = bench.config.rollout.sampling.temperature if temperature is None else temperature
        return cls.of(bench.config.model.dtype, bench.spec.num_layers, own)

    def verdict(self, gap: Gap) -> Verdict:
        """FAIL too for a difference that is no number. Means of samples count from 8 tokens on."""
        means = [one.mean for one in gap.by_sample() if one.num_tokens >= MIN_TOKENS]
        worst = max(means, default=0.0)
        if not (gap.max <= self.fail_max and gap.mean <= self.fail_mean and worst <= self.fail_sample):
            return Verdict.FAIL
        return Verdict.PASS if gap.max <= self.pass_max and gap.mean <= self.pass_mean else Verdict.WARN


MIN_TOKENS = 8
"""The mean of fewer tokens is that of one outlier."""


@dataclass(frozen=True, slots=True)
class SampleGap:
    """|difference| over the compared tokens of one sample, nats; bias: signed mean."""

    row: int
    name: str
    max: float
    mean: float
    bias: float
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.name}: max {self.max:.2g}, mean {self.mean:.2g} over {self.num_tokens} tokens"


@dataclass(frozen=True, slots=True, eq=False)
class Gap:
    """``ours_T`` - ``theirs_T`` where ``is_compared_T``, at least one token; names: of the two sides, for people."""

    batch: RolloutBatch
    ours_T: np.ndarray
    theirs_T: np.ndarray
    is_compared_T: np.ndarray
    names: tuple[str, str] = ("engine", "trainer")

    @classmethod
    def of(cls, batch: RolloutBatch, ours_T: np.ndarray, theirs_T: np.ndarray, **more: Any) -> Gap:
        """Over the tokens that the policy sampled."""
        return cls(batch, ours_T, theirs_T, batch.loss_mask_T, **more)

    @property
    def difference_T(self) -> np.ndarray:
        """float64 [T], signed; 0 where nothing is compared."""
        found = self.ours_T.astype(np.float64) - self.theirs_T.astype(np.float64)
        return np.where(self.is_compared_T, found, 0.0)

    @property
    def difference_K(self) -> np.ndarray:
        return self.difference_T[self.is_compared_T]

    @property
    def num_tokens(self) -> int:
        return int(self.is_compared_T.sum())

    @property
    def max(self) -> float:
        return float(np.abs(self.difference_K).max(initial=0.0))

    @property
    def mean(self) -> float:
        return float(np.abs(self.difference_K).mean()) if self.num_tokens else 0.0

    @property
    def bias(self) -> float:
        """Signed mean: rounding has none."""
        return float(self.difference_K.mean()) if self.num_tokens else 0.0

    @property
    def p99(self) -> float:
        return float(np.quantile(np.abs(self.difference_K), 0.99)) if self.num_tokens else 0.0

    def __str__(self) -> str:
        return f"max {self.max:.2g}, p99 {self.p99:.2g}, mean {self.mean:.2g} over {self.num_tokens} tokens"

    def by_sample(self) -> list[SampleGap]:
        """Every sample with a compared token, the largest mean first: one bad sample of many is seen (case A23)."""
        found = []
        for row in range(len(self.batch)):
            own = slice(int(self.batch.offsets[row]), int(self.batch.offsets[row + 1]))
            values = self.difference_T[own][self.is_compared_T[own]]
            if len(values):
                size = np.abs(values)
                name = name_of(self.batch, row)
                found.append(
                    SampleGap(row, name, float(size.max()), float(size.mean()), float(values.mean()), len(values))
                )
        return sorted(found, key=lambda one: -np.inf if np.isnan(one.mean) else -one.mean)

    def worst_tokens(self, tokenizer: Any, count: int = 3) -> tuple[str, ...]:
        """The tokens with the largest |difference|, with their text and what stands before them."""
        size_T = np.abs(self.difference_T)
        size_T[np.isnan(size_T)] = np.inf
        worst = [int(t) for t in np.argsort(-size_T, kind="stable")[:count] if size_T[t] > 0.0]
        return tuple(self._token(tokenizer, t) for t in worst)

    def _token(self, tokenizer: Any, at: int) -> str:
        row = int(np.searchsorted(self.batch.offsets, at, side="right") - 1)
        start = int(self.batch.offsets[row])
        before = tokenizer.decode(self.batch.token_ids_T[max(start, at - CONTEXT) : at].tolist())
        text = tokenizer.decode([int(self.batch.token_ids_T[at])])
        return (
            f"{self.batch.place_of(at)} token {self.batch.token_ids_T[at]} {text!r} after "
            f"{before!r}: {self.names[0]} {self.ours_T[at]:.6g}, {self.names[1]} {self.theirs_T[at]:.6g}"
        )

    def numbers(self) -> dict[str, float]:
        """Plain data for ``CheckResult.numbers``."""
        return {"max": self.max, "p99": self.p99, "mean": self.mean, "bias": self.bias, "num_tokens": self.num_tokens}

    def plot(self, title: str, limit: float, tokenizer: Any) -> dict[str, Any]:
        """|difference| of each token in the order of the batch; the largest where there are too many."""
        at_K = np.flatnonzero(self.is_compared_T)
        size_K = np.abs(self.difference_K)
        kept = np.sort(np.argsort(-size_K, kind="stable")[:MAX_POINTS])
        rows = np.searchsorted(self.batch.offsets, at_K[kept], side="right") - 1
        texts = [
            f"{name_of(self.batch, int(r))} {tokenizer.decode([int(self.batch.token_ids_T[t])])!r}"
            for r, t in zip(rows, at_K[kept], strict=True)
        ]
        name = f"|{self.names[0]} - {self.names[1]}|"
        drawn = scatter(
            title, {name: size_K[kept]}, "token of the rollout", "nats", at={name: at_K[kept]}, texts={name: texts},
            limit=limit, limit_text=f"{limit:.2g}",
        )  # fmt: skip
        return drawn.as_dict()


def compared_tokens(gap: Gap, side: int, row: int) -> np.ndarray:
    """Log-probs of the compared tokens of one sample; ``side``: 0 is ours, 1 theirs."""
    own = slice(int(gap.batch.offsets[row]), int(gap.batch.offsets[row + 1]))
    return (gap.ours_T, gap.theirs_T)[side][own][gap.is_compared_T[own]]


def name_of(batch: RolloutBatch, row: int) -> str:
    """How messages call a sample."""
    return f"sample {batch.group_ids_N[row]}/{batch.indices_N[row]}"


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """Engine and trainer over the rollout, before any update. temperature: what the trainer divides its logits by.

    is_greedy   sampled at temperature 0; the engine then reports log-probs of temperature 1 (case A03)
    """

    gap: Gap
    temperature: float
    is_greedy: bool
    band: Band

    @property
    def note(self) -> str:
        return "; greedy: log-probs of temperature 1 on both sides" if self.is_greedy else ""


def compared(bench: Bench) -> Compared | str:
    """The engine's log-probs of the rollout against the trainer's; a text where there is nothing to compare."""
    batch = bench.batch
    version = max((row["weight_version_max"] for row in batch.rows), default=0)
    if version > 0:
        return f"the rollout was sampled with weights v{version}, the trainer holds those of model.path (v0)"
    if not batch.loss_mask_T.any():
        return "no trained token in this rollout"
    is_greedy = sampled_at(bench) == 0.0
    temperature = 1.0 if is_greedy else bench.config.rollout.sampling.temperature
    trainer_T = bench.trainer.log_probs(batch, how=Forward(temperature=1.0)) if is_greedy else bench.log_probs_T
    gap = Gap.of(batch, batch.rollout_log_probs_T, trainer_T)
    return Compared(gap, temperature, is_greedy, Band.of_bench(bench, temperature))


def sampled_at(bench: Bench) -> float:
    """The temperature that the rollout says of itself; the run's where an old record says nothing."""
    return float(bench.batch.header.sampling.get("temperature", bench.config.rollout.sampling.temperature))


def rise(first: Gap, second: Gap, band: Band) -> str:
    """What speaks for a gap that grows from step to step (case A06): "" for none.

    A gap grows where something stays behind the updates: cached keys, a tensor that is not sent. Healthy gaps stay
    where they are, though a rounded one may double: a rise counts from 3 times the mean on, and from a mean of a tenth
    of the limit. (One token of a first rollout may agree to the last bit, and one of a second be off by three.)
    """
    if second.mean > max(RISE * first.mean, band.pass_max / 10):
        return f"mean |{second.names[0]} - {second.names[1]}| went from {first.mean:.2g} to {second.mean:.2g}"
    return ""


RISE = 3.0


def whole_sequences(batch: RolloutBatch, rows: Sequence[int]) -> list[np.ndarray]:
    """int32 [L] of each row: prompt and response."""
    return [np.array(batch.token_ids_T[batch.offsets[row] : batch.offsets[row + 1]]) for row in rows]


def few_rows(batch: RolloutBatch, count: int) -> list[int]:
    """At most ``count`` rows with a response, spread over the batch, so that long runs are checked in seconds."""
    rows = [row for row in range(len(batch)) if batch.response_lens_N[row] > 0]
    if len(rows) <= count:
        return rows
    return [rows[i] for i in np.linspace(0, len(rows) - 1, count).astype(int)]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """float64, one after the other; empty for none."""
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


def largest(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Largest |difference| of two lists of equally long arrays; NaN counts as infinite."""
    size = np.abs(joined(ours) - joined(theirs))
    return float(np.where(np.isnan(size), np.inf, size).max(initial=0.0))
