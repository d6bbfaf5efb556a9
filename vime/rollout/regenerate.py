"""Recorded samples against the same prompts and seeds generated again: where do they part, and what explains it?

A sample is identical if token ids and log-probs agree bitwise. What lies behind the first other token is another text
and is not compared; log-probs are compared on the tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vime.types import CheckResult, Sample, Status, Verdict

NAME = "generated again == recorded"
NUM_SHOWN = 3
AROUND = 8
"""Tokens shown before the place where two answers part."""
NEAR_TIE = 1e-3
"""Greedy, two tokens whose log-probs are so near can change places through rounding alone, nats."""
LOOK = "compare model.path, model.dtype and [vllm] with the record's header (vime replay --inspect)"
DEPARTURES_PER_TOKEN = 0.01
"""Rounding turns one token in thousands into another; far more than that is not rounding."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Departure:
    """The first place where two answers are not the same. ``kind``: token, length (one ends), log_prob (ids agree).

    position      response token, from 0; log-probs in nats, None where there is no token
    """

    kind: str
    position: int
    recorded_token: int | None
    again_token: int | None
    recorded_log_prob: float | None
    again_log_prob: float | None
    recorded_text: str = ""
    again_text: str = ""


@dataclass(frozen=True, slots=True)
class SampleMatch:
    """One sample and its second generation. ``num_matching``: equal tokens before the first other one.

    log_prob_gap  largest |difference| on them, nats; infinite where the second generation failed (NaN)
    """

    rollout_id: int
    name: str
    num_recorded: int
    num_again: int
    num_matching: int
    log_prob_gap: float
    is_greedy: bool = False
    departure: Departure | None = None

    @property
    def is_identical(self) -> bool:
        return self.departure is None

    @property
    def has_other_tokens(self) -> bool:
        return self.departure is not None and self.departure.kind != "log_prob"

    @property
    def is_near_tie(self) -> bool:
        """Greedy, and both choices were as likely: rounding decides."""
        d = self.departure
        if d is None or not self.is_greedy or d.recorded_log_prob is None or d.again_log_prob is None:
            return False
        return abs(d.recorded_log_prob - d.again_log_prob) < NEAR_TIE


@dataclass(frozen=True, slots=True)
class Known:
    """A difference between record and engine that is known beforehand. ``is_asked``: the user asked for it."""

    text: str
    next_step: str
    is_asked: bool = False


@dataclass(frozen=True)
class Regeneration:
    """All comparisons of one call. ``not_tested``: reason -> samples."""

    matches: list[SampleMatch]
    not_tested: dict[str, int]
    known: list[Known] = field(default_factory=list)

    @property
    def num_identical(self) -> int:
        return sum(m.is_identical for m in self.matches)

    @property
    def num_tokens(self) -> int:
        """Tokens that could have matched."""
        return sum(max(m.num_recorded, m.num_again) for m in self.matches)

    @property
    def num_matching(self) -> int:
        return sum(m.num_matching for m in self.matches)

    @property
    def match_share(self) -> float:
        return self.num_matching / self.num_tokens if self.num_tokens else 1.0

    @property
    def log_prob_gap(self) -> float:
        return max((m.log_prob_gap for m in self.matches), default=0.0)

    @property
    def departures(self) -> list[SampleMatch]:
        """Samples that are not identical: other tokens first, the earliest departure first."""
        found = [m for m in self.matches if m.departure is not None]
        return sorted(found, key=lambda m: (not m.has_other_tokens, m.num_matching))


def reason_not_to(sample: Sample) -> str | None:
    """Why one request with the sample's prompt and seed would not be the same question again; None if it would."""
    response = sample.loss_mask[sample.prompt_len :]
    if not sample.status.is_trainable:
        return f"status {sample.status}"
    if sample.metadata.get("num_turns", 1) != 1 or not response.all():
        return "several turns: its tokens are not one answer to one prompt"
    return None


def match(rollout_id: int, recorded: Sample, again: Sample, decode: Decode, is_greedy: bool = False) -> SampleMatch:
    """``again`` was generated with the prompt, the seed and the options of ``recorded``."""
    start = recorded.prompt_len
    a, b = recorded.token_ids[start:], again.token_ids[start:]
    lp_a, lp_b = recorded.rollout_log_probs[start:], again.rollout_log_probs[start:]
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    same = int(differ[0]) if len(differ) else shorter
    gaps = np.nan_to_num(np.abs(lp_a[:same].astype(np.float64) - lp_b[:same]), nan=np.inf)
    departure = None
    if len(differ) or len(a) != len(b):
        departure = _departure("token" if len(differ) else "length", same, (a, lp_a), (b, lp_b), decode)
    elif gaps.any():
        departure = _departure("log_prob", int(np.flatnonzero(gaps)[0]), (a, lp_a), (b, lp_b), decode)
    elif recorded.status != again.status:
        departure = _departure("length", same, (a, lp_a), (b, lp_b), decode)
    gap = math.inf if again.status is Status.FAILED else float(gaps.max(initial=0.0))
    return SampleMatch(rollout_id, recorded.name, len(a), len(b), same, gap, is_greedy, departure)


