"""TOML files in order, then KEY=VALUE, into one frozen ``Config``; every problem at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vime.config import rules
from vime.config.message import UNSET, Finding, line, toml_key, toml_value
from vime.config.names import field_of, free_tables, general, paths_of, sections, settings, suggest
from vime.config.schema import Config
from vime.config.sources import (
    COMMAND_LINE,
    DEFAULT,
    DERIVED,
    Tree,
    absolute,
    at_folder,
    leaves,
    none_of,
    parse_override,
    read_toml,
    unknown,
)
from vime.errors import ConfigError

PRINT_CONFIG_HINT = "vime train RUN.toml --print-config shows every setting, its value and where it came from"
_PLACEHOLDERS: dict[str, Any] = {"model.path": "", "data.prompts": [""], "eval.sets.*.prompts": [""]}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where it came from.

    config    the frozen tree; settings named in ``invalid`` hold a default in place of the refused value
    origins   dotted path -> "run.toml", "command line", "derived"; what is absent is "default"
    base_dir  folder of the first TOML file, or the current one
    problems  one line each; ``load`` raises them, ``read`` hands them on so that more can be found first
    warnings  one line each
    invalid   settings whose value was refused
    asked     as it was asked for, where the command itself has changed it since; None: as ``config``
    """

    config: Config
    origins: dict[str, str]
    base_dir: Path
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    invalid: frozenset[str] = field(default=frozenset())
    asked: Config | None = None

    def origin(self, path: str) -> str:
        return Tree(origins=self.origins).origin(path)

    def line(self, finding: Finding) -> str:
        """A finding as one line, with the value and the origin of its setting."""
        return line(finding.path, value_of(self.config, finding.path), self.origin(finding.path), finding.text)

    def concerns_invalid(self, paths: Sequence[str]) -> bool:
        """Whether one of ``paths`` is, holds or lies in what has a default in place of a refused value."""
        pairs = [(f"{bad}.", f"{path}.") for bad in self.invalid for path in paths]
        return any(path.startswith(bad) or bad.startswith(path) for bad, path in pairs)


def load(files: Sequence[Path], overrides: Sequence[str] = ()) -> Loaded:
    """The configuration of ``files`` (later wins) and ``overrides`` ("train.lr=1e-6").

    Raises ConfigError with all problems: unreadable files, unknown settings, wrong types and ranges, and settings that
    contradict each other.
    """
    loaded = read(files, overrides)
    if loaded.problems:
        raise ConfigError(loaded.problems, PRINT_CONFIG_HINT)
    return loaded


def read(
    files: Sequence[Path],
    overrides: Sequence[str] = (),
    run_dir: str | None = None,
    derived: Mapping[str, Any] | None = None,
) -> Loaded:
    """As ``load``, but problems are in the result. Raises ConfigError only for an unreadable file or override.

    ``run_dir`` stands in for the default of ``run.dir``; ``derived``: dotted path -> value, what the command itself
    wants, whatever files and overrides say.
    """
    tree = _gather([Path(f) for f in files], overrides)
    for path, value in (derived or {}).items():
        tree.set(path, value, DERIVED)
    if run_dir is not None and "run.dir" not in tree.origins:
        tree.set("run.dir", run_dir, DERIVED)
    problems = _drop_unknown(tree) + _drop_nan(tree)
    config, invalid, refused = _validate(tree)
    config = _derive(config, tree)
    base_dir = Path(files[0]).absolute().parent if files else Path.cwd()
    loaded = Loaded(config, tree.origins, base_dir, (*problems, *refused), (), frozenset(invalid))
    bad, doubtful = rules.check(config)
    return Loaded(
        config,
        tree.origins,
        base_dir,
        (*loaded.problems, *_lines(loaded, bad)),
        tuple(_lines(loaded, doubtful)),
        loaded.invalid,
    )


def value_of(config: Config, path: str) -> Any:
    """The value at a dotted path; UNSET where there is none (inside free tables too)."""
    node: Any = config
    for part in path.split("."):
        node = node.get(part, UNSET) if isinstance(node, dict) else getattr(node, part, UNSET)
        if node is UNSET:
            return UNSET
    return UNSET if general(path) in sections() else node


def to_toml(config: Config) -> str:
    """The whole configuration as TOML; reading it back gives an equal one."""
    tables: dict[str, list[str]] = {}
    for path in (p for p in paths_of(config) if p not in free_tables()):
        table, _, name = path.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {toml_value(value_of(config, path))}")
    for table in free_tables():
        rows = value_of(config, table).items()
        tables |= {table: [f"{toml_key(key)} = {toml_value(value)}" for key, value in rows]} if rows else {}
    return "\n\n".join("\n".join([f"[{table}]", *lines]) for table, lines in tables.items()) + "\n"


