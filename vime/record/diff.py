"""What differs between two records of the same prompts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vime.record.export import finite
from vime.record.layout import COLUMNS
from vime.record.names import sample_id
from vime.types import RolloutBatch


@dataclass(frozen=True, slots=True)
class SampleDiff:
    """One sample that differs.

    token_match     equal leading response tokens / length of the longer response; 0.0 if the prompts differ
    position        first index of ``token_ids`` where they differ, None if equal; ``is_in_prompt`` goes with it
    token_ids       the ids there, None where one of them has ended
    log_prob_max/mean  of |a - b| in nats over sampled tokens of the common prefix; None if there are none; infinite
                       where one is a number and the other is not
    other           names of the columns that differ besides
    """

    name: str
    token_match: float
    position: int | None
    response_position: int | None
    is_in_prompt: bool
    token_ids: tuple[int | None, int | None]
    rewards: tuple[float | None, float | None]
    statuses: tuple[str, str]
    log_prob_max: float | None
    log_prob_mean: float | None
    other: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        same = self.rewards[0] == self.rewards[1] and self.statuses[0] == self.statuses[1]
        return self.position is None and same and not self.log_prob_max and not self.other


@dataclass(frozen=True, slots=True)
class RecordDiff:
    """``header``: (dotted field, a, b) where they differ. ``samples``: those that differ, in the order of a."""

    rollout_ids: tuple[int, int]
    header: list[tuple[str, Any, Any]]
    num_samples: tuple[int, int]
    only_a: list[str]
    only_b: list[str]
    prompts_only_a: list[int]
    prompts_only_b: list[int]
    is_reordered: bool
    num_common: int
    mean_token_match: float
    samples: list[SampleDiff]

    @property
    def is_equal(self) -> bool:
        is_same_set = not (self.only_a or self.only_b or self.is_reordered)
        return is_same_set and not self.header and not self.samples

    def summary(self) -> str:
        """One line."""
        if self.is_equal:
            return f"rollout {self.rollout_ids[0]}: equal, {self.num_common} samples"
        parts = [f"{len(self.samples)} of {self.num_common} samples differ"]
        parts += [f"token match {self.mean_token_match:.4f}"] if self.num_common else []
        if departed := [s for s in self.samples if s.position is not None]:
            parts.append(f"{len(departed)} depart, first {departed[0].name}")
        if largest := max((s.log_prob_max or 0.0 for s in self.samples), default=0.0):
            parts.append(f"log-probs by up to {largest:.3g} nats")
        if rewards := sum(s.rewards[0] != s.rewards[1] for s in self.samples):
            parts.append(f"{rewards} rewards")
        parts += [f"{len(names)} samples only in {side}" for side, names in self._only() if names]
        parts += ["another order"] if self.is_reordered else []
        parts += [f"header: {', '.join(name for name, _, _ in self.header)}"] if self.header else []
        return f"rollout {self.rollout_ids[0]}: {'; '.join(parts)}"

    def _only(self) -> list[tuple[str, list[str]]]:
        return [("A", self.only_a), ("B", self.only_b)]


def diff(a: RolloutBatch, b: RolloutBatch) -> RecordDiff:
    """Compare two records, sample by sample. A name that occurs twice is paired in order of its occurrence."""
    keys_a, keys_b = _keys(a), _keys(b)
    common = [key for key in keys_a if key in keys_b]
    found = [_sample_diff(a, keys_a[key], b, keys_b[key]) for key in common]
    groups = [set(batch.group_ids_N.tolist()) for batch in (a, b)]
    return RecordDiff(
        rollout_ids=(a.rollout_id, b.rollout_id),
        header=_header_diff(a, b),
        num_samples=(len(a), len(b)),
        only_a=[sample_id(*key[:2]) for key in keys_a if key not in keys_b],
        only_b=[sample_id(*key[:2]) for key in keys_b if key not in keys_a],
        prompts_only_a=sorted(groups[0] - groups[1]),
        prompts_only_b=sorted(groups[1] - groups[0]),
        is_reordered=common != [key for key in keys_b if key in keys_a],
        num_common=len(common),
        mean_token_match=float(np.mean([s.token_match for s in found])) if found else float("nan"),
        samples=[s for s in found if not s.is_equal],
    )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of equal leading entries."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _keys(batch: RolloutBatch) -> dict[tuple[int, int, int], int]:
    """(group, index, how often it was there before) -> number of the sample."""
    seen: Counter[tuple[int, int]] = Counter()
    keys = {}
    for i, name in enumerate(zip(batch.group_ids_N.tolist(), batch.indices_N.tolist(), strict=True)):
        keys[(*name, seen[name])] = i
        seen[name] += 1
    return keys


def _sample_diff(a: RolloutBatch, i: int, b: RolloutBatch, j: int) -> SampleDiff:
    (ids_a, mask_a, lp_a), (ids_b, mask_b, lp_b) = _tokens(a, i), _tokens(b, j)
    prompts = int(a.prompt_lens_N[i]), int(b.prompt_lens_N[j])
    n = common_prefix(ids_a, ids_b)
    is_departed = n < max(len(ids_a), len(ids_b))
    # A prompt of another length is another prompt, even where the ids agree.
    is_in_prompt = n < max(prompts) if is_departed else prompts[0] != prompts[1]
    longest = max(len(ids_a), len(ids_b)) - prompts[0]
    both = mask_a[:n] & mask_b[:n]
    changes = _changes(lp_a[:n][both].astype(np.float64), lp_b[:n][both].astype(np.float64))
    return SampleDiff(
        name=sample_id(a.group_ids_N[i], a.indices_N[i]),
        token_match=0.0 if is_in_prompt else (n - prompts[0]) / longest if longest else 1.0,
        position=n if is_departed else None,
        response_position=n - prompts[0] if is_departed and not is_in_prompt else None,
        is_in_prompt=is_in_prompt,
        token_ids=(_at(ids_a, n), _at(ids_b, n)),
        rewards=(_number(a.rewards_N[i]), _number(b.rewards_N[j])),
        statuses=(a.rows[i]["status"], b.rows[j]["status"]),
        log_prob_max=float(changes.max()) if len(changes) else None,
        log_prob_mean=float(changes.mean()) if len(changes) else None,
        other=_others(a.rows[i], b.rows[j], prompts, bool((mask_a[:n] != mask_b[:n]).any())),
    )


def _changes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # inf - inf
        changes = np.abs(a - b)
    changes[np.isnan(changes)] = np.inf
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, changes)


def _tokens(batch: RolloutBatch, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    part = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
    return batch.token_ids_T[part], batch.loss_mask_T[part], batch.rollout_log_probs_T[part]


def _others(row_a: dict[str, Any], row_b: dict[str, Any], prompts: tuple[int, int], is_masked: bool) -> tuple[str, ...]:
    names = [name for name in COLUMNS if name != "status" and not _is_same(row_a[name], row_b[name])]
    names += ["prompt_len"] if prompts[0] != prompts[1] else []
    return (*names, *(["loss_mask"] if is_masked else []))


def _is_same(a: Any, b: Any) -> bool:
    """Equal, not-a-number counting as equal to itself, and 1, 1.0 and True as three values."""
    if type(a) is type(b) and not isinstance(a, dict | list | float):
        return a == b
    return json.dumps(finite(a), sort_keys=True) == json.dumps(finite(b), sort_keys=True)


def _header_diff(a: RolloutBatch, b: RolloutBatch) -> list[tuple[str, Any, Any]]:
    flat_a, flat_b = ({"rollout_id": x.rollout_id, **flat(asdict(x.header))} for x in (a, b))
    names = [*flat_a, *(name for name in flat_b if name not in flat_a)]
    pairs = [(name, flat_a.get(name), flat_b.get(name)) for name in names]
    return [(name, x, y) for name, x, y in pairs if not _is_same(x, y)]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        found |= inner
    return found


def _at(ids: np.ndarray, n: int) -> int | None:
    return int(ids[n]) if n < len(ids) else None


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
