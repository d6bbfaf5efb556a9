"""What a record file holds: names, types, rules, checksum. docs/formats.md says the same in words."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from vime.types import RolloutBatch, Status

FORMAT = "vime-rollout"
SCHEMA_VERSION = 2

ARRAYS: dict[str, tuple[str, ...]] = {
    "offsets": ("int64",),
    "token_ids_low_T": ("int16",),
    "token_ids_high": ("uint8", "int16"),
    "loss_mask_bits": ("uint8",),
    "rollout_log_probs": ("float32",),
    "prompt_lens_N": ("int32",),
    "group_ids_N": ("int64",),
    "indices_N": ("int32",),
    "rewards_N": ("float64",),
    "status_N": ("uint8",),
    "seeds_N": ("int64",),
    "weight_version_min_N": ("int64",),
    "weight_version_max_N": ("int64",),
    "text_utf8": ("uint8",),
    "text_offsets": ("int64",),
    "prompt_text_utf8": ("uint8",),
    "prompt_text_offsets": ("int64",),
    "prompt_text_of_N": ("int32",),
    "label_and_metadata_json": ("uint8",),
}
"""Every array of a record with the dtypes it may have, all 1-d. T tokens, N samples."""

COLUMNS: dict[str, tuple[type, ...]] = {
    "status": (str,),
    "text": (str,),
    "prompt_text": (str,),
    "label": (str, type(None)),
    "seed": (int,),
    "weight_version_min": (int,),
    "weight_version_max": (int,),
    "metadata": (dict,),
}
"""The fields of a row of ``RolloutBatch.rows`` with the types they may have."""

MAX_DEPTH = 64
"""Levels of containers in metadata and header; what is read back may pass through recursive code."""

_MIN_INT, _END_INT = -(2**63), 2**64


def checksum(plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """blake3, hex, of the canonical JSON of ``plain``, then for each array by name its dtype, length and bytes."""
    from blake3 import blake3

    digest = blake3(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("ascii"))
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"\n{name} {array.dtype} {len(array)}\n".encode("ascii"))
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


def plain_copy(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` as None, bool, int, float, str, list and dict with str keys; TypeError names the key path otherwise.

    Tuples become lists and numpy scalars and arrays Python numbers and lists, since files hold plain containers only.
    """
    if depth > MAX_DEPTH:
        raise TypeError(f"{where[:80]}...: nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, np.ndarray | np.generic):
        return plain_copy(value.tolist(), where, depth)
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int) and not _MIN_INT <= value < _END_INT:
        raise TypeError(f"{where}: the integer {hex(value)[:30]}... does not fit 64 bits")
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, list | tuple):
        return [plain_copy(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(k, where): plain_copy(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    raise TypeError(f"{where}: {type(value).__name__} is not plain data (None, bool, int, float, str, list, dict)")


def is_plain(value: Any, depth: int = 0) -> bool:
    """True if ``plain_copy`` would change nothing."""
    kind = type(value)
    if kind is int:
        return bool(_MIN_INT <= value < _END_INT)
    if kind is dict:
        return depth < MAX_DEPTH and all(
            type(key) is str and is_plain(entry, depth + 1) for key, entry in value.items()
        )
    if kind is list:
        return depth < MAX_DEPTH and all(is_plain(entry, depth + 1) for entry in value)
    return value is None or kind in (str, float, bool)


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        shown = "of many digits" if isinstance(key, int) and abs(key) >= _END_INT else repr(key)
        raise TypeError(f"{where}: key {shown} is a {type(key).__name__}, only str can be a key")
    return str(key)


def keys_problem(where: str, found: Collection[Any], expected: Collection[str]) -> str | None:
    """What is missing or too much, or None."""
    differing = sorted({repr(key)[:40] for key in set(found) ^ set(expected)})
    shown = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
    return f"{where} differs in {shown}" if differing else None


def arrays_problem(arrays: Any, expected: Mapping[str, Sequence[str]]) -> str | None:
    """The first array that is missing, too much, not 1-d or of another dtype than expected, or None."""
    if not isinstance(arrays, dict):
        return f"arrays is {type(arrays).__name__}, expected dict"
    problem = keys_problem("arrays", arrays, expected)
    if problem is not None:
        return problem
    for name, dtypes in expected.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray) or str(array.dtype) not in dtypes or array.ndim != 1:
            return f"arrays.{name} is not a 1-d {' or '.join(dtypes)} tensor"
    return None


_HEADER: dict[str, tuple[type, type | None]] = {
    "schema_version": (int, None), "vime_version": (str, None), "config_digest": (str, None), "model": (dict, str),
    "weight_version": (int, None), "manifest_digest": (str, None), "sampling": (dict, None),
    "sampling_origin": (dict, str), "stop_token_ids": (list, int), "seed": (int, None),
    "library_versions": (dict, str), "counts": (dict, int),
}  # fmt: skip
"""Every field of the header: its type, and that of its entries."""


def header_problem(header: Any) -> str | None:
    """The first field of a header that is missing, unknown or of another type, or None."""
    if not isinstance(header, dict):
        return f"header is {type(header).__name__}, expected dict"
    problem = keys_problem("header", header, _HEADER)
    if problem is not None:
        return problem
    for name, (kind, inner) in _HEADER.items():
        value = header[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"header.{name} is {type(value).__name__}, expected {kind.__name__}"
        entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            return f"header.{name} has a key that is not str"
        if inner is not None and not all(isinstance(entry, inner) and not isinstance(entry, bool) for entry in entries):
            return f"header.{name} has an entry that is not {inner.__name__}"
        if not is_plain(value):
            return f"header.{name} is not plain data of 64-bit numbers, at most {MAX_DEPTH} levels deep"
    return None


def sample_name(batch: RolloutBatch, i: int) -> str:
    return f"sample {batch.group_ids_N[i]}/{batch.indices_N[i]}"


def _is_sampled_in_prompt(batch: RolloutBatch) -> bool:
    starts = batch.offsets[:-1]
    bounds = np.stack([starts, starts + batch.prompt_lens_N], axis=1).ravel()
    bounds = bounds[: None if bounds[-1] < len(batch.loss_mask_T) else -1]
    return bool(np.maximum.reduceat(batch.loss_mask_T.view(np.uint8), bounds)[::2].any())


def batch_problem(batch: RolloutBatch) -> str | None:
    """The first broken rule of lengths and ranges, or None. Vectorised: thousands of samples cost milliseconds."""
    offsets, num_tokens, num_samples = batch.offsets, len(batch.token_ids_T), len(batch.group_ids_N)
    for name in (
        "offsets",
        "token_ids_T",
        "loss_mask_T",
        "rollout_log_probs_T",
        "prompt_lens_N",
        "indices_N",
        "rewards_N",
    ):
        want = {"T": num_tokens, "N": num_samples}.get(name.rsplit("_", 1)[-1], num_samples + 1)
        if len(getattr(batch, name)) != want:
            return f"arrays.{name} has {len(getattr(batch, name))} entries, expected {want}"
    if offsets[0] != 0 or offsets[-1] != num_tokens or (offsets[1:] <= offsets[:-1]).any():
        return f"arrays.offsets must rise from 0 to {num_tokens}"
    lengths = np.diff(offsets)
    if ((batch.prompt_lens_N < 1) | (batch.prompt_lens_N > lengths)).any():
        return "arrays.prompt_lens_N must lie in 1..length of the sample"
    if num_samples and _is_sampled_in_prompt(batch):
        return "arrays.loss_mask_T is True inside a prompt"
    if not math.isfinite(float(batch.rollout_log_probs_T.sum(dtype=np.float64))):
        at = np.flatnonzero(~np.isfinite(batch.rollout_log_probs_T))
        for i in np.unique(np.searchsorted(offsets, at, side="right") - 1).tolist():
            if Status(batch.rows[i]["status"]).is_trainable:
                return f"{sample_name(batch, i)} is {batch.rows[i]['status']} and has log-probs that are not finite"
    return None
