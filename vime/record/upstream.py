"""Upstream's debug dumps, ``{"rollout_id": int, "samples": [dict]}``, as a RolloutBatch.

Their per-token fields cover the response alone; ours cover prompt and response. Their ``index`` counts over the whole
run; ours counts inside the group. Fields vime has no use for are named in ``header.model["ignored_fields"]``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from vime.data.problems import listed
from vime.errors import UsageError
from vime.record.archive import one_line
from vime.record.layout import plain_copy
from vime.types import RolloutBatch, RolloutHeader, Sample, Status

USED = {
    "group_index", "index", "rollout_id", "prompt", "tokens", "response", "response_length", "label", "reward",
    "loss_mask", "rollout_log_probs", "status", "weight_versions", "metadata", "remove_sample",
}  # fmt: skip


def from_upstream(path: Path, content: dict[str, Any]) -> RolloutBatch:
    """The batch, or one UsageError that lists every problem with its key path (``samples[3].reward: ...``)."""
    problems: list[str] = []
    samples: list[Sample] = []
    ignored: set[str] = set()
    sizes: Counter[int] = Counter()
    for i, row in enumerate(content["samples"]):
        if not isinstance(row, dict):
            problems.append(f"samples[{i}]: {type(row).__name__}, expected a dict")
            continue
        ignored |= {one_line(str(k)) for k, v in row.items() if k not in USED and not _is_neutral(v)}
        reader = _Row(f"samples[{i}]", row)
        sample = reader.sample(sizes)
        problems += reader.problems
        if sample is not None:
            samples.append(sample)
    rollout_id = _item(content["rollout_id"])
    if not _is_int64(rollout_id):
        problems.append(f"rollout_id: {_kind(rollout_id)}, expected int")
    if not content["samples"]:
        problems.append("samples: empty")
    if problems:
        lines = listed([one_line(problem, 240) for problem in problems])
        raise UsageError(f"{path} is a dump of {len(content['samples'])} samples, but:\n{lines}")
    model = {"source": "upstream dump", **({"ignored_fields": ", ".join(sorted(ignored))} if ignored else {})}
    counts = {f"status_{k}": v for k, v in Counter(str(s.status) for s in samples).items()}
    return RolloutBatch.from_samples(rollout_id, samples, RolloutHeader(model=model, counts=counts))


class _Row:
    """Reads one sample's dict and collects what is wrong with it."""

    def __init__(self, where: str, row: dict[str, Any]) -> None:
        self.where = where
        self.row: dict[str, Any] = row
        self.problems: list[str] = []

    def fail(self, key: str, message: str) -> None:
        self.problems.append(f"{self.where}.{key}: {message}")

    def sample(self, sizes: Counter[int]) -> Sample | None:
        tokens = self.numbers("tokens", is_integer=True)
        group = self.integer("group_index")
        length = self.integer("response_length")
        if tokens is not None and length is not None and not 0 <= length < len(tokens):
            self.fail("response_length", f"{length} is not in 0..{len(tokens) - 1} (tokens has {len(tokens)})")
            length = None
        mask = self.per_response("loss_mask", length, default=1)
        if mask is not None and not np.isin(mask, (0, 1)).all():
            self.fail("loss_mask", "holds numbers other than 0 and 1")
        log_probs = self.per_response("rollout_log_probs", length, default=None)
        fields: dict[str, Any] = {
            "label": self.label(),
            "reward": self.reward(),
            "status": self.status(),
            "text": self.text("response"),
            "prompt_text": self.text("prompt"),
            "metadata": self.metadata(),
        }
        low, high = self.weight_versions()
        if self.problems or tokens is None or group is None or length is None or mask is None or log_probs is None:
            return None
        prompt_len = len(tokens) - length
        if not _is_neutral(self.row.get("remove_sample")):
            mask = np.zeros_like(mask)
        try:
            sample = Sample(
                group_id=group,
                index=sizes[group],
                token_ids=tokens,
                prompt_len=prompt_len,
                loss_mask=np.concatenate([np.zeros(prompt_len), mask]).astype(bool),
                rollout_log_probs=np.concatenate([np.zeros(prompt_len), np.where(mask, log_probs, 0.0)]),
                weight_version_min=low,
                weight_version_max=high,
                **fields,
            )
        except ValueError as error:
            self.problems.append(f"{self.where}: {error}")
            return None
        sizes[group] += 1
        return sample

    def integer(self, key: str) -> int | None:
        value = _item(self.row.get(key))
        if _is_int64(value):
            return int(value)
        self.fail(key, f"{_kind(value)}, expected int")
        return None

    def numbers(self, key: str, *, is_integer: bool = False) -> np.ndarray | None:
        """A list or array of numbers as float64 [n]."""
        value: Any = self.row.get(key)
        if not isinstance(value, list | tuple | np.ndarray):
            self.fail(key, f"{_kind(value)}, expected a list of numbers")
            return None
        if not isinstance(value, np.ndarray) and not all(issubclass(kind, _NUMBERS) for kind in set(map(type, value))):
            self.fail(key, "holds something that is not a number")
            return None
        try:
            array = np.asarray(value, dtype=np.float64)
        except OverflowError:
            self.fail(key, "holds a number that fits no float")
            return None
        if array.ndim != 1:
            self.fail(key, f"has shape {list(array.shape)}, expected one dimension")
            return None
        if is_integer and not ((array == np.round(array)) & (np.abs(array) < 2**31)).all():
            self.fail(key, "holds numbers that are not integers of 32 bits")
            return None
        return array

    def per_response(self, key: str, length: int | None, default: float | None) -> np.ndarray | None:
        value = self.row.get(key)
        if value is None and length is not None and (default is not None or length == 0):
            return np.full(length, default or 0.0)
        if value is None and default is None:
            self.fail(key, "None, expected one number per response token (a missing log-prob is not 0.0)")
            return None
        array = self.numbers(key)
        if array is not None and length is not None and len(array) != length:
            self.fail(key, f"{len(array)} entries for a response of {length} tokens")
            return None
        return array

    def label(self) -> str | None:
        value = _item(self.row.get("label"))
        if value is None or isinstance(value, str):
            return value
        if _is_int64(value) or (isinstance(value, float) and not math.isnan(value)):
            return str(value)
        self.fail("label", f"{_kind(value)}, expected str, number or None")
        return None

    def reward(self) -> float | None:
        value = _item(self.row.get("reward"))
        key = "reward"
        if isinstance(value, dict):
            key = "reward.score"
            if "score" not in value:
                self.fail("reward", f"dict with keys {sorted(map(str, value))}, expected a number or a key 'score'")
                return None
            value = _item(value["score"])
        if value is None and key == "reward":
            return None
        if isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value)) or _is_int64(value):
            return float(value)
        self.fail(key, f"{_kind(value)}, expected a finite number")
        return None

    def status(self) -> Status:
        value = self.row.get("status", "completed")
        if isinstance(value, str) and value in {str(s) for s in Status}:
            return Status(value)
        shown = f"'{value}'" if isinstance(value, str) else _kind(value)
        self.fail("status", f"{shown}, expected one of {', '.join(Status)}")
        return Status.FAILED

    def text(self, key: str) -> str:
        value = self.row.get(key)
        if value is None or isinstance(value, str):
            return value or ""
        if key == "prompt" and isinstance(value, list | dict):
            try:
                return json.dumps(plain_copy(value, key), ensure_ascii=False)
            except TypeError:
                pass
        self.fail(key, f"{_kind(value)}, expected str" + (" or a list of messages" if key == "prompt" else ""))
        return ""

    def metadata(self) -> dict[str, Any]:
        """With a dict as reward, its other entries are kept under "reward", as those of a user reward are."""
        value = self.row.get("metadata")
        if value is not None and not isinstance(value, dict):
            self.fail("metadata", f"{_kind(value)}, expected a dict")
            return {}
        reward = self.row.get("reward")
        extra = {k: v for k, v in reward.items() if k != "score"} if isinstance(reward, dict) else {}
        try:
            plain = plain_copy(value or {}, "metadata")
            return plain if "reward" in plain or not extra else {**plain, "reward": plain_copy(extra, "reward")}
        except TypeError as error:
            self.problems.append(f"{self.where}.{error}")
        return {}

    def weight_versions(self) -> tuple[int, int]:
        value = self.row.get("weight_versions")
        values = value.ravel().tolist() if isinstance(value, np.ndarray) else [] if value is None else value
        numbers = [_version(_item(v)) for v in values] if isinstance(values, list | tuple) else [None]
        versions = [n for n in numbers if n is not None]
        if len(versions) < len(numbers):
            self.fail("weight_versions", "expected a list of whole numbers")
        return (min(versions), max(versions)) if versions else (0, 0)


_NUMBERS = (int, float, np.integer, np.floating, np.bool_)


def _version(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    return int(value) if _is_int64(value) else None


def _item(value: Any) -> Any:
    """A number in an array without dimensions, or one of numpy, as a Python number."""
    return value.item() if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 else value


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_neutral(value: Any) -> bool:
    """None, zero or empty: a field that says nothing."""
    return value.size == 0 or not value.any() if isinstance(value, np.ndarray) else not value


def _kind(value: Any) -> str:
    if value is None:
        return "missing or None"
    return f"{value!r}" if isinstance(value, float) else type(value).__name__
