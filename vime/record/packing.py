"""A batch as the arrays of a record, and back. What is equal or zero by rule is there once or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from vime.record.layout import ARRAYS, batch_problem, is_plain, plain_copy, sample_name
from vime.types import RolloutBatch, RolloutHeader, Status

STATUSES = (Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)
"""``status_N`` counts in this order."""

_AS_THEY_ARE = ("offsets", "prompt_lens_N", "group_ids_N", "indices_N", "rewards_N")
_WHOLE_NUMBERS = {
    "seed": "seeds_N",
    "weight_version_min": "weight_version_min_N",
    "weight_version_max": "weight_version_max_N",
}


def pack(batch: RolloutBatch) -> dict[str, np.ndarray]:
    """The arrays of a record, none of which shares memory with the batch.

    TypeError names sample and key path where metadata is not plain data or a number does not fit.
    """
    texts = Texts.of(_column(batch, "text", (str,)))
    prompts = Texts.of(_column(batch, "prompt_text", (str,)), shared=True)
    return {
        **{name: np.array(getattr(batch, name), dtype=ARRAYS[name][0]) for name in _AS_THEY_ARE},
        **_pack_tokens(batch),
        "status_N": np.array([STATUSES.index(status) for status in _column(batch, "status", (str,))], dtype=np.uint8),
        **{array: _whole_numbers(batch, name) for name, array in _WHOLE_NUMBERS.items()},
        "text_utf8": texts.utf8,
        "text_offsets": texts.offsets,
        "prompt_text_utf8": prompts.utf8,
        "prompt_text_offsets": prompts.offsets,
        "prompt_text_of_N": prompts.of_N,
        "label_and_metadata_json": _pack_json(batch),
    }


def _pack_tokens(batch: RolloutBatch) -> dict[str, np.ndarray]:
    ids_T, mask_T = batch.token_ids_T, batch.loss_mask_T
    low, top = (int(ids_T.min()), int(ids_T.max())) if len(ids_T) else (0, 0)
    high_T = ids_T[: 0 if low >= 0 and top < 1 << 16 else len(ids_T)] >> 16
    bits_T = batch.rollout_log_probs_T.view(np.uint32)
    bits_M = bits_T[mask_T]
    is_zero_off_mask = np.count_nonzero(bits_T) == np.count_nonzero(bits_M)
    return {
        "token_ids_low_T": ids_T.astype(np.int16),  # the lower 16 bits
        "token_ids_high": high_T.astype(np.uint8 if low >= 0 and top < 1 << 24 else np.int16),
        "loss_mask_bits": np.packbits(mask_T, bitorder="little"),
        "rollout_log_probs": (bits_M if is_zero_off_mask else bits_T.copy()).view(np.float32),
    }


def _whole_numbers(batch: RolloutBatch, name: str) -> np.ndarray:
    values = _column(batch, name, (int, np.integer))
    for i, value in enumerate(values):
        if not -(2**63) <= value < 2**63:
            raise TypeError(f"{sample_name(batch, i)} {name}: {hex(value)[:30]} does not fit 64 bits")
    return np.array(values, dtype=np.int64)


def _pack_json(batch: RolloutBatch) -> np.ndarray:
    metadata = _column(batch, "metadata", (dict,))
    plain = [m if is_plain(m) else plain_copy(m, f"{sample_name(batch, i)} metadata") for i, m in enumerate(metadata)]
    content = {"label": _column(batch, "label", (str, type(None))), "metadata": plain}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return np.frombuffer(bytearray(text, "utf-8", "surrogatepass"), np.uint8)


def _column(batch: RolloutBatch, name: str, types: tuple[type, ...]) -> list[Any]:
    """One field of all rows. TypeError names the first sample with a value of another type."""
    values = [row[name] for row in batch.rows]
    for i, value in enumerate(values):
        if not isinstance(value, types):
            raise TypeError(f"{sample_name(batch, i)} {name}: {type(value).__name__}, expected {types[0].__name__}")
    return values


@dataclass(frozen=True, slots=True)
class Texts:
    """Strings of N samples as UTF-8, one after the other; a string that several samples share is there once.

    utf8     uint8, lone surrogates encoded like other characters
    offsets  int64, one more than strings
    of_N     int32: the string of each sample
    """

    utf8: np.ndarray
    offsets: np.ndarray
    of_N: np.ndarray

    @classmethod
    def of(cls, strings: Sequence[str], *, shared: bool = False) -> Texts:
        """``shared``: look for equal strings."""
        places = {string: i for i, string in enumerate(dict.fromkeys(strings))} if shared else {}
        parts = [string.encode("utf-8", "surrogatepass") for string in (places if shared else strings)]
        return cls(
            utf8=np.frombuffer(bytearray().join(parts), np.uint8),
            offsets=np.cumsum([0, *map(len, parts)], dtype=np.int64),
            of_N=np.array([places[s] for s in strings] if shared else range(len(strings)), dtype=np.int32),
        )

    def problem(self, name: str) -> str | None:
        """The first broken rule, or None."""
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(self.utf8):
            return f"arrays.{name}_offsets must go from 0 to {len(self.utf8)}"
        if (self.offsets[1:] < self.offsets[:-1]).any():
            return f"arrays.{name}_offsets must not fall"
        if len(self.of_N) and not 0 <= self.of_N.min() <= self.of_N.max() < len(self.offsets) - 1:
            return f"arrays.{name}_of_N must lie in 0..{len(self.offsets) - 2}"
        return None

    def strings(self) -> list[str]:
        """One per sample; equal ones are one object. UnicodeDecodeError if the bytes are not UTF-8."""
        data, ends = self.utf8.tobytes(), self.offsets.tolist()
        parts = [data[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(ends)]
        return [parts[i] for i in self.of_N.tolist()]


def unpack(rollout_id: int, header: RolloutHeader, arrays: Mapping[str, np.ndarray]) -> RolloutBatch | str:
    """The batch out of arrays of the right names and dtypes, or the first broken rule."""
    num_tokens, num_samples = len(arrays["token_ids_low_T"]), len(arrays["group_ids_N"])
    for name, array in arrays.items():
        want = {"T": num_tokens, "N": num_samples}.get(name.rsplit("_", 1)[-1], len(array))
        if len(array) != want:
            return f"arrays.{name} has {len(array)} entries, expected {want}"
    tokens = _unpack_tokens(arrays)
    rows = _unpack_rows(arrays)
    if isinstance(tokens, str) or isinstance(rows, str):
        return tokens if isinstance(tokens, str) else str(rows)
    batch = RolloutBatch(
        rollout_id=rollout_id,
        header=header,
        rows=rows,
        **tokens,
        **{name: np.array(arrays[name]) for name in _AS_THEY_ARE},
    )
    return batch_problem(batch) or batch


def _unpack_tokens(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | str:
    low_T, high, bits = arrays["token_ids_low_T"], arrays["token_ids_high"], arrays["loss_mask_bits"]
    num_tokens = len(low_T)
    if len(high) not in (0, num_tokens):
        return f"arrays.token_ids_high has {len(high)} entries, expected {num_tokens} or none"
    if len(bits) != (num_tokens + 7) // 8:
        return f"arrays.loss_mask_bits has {len(bits)} entries, expected {(num_tokens + 7) // 8}"
    ids_T = low_T.view(np.uint16).astype(np.int32)
    if len(high):
        ids_T |= high.astype(np.int32) << 16
    mask_T = np.unpackbits(bits, count=num_tokens, bitorder="little").view(bool)
    log_probs, log_probs_T = arrays["rollout_log_probs"], np.zeros(num_tokens, np.float32)
    num_sampled = int(np.count_nonzero(mask_T))
    if len(log_probs) not in (num_sampled, num_tokens):
        return f"arrays.rollout_log_probs has {len(log_probs)} entries, expected {num_sampled} or {num_tokens}"
    log_probs_T[mask_T if len(log_probs) == num_sampled else slice(None)] = log_probs
    return {"token_ids_T": ids_T, "loss_mask_T": mask_T, "rollout_log_probs_T": log_probs_T}


def _unpack_rows(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]] | str:
    num_samples = len(arrays["group_ids_N"])
    texts = Texts(arrays["text_utf8"], arrays["text_offsets"], np.arange(num_samples))
    prompts = Texts(*(arrays[f"prompt_text_{part}"] for part in ("utf8", "offsets", "of_N")))
    if len(texts.offsets) != num_samples + 1:
        return f"arrays.text_offsets has {len(texts.offsets)} entries, expected {num_samples + 1}"
    problem = texts.problem("text") or prompts.problem("prompt_text")
    if problem is not None:
        return problem
    if (arrays["status_N"] >= len(STATUSES)).any():
        return f"arrays.status_N must lie in 0..{len(STATUSES) - 1}"
    plain = _unpack_json(arrays["label_and_metadata_json"], num_samples)
    if isinstance(plain, str):
        return plain
    try:
        strings = texts.strings(), prompts.strings()
    except UnicodeDecodeError:
        return "arrays.text_utf8 or arrays.prompt_text_utf8 is not UTF-8"
    statuses = [str(STATUSES[i]) for i in arrays["status_N"].tolist()]
    numbers = (arrays[array].tolist() for array in _WHOLE_NUMBERS.values())
    names = ("status", "text", "prompt_text", "label", *_WHOLE_NUMBERS, "metadata")
    columns = (statuses, *strings, plain["label"], *numbers, plain["metadata"])
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _unpack_json(data: np.ndarray, num_samples: int) -> dict[str, list[Any]] | str:
    name = "arrays.label_and_metadata_json"
    try:
        content = json.loads(data.tobytes().decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return f"{name} is not JSON"
    if not isinstance(content, dict) or set(content) != {"label", "metadata"}:
        return f"{name} is not an object of label and metadata"
    for key, types in {"label": (str, type(None)), "metadata": (dict,)}.items():
        column = content[key]
        if not isinstance(column, list) or len(column) != num_samples:
            return f"{name}: {key} is not a list of {num_samples}"
        if not all(isinstance(entry, types) for entry in column):
            return f"{name}: {key} has an entry of another type"
    return content
