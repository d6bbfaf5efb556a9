"""The dotted names of all settings, read off the schema, and the nearest known name of a wrong one."""

from __future__ import annotations

import difflib
import types
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vime.config.schema import Config, Section


@cache
def settings() -> dict[str, FieldInfo]:
    """Every setting under its dotted name, in the order of the schema; a free table (``vllm``) is one setting."""
    return dict(_walk(Config, ""))


@cache
def sections() -> dict[str, type[Section]]:
    """Every table of the schema under its dotted name."""
    return dict(_walk_sections(Config, ""))


@cache
def free_tables() -> tuple[str, ...]:
    """The tables that take a library's own names: megatron.transformer, megatron.optimizer, megatron.ddp, vllm."""
    return tuple(name for name, field in settings().items() if get_origin(field.annotation) is dict)


def free_table_of(name: str) -> str | None:
    """The free table that ``name`` lies in (or is), if any."""
    return next((table for table in free_tables() if name == table or name.startswith(table + ".")), None)


def admits(name: str, kind: type) -> bool:
    """Whether setting ``name`` may hold a value of ``kind`` (``type(None)`` for none)."""
    field = settings().get(name)
    return field is not None and kind in _members(field.annotation)


def suggest(name: str) -> str | None:
    """The known dotted name nearest to an unknown one ("a or b" where it lies in two tables); None if none is near."""
    known = [*settings(), *sections()]
    leaf = name.rpartition(".")[2]
    same_leaf = [k for k in settings() if k.rpartition(".")[2] == leaf]
    if same_leaf:
        return " or ".join(
            same_leaf if "." not in name else difflib.get_close_matches(name, same_leaf, n=1, cutoff=0.0)
        )
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        return near[0]
    near_leaf = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in settings()], n=1, cutoff=0.75)
    return next((k for k in settings() if near_leaf and k.rpartition(".")[2] == near_leaf[0]), None)


def _walk(section: type[Section], prefix: str) -> list[tuple[str, FieldInfo]]:
    found: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        found += _walk(inner, f"{prefix}{name}.") if inner else [(prefix + name, field)]
    return found


def _walk_sections(section: type[Section], prefix: str) -> list[tuple[str, type[Section]]]:
    found: list[tuple[str, type[Section]]] = []
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        if inner:
            found += [(prefix + name, inner), *_walk_sections(inner, f"{prefix}{name}.")]
    return found


def _section(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
