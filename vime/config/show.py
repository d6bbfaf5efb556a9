"""Every setting with its value, origin and meaning, for ``--print-config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from vime.config.load import Loaded, value_of
from vime.config.names import field_of, free_tables, paths_of, sections, tables_of_tables
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
    for path in paths_of(loaded.config):
        doc = _doc(field_of(path))
        value = value_of(loaded.config, path)
        if path in free_tables() and value:
            found += [Row(p, v, loaded.origin(p), doc) for p, v in leaves(value, f"{path}.")]
        else:
            found.append(_derived(loaded, Row(path, value, loaded.origin(path), doc)))
    for table in (t for t in tables_of_tables() if not value_of(loaded.config, t)):
        parent, _, name = table.rpartition(".")
        last = max(i for i, row in enumerate(found) if row.path.startswith(f"{parent}."))
        found.insert(last + 1, Row(table, {}, loaded.origin(table), _doc(sections()[parent].model_fields[name])))
    return found


def _doc(field: FieldInfo | None) -> str:
    assert field is not None
    return " ".join((field.description or "").split())


def _derived(loaded: Loaded, row: Row) -> Row:
    """Defaults that follow from other settings are shown as what they come to."""
    config = loaded.config
    derived = {
        "train.global_batch_size": config.global_batch_size,
        "run.dir": config.run_dir,
        "model.ref_path": config.model.path if config.uses_reference else None,
    }
    for name, found in config.evaluation_sets.items():
        derived |= {f"eval.sets.{name}.{key}": value for key, value in found if name in config.eval.sets}
    if row.path not in derived or derived[row.path] == row.value:
        return row
    return Row(row.path, derived[row.path], row.origin if row.path == "run.dir" else DERIVED, row.doc)
