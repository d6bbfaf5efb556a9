"""Records of schema 1: columns as lists in the pickle, arrays as in memory, blake2b. Read, never written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from vime.record.layout import COLUMNS, MAX_DEPTH, arrays_problem, batch_problem, header_problem, is_plain, keys_problem
from vime.types import RolloutBatch, RolloutHeader, Status

ARRAYS: dict[str, tuple[str, ...]] = {
    "offsets": ("int64",),
    "token_ids_T": ("int32",),
    "loss_mask_T": ("bool",),
    "rollout_log_probs_T": ("float32",),
    "prompt_lens_N": ("int32",),
    "group_ids_N": ("int64",),
    "indices_N": ("int32",),
    "rewards_N": ("float64",),
}
"""Every array with its dtype, in the order of the checksum."""


def problem_of(content: Mapping[str, Any]) -> str | None:
    """The first thing that is missing or of the wrong type, before the checksum is known to hold."""
    if not isinstance(content.get("columns"), dict):
        return f"columns is {type(content.get('columns')).__name__}, expected dict"
    found = keys_problem("columns", content["columns"], COLUMNS) or arrays_problem(content["arrays"], ARRAYS)
    if found is not None:
        return found
    for name, column in content["columns"].items():
        if not isinstance(column, list):
            return f"columns.{name} is not a list"
    return header_problem(content["header"]) or _entry_problem(
        content["columns"], len(content["arrays"]["group_ids_N"])
    )


def checksum(content: Mapping[str, Any]) -> str:
    """blake2b-256, hex, of the canonical JSON of all but the arrays, then of each array "name dtype length", bytes."""
    plain = {key: content[key] for key in ("format", "schema_version", "rollout_id", "header", "columns")}
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("ascii"))
    for name, (dtype,) in ARRAYS.items():
        array = np.ascontiguousarray(content["arrays"][name])
        digest.update(f"\n{name} {dtype} {len(array)}\n".encode("ascii"))
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


def batch_of(content: Mapping[str, Any]) -> RolloutBatch | str:
    """The batch, or the first broken rule of lengths and ranges."""
    columns = content["columns"]
    rows = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*(columns[n] for n in COLUMNS), strict=True)]
    arrays = {name: np.array(content["arrays"][name]) for name in ARRAYS}
    batch = RolloutBatch(
        rollout_id=content["rollout_id"], rows=rows, header=RolloutHeader(**content["header"]), **arrays
    )
    return batch_problem(batch) or batch


def _entry_problem(columns: Mapping[str, list], num_samples: int) -> str | None:
    """The first entry of a column whose type is not the documented one, or None."""
    for name, types in COLUMNS.items():
        if len(columns[name]) != num_samples:
            return f"columns.{name} has {len(columns[name])} entries, expected {num_samples}"
        for i, entry in enumerate(columns[name]):
            if not isinstance(entry, types) or isinstance(entry, bool):
                expected = " or ".join("None" if t is type(None) else t.__name__ for t in types)
                return f"columns.{name}[{i}] is {type(entry).__name__}, expected {expected}"
            if not is_plain(entry):
                return f"columns.{name}[{i}] is not plain data of 64-bit numbers, at most {MAX_DEPTH} levels deep"
    known = {str(s) for s in Status}
    for i, status in enumerate(columns["status"]):
        if status not in known:
            return f"columns.status[{i}] is none of {', '.join(sorted(known))}"
    return None
