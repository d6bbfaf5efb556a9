"""Every setting with its value, origin and meaning, for ``--print-config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime.config.load import Loaded, value_of
from vime.config.names import free_tables, settings
from vime.config.sources import DERIVED, leaves


@dataclass(frozen=True, slots=True)
class Row:
    path: str
    value: Any
    origin: str
    doc: str


def rows(loaded: Loaded) -> list[Row]:
    """One row per setting in the schema's order; a free table has one row per key that was set."""
    found: list[Row] = []
    for path, field in settings().items():
        doc = " ".join((field.description or "").split())
        value = value_of(loaded.config, path)
        if path in free_tables() and value:
            found += [Row(p, v, loaded.origin(p), doc) for p, v in leaves(value, f"{path}.")]
        else:
            found.append(_derived(loaded, Row(path, value, loaded.origin(path), doc)))
    return found


def _derived(loaded: Loaded, row: Row) -> Row:
    """Defaults that follow from other settings are shown as what they come to."""
    config = loaded.config
    derived = {
        "train.global_batch_size": config.global_batch_size,
        "run.dir": config.run_dir,
        "model.ref_path": config.model.path if config.uses_reference else None,
    }
    if row.path not in derived or derived[row.path] == row.value:
        return row
    return Row(row.path, derived[row.path], row.origin if row.path == "run.dir" else DERIVED, row.doc)
