"""What a record file holds: names, types, canonical bytes, checksum. docs/formats.md is the same in words."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vime.types import RolloutBatch

FORMAT = "vime-rollout"
SCHEMA_VERSION = 1

ARRAYS: dict[str, str] = {
    "offsets": "int64",
    "token_ids_T": "int32",
    "loss_mask_T": "bool",
    "rollout_log_probs_T": "float32",
    "prompt_lens_N": "int32",
    "group_ids_N": "int64",
    "indices_N": "int32",
    "rewards_N": "float64",
}
"""Every array of a record with its dtype, in the order of the checksum. Suffix: T tokens, N samples; offsets is N+1."""

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
"""Every per-sample column with the types its entries may have."""


def arrays_of(batch: RolloutBatch) -> dict[str, np.ndarray]:
    """The arrays of a batch in the order and with the dtypes of the format, contiguous, little-endian."""
    return {name: np.ascontiguousarray(getattr(batch, name), dtype=dtype) for name, dtype in ARRAYS.items()}


def checksum(plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str] = ARRAYS) -> str:
    """blake2b-256, hex, of the canonical JSON of ``plain``, then for each array "name dtype length" and its bytes."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("ascii"))
    for name, dtype in dtypes.items():
        digest.update(f"\n{name} {dtype} {len(arrays[name])}\n".encode("ascii"))
        digest.update(arrays[name].view(np.uint8).data)
    return digest.hexdigest()


def plain_copy(value: Any, where: str) -> Any:
    """``value`` as None, bool, int, float, str, list and dict with str keys; TypeError names the key path otherwise.

    Tuples become lists and numpy scalars and arrays Python numbers and lists, since files hold plain containers only.
    """
    if isinstance(value, np.ndarray | np.generic):
        return plain_copy(value.tolist(), where)
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TypeError(f"{where}: the integer {str(value)[:30]}... does not fit 64 bits")
    if isinstance(value, int | float):
        return value
    if isinstance(value, list | tuple):
        return [plain_copy(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(k, where): plain_copy(v, f"{where}.{k}") for k, v in value.items()}
    raise TypeError(f"{where}: {type(value).__name__} is not plain data (None, bool, int, float, str, list, dict)")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where}: key {key!r} is a {type(key).__name__}, only str can be a key")
    return str(key)


def structure_problem(arrays: Mapping[str, np.ndarray], columns: Mapping[str, list]) -> str | None:
    """The first broken rule of lengths and ranges, or None. Vectorised: thousands of samples cost milliseconds."""
    offsets, num_samples, num_tokens = arrays["offsets"], len(arrays["group_ids_N"]), len(arrays["token_ids_T"])
    for name, array in arrays.items():
        want = {"T": num_tokens, "N": num_samples}.get(name.rsplit("_", 1)[-1], num_samples + 1)
        if array.shape != (want,):
            return f"arrays.{name} has shape {list(array.shape)}, expected [{want}]"
    for name, column in columns.items():
        if len(column) != num_samples:
            return f"columns.{name} has {len(column)} entries, expected {num_samples}"
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != num_tokens or (lengths < 1).any():
        return f"arrays.offsets must rise from 0 to {num_tokens}"
    if ((arrays["prompt_lens_N"] < 1) | (arrays["prompt_lens_N"] > lengths)).any():
        return "arrays.prompt_lens_N must lie in 1..length of the sample"
    position_T = np.arange(num_tokens) - np.repeat(offsets[:-1], lengths)
    if (arrays["loss_mask_T"] & (position_T < np.repeat(arrays["prompt_lens_N"], lengths))).any():
        return "arrays.loss_mask_T is True inside a prompt"
    return None


def entry_problem(columns: Mapping[str, list]) -> str | None:
    """The first entry of a column whose type is not the documented one, or None."""
    for name, types in COLUMNS.items():
        for i, entry in enumerate(columns[name]):
            if not isinstance(entry, types) or (isinstance(entry, bool) and bool not in types):
                expected = " or ".join("None" if t is type(None) else t.__name__ for t in types)
                return f"columns.{name}[{i}] is {type(entry).__name__}, expected {expected}"
    return None


def is_number(value: Any) -> bool:
    """A finite or infinite Python number that is no bool and no NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