def judge(found: Regeneration, limit: float, limit_reason: str) -> CheckResult:
    """PASS where every sample is identical. FAIL where the engine computes something else than was recorded: log-probs
    of equal tokens are over ``limit``, or answers part far more often than rounding explains. WARN otherwise, and where
    the difference was asked for.
    """
    total = len(found.matches)
    if total == 0:
        reasons = "; ".join(f"{n} samples: {reason}" for reason, n in found.not_tested.items())
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=reasons or "the records hold no sample")
    measured = (
        f"{found.num_identical} of {total} samples identical, {found.num_matching} of {found.num_tokens} tokens match "
        f"({found.match_share:.2%}), max |log-prob difference| {found.log_prob_gap:.2g} before they part"
    )
    rule = f"bitwise; other arithmetic at most {limit:.2g} ({limit_reason})"
    if not found.departures:
        return CheckResult(NAME, Verdict.PASS, measured, rule)
    verdict, cause, step = _explain(found, limit)
    evidence = tuple(describe(m) for m in found.departures[:NUM_SHOWN])
    return CheckResult(NAME, verdict, measured, rule, evidence, cause, step)


def _explain(found: Regeneration, limit: float) -> tuple[Verdict, str, str]:
    """Verdict, likely cause and next step of departures."""
    departing = [m for m in found.matches if m.has_other_tokens]
    is_far = found.log_prob_gap > limit
    is_often = len(departing) > max(1.0, DEPARTURES_PER_TOKEN * found.num_matching)
    is_other = is_far or is_often or not found.num_matching
    known = next(iter(found.known), None)
    if known is not None:
        verdict = Verdict.FAIL if is_other and not known.is_asked else Verdict.WARN
        return verdict, "; ".join(k.text for k in found.known), known.next_step
    if not found.num_matching:
        cause = "nothing matches from the first token on: other weights, other sampling options or other seeds"
        return Verdict.FAIL, cause, LOOK
    if is_far:
        cause = "the engine holds other weights than recorded, in another model.dtype, or samples otherwise"
        return Verdict.FAIL, cause, f"{LOOK}; vime rollout judges the engine by the checkpoint's own model"
    if is_often:
        cause = "log-probs agree and answers part all the same: the seeds are not used as they were"
        return Verdict.FAIL, cause, "an engine of the same vLLM version and device, with the same [vllm] settings"
    near = sum(m.is_near_tie for m in departing)
    ties = f" ({near} of {len(departing)} part at a near-tie of two tokens)" if near else ""
    cause = f"rounding: another batch, number of threads or device gives other last bits{ties}"
    return Verdict.WARN, cause, "the same machine and [vllm] settings; on a GPU, VLLM_BATCH_INVARIANT=1"


def describe(found: SampleMatch) -> str:
    """A departing sample on one line."""
    d = found.departure
    assert d is not None
    where = f"rollout {found.rollout_id} {found.name}, response token {d.position} of {found.num_recorded}"
    recorded, again = _side(d.recorded_text, d.recorded_log_prob), _side(d.again_text, d.again_log_prob)
    return f"{where}: recorded {recorded}, again {again}"


def rows(departures: Iterable[SampleMatch]) -> list[tuple[str, str, str, str]]:
    """(sample, first departure, recorded, again) for people."""
    found = []
    for m in departures:
        d = m.departure
        assert d is not None
        place = f"{d.kind} at {d.position} of {m.num_recorded}"
        recorded, again = _side(d.recorded_text, d.recorded_log_prob), _side(d.again_text, d.again_log_prob)
        found.append((f"{m.rollout_id}: {m.name}", place, recorded, again))
    return found


def as_dict(found: SampleMatch) -> dict[str, Any]:
    """Plain values for ``--json``."""
    d = found.departure
    return {
        "rollout_id": found.rollout_id,
        "sample": found.name.removeprefix("sample "),
        "num_recorded": found.num_recorded,
        "num_again": found.num_again,
        "num_matching": found.num_matching,
        "log_prob_gap": found.log_prob_gap,
        "is_near_tie": found.is_near_tie,
        "departure": None if d is None else {name: getattr(d, name) for name in Departure.__dataclass_fields__},
    }


def _departure(
    kind: str,
    at: int,
    recorded: tuple[np.ndarray, np.ndarray],
    again: tuple[np.ndarray, np.ndarray],
    decode: Decode,
) -> Departure:
    ids = [int(ids[at]) if at < len(ids) else None for ids, _ in (recorded, again)]
    values = [float(log_probs[at]) if at < len(log_probs) else None for _, log_probs in (recorded, again)]
    texts = [decode(ids[max(0, at - AROUND) : at + 1].tolist()) for ids, _ in (recorded, again)]
    return Departure(kind, at, ids[0], ids[1], values[0], values[1], texts[0], texts[1])


def _side(text: str, log_prob: float | None) -> str:
    return f"{text!r} " + ("(ended)" if log_prob is None else f"({log_prob:.6g})")
