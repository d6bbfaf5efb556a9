"""Read a record, or one of upstream's debug dumps. Nothing in a file can run code; every defect is one clear line."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from vime.errors import UsageError
from vime.record.layout import (
    ARRAYS,
    COLUMNS,
    FORMAT,
    SCHEMA_VERSION,
    checksum,
    entry_problem,
    structure_problem,
)
from vime.record.upstream import from_upstream
from vime.types import RolloutBatch, RolloutHeader, Status


def read(path: str | os.PathLike[str], *, tokenizer_digest: str | None = None) -> RolloutBatch:
    """The rollout in ``path``, on CPU, checked against its checksum.

    UsageError (one line) if the file is missing, cut short, changed, of a newer schema, not a record at all, or holds
    Python objects; or if ``tokenizer_digest`` is given and the record was made with another tokenizer.
    """
    path = Path(path)
    content = load_plain(path)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        batch = _from_content(path, content)
    elif isinstance(content, dict) and isinstance(content.get("samples"), list) and "rollout_id" in content:
        batch = from_upstream(path, content)
    else:
        raise UsageError(f"{path} is not a rollout record", "records are written by --save-debug-rollout-data")
    recorded = batch.header.model.get("tokenizer_digest")
    if tokenizer_digest and recorded and recorded != tokenizer_digest:
        raise UsageError(
            f"{path} was recorded with another tokenizer ({recorded[:12]}, this model has {tokenizer_digest[:12]})",
            f"use the model it was made with: {batch.header.model.get('path', 'unknown')}",
        )
    return batch


def load_plain(path: Path) -> Any:
    """What lies in a file of plain data and tensors. UsageError (one line) for every other file."""
    import torch

    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise UsageError(f"{path} is cut short or not a rollout record (it has no readable zip directory)")
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"the Python object {found[1]}" if found else "something that is not plain data"
        raise UsageError(f"{path} holds {what}; vime opens files of plain data and tensors only") from error
    except Exception as error:  # a damaged file can raise anything; the cause stays chained
        raise UsageError(f"{path} is damaged and cannot be read ({type(error).__name__})") from error


def _numpy_globals() -> list[Any]:
    """What numpy arrays and scalars are pickled with, under numpy 1 and 2 names; upstream's dumps may hold them."""
    from numpy._core import multiarray

    functions = [multiarray._reconstruct, multiarray.scalar]  # type: ignore[attr-defined]
    names = [(f, f"{package}.multiarray.{f.__name__}") for f in functions for package in ("numpy.core", "numpy._core")]
    kinds = (np.int64, np.int32, np.int16, np.int8, np.uint8, np.float64, np.float32, np.float16, np.bool_)
    return [*names, np.ndarray, np.dtype, *(type(np.dtype(k)) for k in kinds)]


def _from_content(path: Path, content: dict[str, Any]) -> RolloutBatch:
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema version {version}, this vime reads up to {SCHEMA_VERSION}", "use a newer vime"
        )
    problem = _shape_problem(content)
    if problem is None:
        arrays = {name: content["arrays"][name].numpy() for name in ARRAYS}
        columns = content["columns"]
        plain = {key: content[key] for key in ("format", "schema_version", "rollout_id", "header", "columns")}
        try:
            is_intact = checksum(plain, arrays) == content["checksum"]
        except (TypeError, ValueError):  # keys or values JSON does not know: not what was written
            is_intact = False
        if not is_intact:
            raise UsageError(f"{path} was changed or damaged after it was written (its checksum differs)")
        problem = structure_problem(arrays, columns) or entry_problem(columns) or _status_problem(columns)
    if problem is not None:
        raise UsageError(f"{path} is not a rollout record of schema {SCHEMA_VERSION}: {problem}")
    rows = [dict(zip(COLUMNS, values, strict=True)) for values in zip(*(columns[n] for n in COLUMNS), strict=True)]
    return RolloutBatch(
        rollout_id=content["rollout_id"], rows=rows, header=RolloutHeader(**content["header"]), **arrays
    )


def _shape_problem(content: dict[str, Any]) -> str | None:
    import torch

    wanted = {
        "schema_version": int,
        "rollout_id": int,
        "checksum": str,
        "header": dict,
        "columns": dict,
        "arrays": dict,
    }
    for key, kind in wanted.items():
        if not isinstance(content.get(key), kind):
            return f"{key} is {type(content.get(key)).__name__}, expected {kind.__name__}"
    known = {f.name for f in fields(RolloutHeader)}
    for key, found, expected in (
        ("header", set(content["header"]), known),
        ("columns", set(content["columns"]), set(COLUMNS)),
        ("arrays", set(content["arrays"]), set(ARRAYS)),
    ):
        if found != expected:
            return f"{key} differs in {sorted(map(str, found ^ expected))}"
    for name, dtype in ARRAYS.items():
        array = content["arrays"][name]
        if not isinstance(array, torch.Tensor) or str(array.dtype) != f"torch.{dtype}" or array.dim() != 1:
            return f"arrays.{name} is not a 1-d {dtype} tensor"
    for name in COLUMNS:
        if not isinstance(content["columns"][name], list):
            return f"columns.{name} is not a list"
    return None


def _status_problem(columns: dict[str, list]) -> str | None:
    known = {str(s) for s in Status}
    for i, status in enumerate(columns["status"]):
        if status not in known:
            return f"columns.status[{i}] is {status!r}, expected one of {', '.join(sorted(known))}"
    return None
