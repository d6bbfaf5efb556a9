"""The dotted names of all settings, read off the schema, and the nearest known name of a wrong one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vime.config.schema import Config, Section


@cache
def settings() -> dict[str, FieldInfo]:
    """Every setting under its dotted name, in the order of the schema; a free table (``vllm``) is one setting.

    In a table of tables ``*`` stands for the name that the user chooses: ``eval.sets.*.top_p``.
    """
    return dict(_walk(Config, ""))


@cache
def sections() -> dict[str, type[Section]]:
    """Every table of the schema under its dotted name; ``eval.sets.*`` is what each table of ``eval.sets`` holds."""
    return dict(_walk_sections(Config, ""))


@cache
def tables_of_tables() -> tuple[str, ...]:
    """The tables whose keys the user chooses and whose values are tables of the schema: eval.sets."""
    return tuple(name.removesuffix(".*") for name in sections() if name.endswith(".*"))


def general(name: str) -> str:
    """``name`` as ``settings`` and ``sections`` know it: ``eval.sets.hard.top_p`` -> ``eval.sets.*.top_p``."""
    for table in tables_of_tables():
        if name.startswith(table + "."):
            _, dot, rest = name[len(table) + 1 :].partition(".")
            return f"{table}.*{dot}{rest}"
    return name


def field_of(name: str) -> FieldInfo | None:
    """The field behind a dotted name; None where there is no such setting."""
    return settings().get(general(name))


def paths_of(config: Config) -> list[str]:
    """The settings that ``config`` has, in the order of the schema, with those of every table of a table of tables."""
    return list(_paths(config, ""))


@cache
def free_tables() -> tuple[str, ...]:
    """The tables that take a library's own names: megatron.transformer, megatron.optimizer, megatron.ddp, vllm."""
    return tuple(name for name, field in settings().items() if _is_free(field.annotation))


def free_table_of(name: str) -> str | None:
    """The free table that ``name`` lies in (or is), if any."""
    return next((table for table in free_tables() if name == table or name.startswith(table + ".")), None)


def admits(name: str, kind: type) -> bool:
    """Whether setting ``name`` may hold a value of ``kind`` (``type(None)`` for none)."""
    field = field_of(name)
    return field is not None and kind in _members(field.annotation)


def suggest(name: str) -> str | None:
    """The known dotted name nearest to an unknown one ("a or b" where it lies in two tables); None if none is near."""
    own = list(_beside(settings(), name))
    known = [*own, *(table for table in sections() if not table.endswith(".*"))]
    leaf = name.rpartition(".")[2]
    same_leaf = [k for k in own if k.rpartition(".")[2] == leaf]
    if same_leaf:
        return " or ".join(
            same_leaf if "." not in name else difflib.get_close_matches(name, same_leaf, n=1, cutoff=0.0)
        )
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near and general(name) == name:  # under a name that the user chose, all settings share most of their letters
        return near[0]
    own.sort(key=lambda k: k.rpartition(".")[0] != name.rpartition(".")[0])
    near_leaf = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in own], n=1, cutoff=0.75)
    return next((k for k in own if near_leaf and k.rpartition(".")[2] == near_leaf[0]), None)


def _beside(names: Iterable[str], wrong: str) -> Iterator[str]:
    """Those of ``names`` that can be meant by ``wrong``: ``*`` is the table that ``wrong`` lies in."""
    for name in names:
        table, star, rest = name.partition(".*")
        if not star:
            yield name
        elif wrong.startswith(table + "."):
            yield f"{table}.{wrong[len(table) + 1 :].partition('.')[0]}{rest}"


def _walk(section: type[Section], prefix: str) -> list[tuple[str, FieldInfo]]:
    found: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        inner, entry = _section(field.annotation), _entry(field.annotation)
        if entry:
            found += _walk(entry, f"{prefix}{name}.*.")
        else:
            found += _walk(inner, f"{prefix}{name}.") if inner else [(prefix + name, field)]
    return found


def _walk_sections(section: type[Section], prefix: str) -> list[tuple[str, type[Section]]]:
    found: list[tuple[str, type[Section]]] = []
    for name, field in section.model_fields.items():
        inner, entry = _section(field.annotation), _entry(field.annotation)
        if entry:
            found.append((f"{prefix}{name}.*", entry))
        elif inner:
            found += [(prefix + name, inner), *_walk_sections(inner, f"{prefix}{name}.")]
    return found


def _paths(section: Section, prefix: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _paths(value, f"{prefix}{name}.")
        elif _entry(field.annotation):
            for key, table in value.items():
                yield from _paths(table, f"{prefix}{name}.{key}.")
        else:
            yield prefix + name


def _section(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _entry(annotation: Any) -> type[Section] | None:
    """What the values of a table of tables are; None for every other field."""
    return _section(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def _is_free(annotation: Any) -> bool:
    return get_origin(annotation) is dict and _entry(annotation) is None


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
