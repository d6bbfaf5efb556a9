"""Records as JSONL and parquet: one row per sample with everything the record has of it, under the record's names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vime.errors import UsageError
from vime.files import whole_file
from vime.record.layout import COLUMNS
from vime.record.names import sample_id
from vime.types import RolloutBatch

Selected = Iterable[tuple[RolloutBatch, Sequence[int]]]
"""Rollouts with the numbers of the samples that are wanted of each, one rollout after the other."""

TOKEN_ARRAYS = ("token_ids", "loss_mask", "rollout_log_probs")
"""Lists of L entries in each row, prompt first; rollout_log_probs in nats, exactly the float32 of the record."""


def write_jsonl(path: Path, selected: Selected) -> int:
    """One JSON object per line; not-finite numbers are the strings "nan", "inf", "-inf". Returns the number of rows."""
    num_rows = 0
    with whole_file(path) as file:
        for batch, wanted in selected:
            for i in wanted:
                file.write(_line(_row(batch, i)))
            num_rows += len(wanted)
    return num_rows


def write_parquet(path: Path, selected: Selected) -> int:
    """One row per sample, one row group per rollout; ``metadata`` is JSON text. Returns the number of rows.

    UsageError without pyarrow, or for a text that is not valid Unicode, which parquet cannot hold.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError("--export parquet: needs pyarrow", "pip install 'vime[cpu]'") from None
    num_rows, schema = 0, _schema(pyarrow)
    with whole_file(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for batch, wanted in selected:
            writer.write_table(pyarrow.table(_columns(pyarrow, batch, np.asarray(wanted, np.int64)), schema=schema))
            num_rows += len(wanted)
    return num_rows


def _row(batch: RolloutBatch, i: int) -> dict[str, Any]:
    a, b = int(batch.offsets[i]), int(batch.offsets[i + 1])
    reward = float(batch.rewards_N[i])
    return {
        "rollout_id": batch.rollout_id,
        "group_id": int(batch.group_ids_N[i]),
        "index": int(batch.indices_N[i]),
        "prompt_len": int(batch.prompt_lens_N[i]),
        "reward": None if math.isnan(reward) else reward,
        **batch.rows[i],
        **{name: getattr(batch, f"{name}_T")[a:b].tolist() for name in TOKEN_ARRAYS},
    }


def _line(row: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(row), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which only JSON's \ud800 can carry
        return json.dumps(json.loads(text)).encode() + b"\n"


def finite(value: Any) -> Any:
    """``value`` as JSON can hold it: nan and the infinities become the strings "nan", "inf", "-inf"."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _schema(pa: Any) -> Any:
    kinds = {
        "rollout_id": pa.int64(),
        "group_id": pa.int64(),
        "index": pa.int32(),
        "prompt_len": pa.int32(),
        "reward": pa.float64(),
        **{name: pa.int64() if types == (int,) else pa.string() for name, types in COLUMNS.items()},
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "rollout_log_probs": pa.list_(pa.float32()),
    }
    return pa.schema(list(kinds.items()))


def _columns(pa: Any, batch: RolloutBatch, wanted: np.ndarray) -> dict[str, Any]:
    rewards = batch.rewards_N[wanted]
    lengths = batch.lengths_N[wanted]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    token_index = np.repeat(batch.offsets[:-1][wanted] - offsets[:-1], lengths) + np.arange(offsets[-1])
    return {
        "rollout_id": pa.array(np.full(len(wanted), batch.rollout_id, np.int64)),
        "group_id": pa.array(batch.group_ids_N[wanted]),
        "index": pa.array(batch.indices_N[wanted]),
        "prompt_len": pa.array(batch.prompt_lens_N[wanted]),
        "reward": pa.array(rewards, mask=np.isnan(rewards)),
        **{name: _texts(pa, batch, wanted, name) for name in COLUMNS},
        **{
            name: pa.ListArray.from_arrays(
                pa.array(offsets.astype(np.int32)), pa.array(getattr(batch, f"{name}_T")[token_index])
            )
            for name in TOKEN_ARRAYS
        },
    }


def _texts(pa: Any, batch: RolloutBatch, wanted: np.ndarray, name: str) -> Any:
    entries = [batch.rows[i][name] for i in wanted.tolist()]
    if name == "metadata":
        return pa.array([json.dumps(finite(entry)) for entry in entries], pa.string())
    try:
        return pa.array(entries, pa.int64() if COLUMNS[name] == (int,) else pa.string())
    except UnicodeEncodeError:
        bad = next(i for i, entry in zip(wanted.tolist(), entries, strict=True) if not _is_unicode(entry))
        where = sample_id(batch.group_ids_N[bad], batch.indices_N[bad])
        raise UsageError(
            f"--export parquet: sample {where}: {name} holds half a surrogate pair", "use --export jsonl"
        ) from None


def _is_unicode(text: str | None) -> bool:
    return text is None or not any("\ud800" <= character <= "\udfff" for character in text)
