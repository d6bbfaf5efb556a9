"""Upstream's debug dumps, ``{"rollout_id": int, "samples": [dict]}``, as a RolloutBatch.

Their per-token fields cover the response alone; ours cover prompt and response. Their ``index`` counts over the whole
run; ours counts inside the group. Fields vime has no use for are named in ``header.model["ignored_fields"]``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from vime.data.problems import listed
from vime.errors import UsageError
from vime.record.layout import is_number, plain_copy
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
        ignored |= {str(k) for k, v in row.items() if k not in USED and v not in (None, [], {}, "", 0, False)}
        reader = _Row(f"samples[{i}]", row)
        sample = reader.sample(sizes)
        problems += reader.problems
        if sample is not None:
            samples.append(sample)
    rollout_id = content["rollout_id"]
    if not isinstance(rollout_id, int):
        problems.append(f"rollout_id: {type(rollout_id).__name__}, expected int")
    if not content["samples"]:
        problems.append("samples: empty")
    if problems:
        raise UsageError(f"{path} is a dump of {len(content['samples'])} samples, but:\n{listed(problems)}")
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
        tokens = self.numbers("tokens", np.int32)
        group = self.integer("group_index")
        length = self.integer("response_length")
        if tokens is not None and length is not None and not 0 <= length < len(tokens):
            self.fail("response_length", f"{length} is not in 0..{len(tokens) - 1} (tokens has {len(tokens)})")
            length = None
        mask = self.per_response("loss_mask", length, default=1)
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
        if self.row.get("remove_sample"):
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
        value = self.row.get(key)
        if isinstance(value, np.integer) or (isinstance(value, int) and not isinstance(value, bool)):
            return int(value)
        self.fail(key, f"{_kind(value)}, expected int")
        return None

    def numbers(self, key: str, dtype: Any) -> np.ndarray | None:
        """A list, tensor or array of numbers as a 1-d array."""
        value: Any = self.row.get(key)
        if hasattr(value, "detach"):
            value = value.detach().float().numpy() if value.dtype.is_floating_point else value.numpy()
        if not isinstance(value, list | tuple | np.ndarray):
            self.fail(key, f"{_kind(value)}, expected a list of numbers")
            return None
        try:
            array = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            self.fail(key, "holds something that is not a number")
            return None
        if array.ndim != 1:
            self.fail(key, f"has shape {list(array.shape)}, expected one dimension")
            return None
        if np.issubdtype(dtype, np.integer) and (array != np.round(array)).any():
            self.fail(key, "holds numbers that are not integers")
            return None
        return array.astype(dtype)

    def per_response(self, key: str, length: int | None, default: float | None) -> np.ndarray | None:
        value = self.row.get(key)
        if value is None and length is not None and (default is not None or length == 0):
            return np.full(length, default or 0.0)
        if value is None and default is None:
            self.fail(key, "None, expected one number per response token (a missing log-prob is not 0.0)")
            return None
        array = self.numbers(key, np.float64)
        if array is not None and length is not None and len(array) != length:
            self.fail(key, f"{len(array)} entries for a response of {length} tokens")
            return None
        return array

    def label(self) -> str | None:
        value = self.row.get("label")
        if value is None or isinstance(value, str):
            return value
        if is_number(value):
            return str(value)
        self.fail("label", f"{_kind(value)}, expected str, number or None")
        return None

    def reward(self) -> float | None:
        value: Any = self.row.get("reward")
        key = "reward"
        if isinstance(value, dict):
            key = "reward.score"
            if "score" not in value:
                self.fail("reward", f"dict with keys {sorted(map(str, value))}, expected a number or a key 'score'")
                return None
            value = value["score"]
        if hasattr(value, "item") and getattr(value, "size", None) != 0:
            value = value.item() if np.ndim(value) == 0 else value
        if value is None and key == "reward":
            return None
        if is_number(value) and abs(value) != float("inf"):
            return float(value)
        if isinstance(value, bool):
            return float(value)
        self.fail(key, f"{_kind(value)}, expected a finite number")
        return None

    def status(self) -> Status:
        value = self.row.get("status", "completed")
        if isinstance(value, str) and value in {str(s) for s in Status}:
            return Status(value)
        self.fail("status", f"{value!r}, expected one of {', '.join(Status)}")
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
        value = self.row.get("metadata") or {}
        try:
            if isinstance(value, dict):
                return plain_copy(value, "metadata")
            self.fail("metadata", f"{_kind(value)}, expected a dict")
        except TypeError as error:
            self.problems.append(f"{self.where}.{error}")
        return {}

    def weight_versions(self) -> tuple[int, int]:
        value = self.row.get("weight_versions") or []
        try:
            versions = [int(v) for v in value]
        except (TypeError, ValueError):
            self.fail("weight_versions", "expected a list of numbers")
            versions = []
        return (min(versions), max(versions)) if versions else (0, 0)


def _kind(value: Any) -> str:
    if value is None:
        return "missing or None"
    return f"{value!r}" if isinstance(value, float) else type(value).__name__
