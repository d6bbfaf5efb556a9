"""Where settings come from: TOML files and KEY=VALUE, merged into one tree with the origin of every leaf."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.config.message import short
from vime.config.names import admits, field_of, free_table_of, general, settings

COMMAND_LINE = "command line"
DEFAULT = "default"
DERIVED = "derived"
PATH_SETTINGS = ("model.path", "model.ref_path", "data.prompts", "eval.prompts", "eval.sets.*.prompts")
"""Settings that hold paths of inputs: relative to the TOML file that names them, or to the current folder."""


@dataclass
class Tree:
    """Merged settings. ``values`` is nested as in TOML; ``origins`` has one entry per leaf."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def merge(self, update: Mapping[str, Any], origin: str) -> None:
        """Deep merge: tables join, everything else is replaced."""
        for path, value in leaves(update):
            self.set(path, value, origin)

    def set(self, path: str, value: Any, origin: str) -> None:
        *tables, leaf = path.split(".")
        node = self.values
        for depth, table in enumerate(tables):
            if not isinstance(node.get(table), dict):
                self.origins.pop(".".join(tables[: depth + 1]), None)
                node[table] = {}
            node = node[table]
        if node.get(leaf) == {} or isinstance(node.get(leaf), dict):
            self.origins = {p: o for p, o in self.origins.items() if not p.startswith(path + ".")}
        node[leaf] = value
        self.origins[path] = origin

    def drop(self, path: str) -> None:
        """Removes a value, and the tables around it that are empty then."""
        *tables, leaf = path.split(".")
        nodes = [self.values]
        for table in tables:
            nodes.append(nodes[-1][table])
        del nodes[-1][leaf]
        for depth in range(len(tables), 0, -1):
            if not nodes[depth]:
                del nodes[depth - 1][tables[depth - 1]]

    def origin(self, path: str) -> str:
        """Origin of a leaf, or of the nearest table or leaf around it."""
        for known, origin in self.origins.items():
            if known == path or known.startswith(path + ".") or path.startswith(known + "."):
                return origin
        return DEFAULT


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is no table; an empty table is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def read_toml(path: Path) -> tuple[dict[str, Any], str | None]:
    """The tables of a file, or ({}, problem) where it is missing or not TOML; the problem names line and column."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            return {}, f"{path}: starts with a byte order mark; save it as UTF-8 without one"
        return tomllib.loads(text), None
    except FileNotFoundError:
        return {}, f"{path}: no such file"
    except (OSError, UnicodeDecodeError) as error:
        return {}, f"{path}: cannot be read: {error}"
    except tomllib.TOMLDecodeError as error:
        return {}, f"{path}: not valid TOML: {_with_line(str(error), text)}"


def parse_override(text: str) -> tuple[str, Any, str | None]:
    """``KEY=VALUE`` as (key, value, problem). VALUE is TOML; what is no TOML is a bare string."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        return "", None, f"{short(text)} (command line): neither a .toml file nor KEY=VALUE with a dotted KEY"
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    if not isinstance(value, str) and admits(key, str) and not (isinstance(value, list) and admits(key, list)):
        value = raw  # a number or a date where the setting is text: run.name=42
    return key, value, None


def at_folder(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``values`` with relative input paths made absolute, from ``folder``, and "none" where a setting admits None."""
    tree = Tree()
    for path, value in leaves(values):
        tree.set(path, absolute(path, none_of(path, value), folder), "")
    return tree.values


def absolute(setting: str, value: Any, folder: Path) -> Any:
    """``value`` made absolute where ``setting`` holds input paths (a list of them, or one)."""
    if general(setting) not in PATH_SETTINGS:
        return value
    if isinstance(value, list):
        return [absolute(setting, item, folder) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return os.path.normpath(folder.absolute() / os.path.expanduser(value))


def none_of(setting: str, value: Any) -> Any:
    """TOML has no null: "none" stands for None where the setting admits it."""
    return None if value == "none" and admits(setting, type(None)) else value


def unknown(tree: Tree) -> Sequence[str]:
    """Dotted paths in the tree that name no setting. Free tables are checked against the library instead."""
    return [
        path
        for path, _ in leaves(tree.values)
        if field_of(path) is None and free_table_of(path) is None and not _is_table(path)
    ]


def _is_table(path: str) -> bool:
    """A scalar where a table belongs is known (pydantic says so), and so is an empty table."""
    return any(name.startswith(general(path) + ".") for name in settings())


def _with_line(message: str, text: str) -> str:
    last = text.rstrip("\n")
    return message.replace("at end of document", f"at line {last.count(chr(10)) + 1}, the end of the file")