def _gather(files: Sequence[Path], overrides: Sequence[str]) -> Tree:
    tree, problems = Tree(), []
    for file in files:
        values, problem = read_toml(file)
        problems += [problem] if problem else []
        tree.merge(at_folder(values, file.parent), file.name)
    for text in overrides:
        key, value, problem = parse_override(text)
        if problem:
            problems.append(problem)
        elif isinstance(value, dict) and value:
            for path, leaf in leaves(value, f"{key}."):
                tree.set(path, absolute(path, none_of(path, leaf), Path.cwd()), COMMAND_LINE)
        else:
            tree.set(key, absolute(key, none_of(key, value), Path.cwd()), COMMAND_LINE)
    if problems:
        raise ConfigError(problems, "vime train --help shows the usage" if not files else None)
    return tree


def _drop_unknown(tree: Tree) -> list[str]:
    problems = []
    for path in unknown(tree):
        near = suggest(path)
        hint = f"; did you mean {near}?" if near else "; " + _members_of_nearest_table(path)
        problems.append(line(path, _at(tree, path), tree.origins.get(path, DEFAULT), f"unknown setting{hint}"))
        tree.drop(path)
    return problems


def _members_of_nearest_table(path: str) -> str:
    table = path
    while table and general(table) not in sections():
        table = table.rpartition(".")[0]
    known = sections()[general(table)].model_fields if table else Config.model_fields
    return f"known {'in ' + table if table else 'tables'}: " + ", ".join(known)


def _drop_nan(tree: Tree) -> list[str]:
    """nan passes every range check, so it is refused by name; inf means something for clip_grad alone."""
    problems = []
    for path, value in list(leaves(tree.values)):
        if not isinstance(value, float) or math.isfinite(value) or field_of(path) is None:
            continue
        if math.isnan(value) or path != "train.clip_grad":
            problems.append(line(path, value, tree.origin(path), "must be a finite number"))
            tree.drop(path)
    return problems


def _validate(tree: Tree) -> tuple[Config, list[str], list[str]]:
    """(config, invalid paths, problems): refused values are replaced by defaults, so that later checks can go on."""
    try:
        return Config.model_validate(tree.values, strict=True), [], []
    except ValidationError as error:
        found = error.errors(include_url=False)
    invalid, problems = [], []
    for item in found:
        path = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
        if item["type"] == "missing":
            problems += _missing(path)
            paths = _required(path)
        else:
            shown = item["input"] if isinstance(item["loc"][-1], int) else _at(tree, path)
            problems.append(line(path, shown, tree.origin(path), _allowed(item)))
            paths = [path]
        invalid += paths
    for path in dict.fromkeys(invalid):
        _replace(tree, path)
    return Config.model_validate(tree.values, strict=True), invalid, list(dict.fromkeys(problems))


def _required(path: str) -> list[str]:
    """The settings without a default at or below ``path``."""
    return [path] if general(path) in _PLACEHOLDERS else [p for p in _PLACEHOLDERS if p.startswith(path + ".")]


def _replace(tree: Tree, path: str) -> None:
    if general(path) in _PLACEHOLDERS:
        tree.set(path, _PLACEHOLDERS[general(path)], DEFAULT)
        return
    tree.drop(path)
    for required, value in _PLACEHOLDERS.items():
        if required.startswith(path + ".") and "*" not in required:  # a table without entries needs none
            tree.set(required, value, DEFAULT)


def _missing(path: str) -> list[str]:
    docs = {p: (settings()[general(p)].description or "") for p in _required(path) or [path]}
    return [f"{p}: required and not set ({doc.splitlines()[0] if doc else 'no default'})" for p, doc in docs.items()]


_RULES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list, in square brackets",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "too_short": "must not be empty",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "literal_error": "must be one of {expected}",
}


def _allowed(item: Any) -> str:
    rule = _RULES.get(item["type"])
    if rule is None:
        return str(item["msg"])
    if item["type"] == "int_type" and isinstance(item["input"], float):
        return f"{rule}, not {item['input']!r}"
    context = {k: f"{v:g}" if isinstance(v, float) else v for k, v in item.get("ctx", {}).items()}
    return rule.format(**context)


def _derive(config: Config, tree: Tree) -> Config:
    """``debug.load_rollout_data`` sets ``debug.train_only``."""
    if config.debug.load_rollout_data is None or "debug.train_only" in tree.origins:
        return config
    tree.origins["debug.train_only"] = DERIVED
    return config.model_copy(update={"debug": config.debug.model_copy(update={"train_only": True})})


def _lines(loaded: Loaded, findings: Sequence[Finding]) -> list[str]:
    return [loaded.line(f) for f in findings if not loaded.concerns_invalid((f.path, *f.reads))]


def _at(tree: Tree, path: str) -> Any:
    node: Any = tree.values
    for part in path.split("."):
        node = node[part] if isinstance(node, dict) and part in node else UNSET
    return node
