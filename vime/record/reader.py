"""Read a record, or one of upstream's debug dumps. Nothing in a file can run code; every defect is one clear line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.errors import UsageError
from vime.record import schema1
from vime.record.archive import format_of, load_plain, one_line
from vime.record.layout import ARRAYS, FORMAT, SCHEMA_VERSION, arrays_problem, checksum, header_problem, is_plain
from vime.record.packing import unpack
from vime.record.template import WRITTEN_BY
from vime.record.upstream import from_upstream
from vime.types import RolloutBatch, RolloutHeader


def read(path: str | os.PathLike[str], *, tokenizer_digest: str | None = None) -> RolloutBatch:
    """The rollout in ``path``, on CPU, checked against its checksum.

    UsageError (one line) if the file is missing, cut short, changed, of a newer schema, not a record at all, or holds
    Python objects; or if ``tokenizer_digest`` is given and the record was made with another tokenizer.
    """
    path = Path(path)
    content = load_plain(path)
    if format_of(content) == FORMAT:
        batch = _from_content(path, content)
    elif isinstance(content, dict) and isinstance(content.get("samples"), list) and "rollout_id" in content:
        batch = from_upstream(path, content)
    else:
        says = f" (it says that it is {one_line(format_of(content))})" if format_of(content) else ""
        raise UsageError(f"{path} is not a rollout record{says}", WRITTEN_BY)
    recorded = batch.header.model.get("tokenizer_digest")
    if tokenizer_digest and recorded and recorded != tokenizer_digest:
        raise UsageError(
            f"{path} was recorded with another tokenizer ({recorded[:12]}, this model has {tokenizer_digest[:12]})",
            f"use the model it was made with: {batch.header.model.get('path', 'unknown')}",
        )
    return batch


def _from_content(path: Path, content: dict[str, Any]) -> RolloutBatch:
    check_version(path, content, SCHEMA_VERSION)
    is_first = content["schema_version"] == 1
    problem = _top_problem(content) or (schema1.problem_of(content) if is_first else _problem(content))
    if problem is None:
        check_sum(path, content, schema1.checksum if is_first else _checksum)
        batch = schema1.batch_of(content) if is_first else _unpacked(content)
        if isinstance(batch, RolloutBatch):
            return batch
        problem = batch
    raise UsageError(f"{path} is not a rollout record of schema {content['schema_version']}: {problem}")


def check_version(path: Path, content: dict[str, Any], newest: int) -> None:
    """UsageError unless ``schema_version`` is one of 1..newest."""
    version = content.get("schema_version")
    if type(version) is not int or not 1 <= version < 2**31:
        raise UsageError(f"{path} has no valid schema version")
    if version > newest:
        raise UsageError(f"{path} has schema version {version}, this vime reads up to {newest}", "use a newer vime")


def check_sum(path: Path, content: dict[str, Any], compute: Callable[[dict[str, Any]], str]) -> None:
    """UsageError unless ``compute(content)`` is the file's checksum."""
    try:
        is_intact = compute(content) == content["checksum"]
    except (TypeError, ValueError, RecursionError):  # keys or values JSON does not know: not what was written
        is_intact = False
    if not is_intact:
        raise UsageError(f"{path} was changed or damaged after it was written (its checksum differs)")


def _top_problem(content: dict[str, Any]) -> str | None:
    for key, kind in {"rollout_id": int, "checksum": str, "header": dict, "arrays": dict}.items():
        if not isinstance(content.get(key), kind) or isinstance(content.get(key), bool):
            return f"{key} is {type(content.get(key)).__name__}, expected {kind.__name__}"
    return None if is_plain(content["rollout_id"]) else "rollout_id does not fit 64 bits"


def _problem(content: dict[str, Any]) -> str | None:
    return arrays_problem(content["arrays"], ARRAYS) or header_problem(content["header"])


def _checksum(content: dict[str, Any]) -> str:
    plain = {key: content[key] for key in ("format", "schema_version", "rollout_id", "header")}
    return checksum(plain, content["arrays"])


def _unpacked(content: dict[str, Any]) -> RolloutBatch | str:
    return unpack(content["rollout_id"], RolloutHeader(**content["header"]), content["arrays"])
