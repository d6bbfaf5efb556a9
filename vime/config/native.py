"""Names under [megatron.*] and [vllm] are checked against the libraries' own dataclasses: read, not imported."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config.load import Loaded, value_of
from vime.config.message import UNSET, line
from vime.errors import VimeError


@dataclass(frozen=True, slots=True)
class Target:
    """The dataclass behind a free table: a class in a file of a package."""

    package: str
    file: str
    name: str


TARGETS = {
    "megatron.transformer": Target("megatron", "core/transformer/transformer_config.py", "TransformerConfig"),
    "megatron.optimizer": Target("megatron", "core/optimizer/optimizer_config.py", "OptimizerConfig"),
    "megatron.ddp": Target(
        "megatron", "core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"
    ),
    "vllm": Target("vllm", "engine/arg_utils.py", "AsyncEngineArgs"),
}


def check(loaded: Loaded, derived: Mapping[str, Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """(problems, warnings) of the free tables.

    ``derived``: per table, the names that vime sets itself and why ("parallel.pp says it"); they are refused. A library
    that is not installed gives one warning per table that was filled.
    """
    problems: list[str] = []
    warnings: list[str] = []
    for table, target in TARGETS.items():
        given: Mapping[str, Any] = value_of(loaded.config, table)
        if not given:
            continue
        package = find_package(target.package)
        if package is None:
            warnings.append(f"[{table}]: not checked, {target.package} is not installed")
            continue
        known = fields(package, target)
        problems += _problems(loaded, table, target, known, derived.get(table, {}))
    return problems, warnings


def find_package(name: str) -> Path | None:
    """Folder of an installed top-level package, found without importing it."""
    spec = importlib.util.find_spec(name)
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]) if locations else None


def fields(package: Path, target: Target) -> dict[str, str]:
    """Name -> annotation of every constructor field of the dataclass and its bases inside the package."""
    file = package / target.file
    if not file.is_file():
        raise VimeError(
            f"{target.package}: {target.file} is not there, so [{target.name}] settings cannot be checked",
            "this version of the library is not supported; install the pinned one with pip install 'vime[cpu]'",
        )
    return dict(_class_fields(package, file, target.name))


def _class_fields(package: Path, file: Path, name: str) -> Iterator[tuple[str, str]]:
    module = ast.parse(file.read_text(encoding="utf-8"))
    node = next((n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if node is None:
        raise VimeError(f"{file}: has no class {name}", "this version of the library is not supported")
    for base in node.bases:
        home = _home(package, file, module, base.id) if isinstance(base, ast.Name) else None
        if home is not None:
            yield from _class_fields(package, home, base.id)  # type: ignore[attr-defined]
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and _is_argument(item):
            yield item.target.id, ast.unparse(item.annotation)


def _is_argument(item: ast.AnnAssign) -> bool:
    if "ClassVar" in ast.unparse(item.annotation):
        return False
    keywords = item.value.keywords if isinstance(item.value, ast.Call) else []
    return not any(k.arg == "init" and isinstance(k.value, ast.Constant) and k.value.value is False for k in keywords)


def _home(package: Path, file: Path, module: ast.Module, name: str) -> Path | None:
    """The file that defines class ``name``: this one, or the one it is imported from, inside the package."""
    if any(isinstance(n, ast.ClassDef) and n.name == name for n in module.body):
        return file
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            return _module_file(package, file, node)
    return None


def _module_file(package: Path, file: Path, node: ast.ImportFrom) -> Path | None:
    parts = (node.module or "").split(".")
    if node.level:
        folder = file.parents[node.level - 1]
    elif parts[0] == package.name:
        folder, parts = package, parts[1:]
    else:
        return None
    found = folder.joinpath(*parts).with_suffix(".py")
    return found if found.is_file() else None


def _problems(
    loaded: Loaded, table: str, target: Target, known: Mapping[str, str], derived: Mapping[str, str]
) -> Iterator[str]:
    for key, value in value_of(loaded.config, table).items():
        path = f"{table}.{key}"
        shown = UNSET if isinstance(value, dict) else value
        if key in derived:
            yield line(path, shown, loaded.origin(path), f"is set by vime and cannot be given: {derived[key]}")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
            hint = f"; did you mean {table}.{near[0]}?" if near else ""
            yield line(path, shown, loaded.origin(path), f"{target.name} has no such field{hint}")
        elif rule := _wrong_type(known[key], value):
            yield line(path, shown, loaded.origin(path), rule)


_PLAIN = {"int": int, "float": (int, float), "bool": bool, "str": str, "None": type(None)}


_LITERAL = re.compile(r"(?:typing\.)?Literal\[([^\[\]]*)\]")


def _choices(annotation: str) -> list[Any]:
    """The values of every Literal in an annotation; none where one of them is no plain value."""
    try:
        return [v for inner in _LITERAL.findall(annotation) for v in ast.literal_eval(f"({inner},)")]
    except (ValueError, SyntaxError):
        return []


def _wrong_type(annotation: str, value: Any) -> str | None:
    """Only annotations made of int, float, bool, str and None are judged; the library judges the others."""
    choices = _choices(annotation)
    if choices:
        fits = value in choices or _wrong_type(_LITERAL.sub("None", annotation), value) is None
        return None if fits else f"must be one of {', '.join(map(repr, choices))}"
    text = annotation.replace("Optional[", "None | ").replace("Union[", "").replace("]", "").replace(",", " |")
    names = [part.strip() for part in text.split("|")]
    if not all(name in _PLAIN for name in names):
        return None
    if isinstance(value, bool):
        fits = "bool" in names
    else:
        fits = any(isinstance(value, _PLAIN[name]) for name in names if name != "bool")  # type: ignore[arg-type]
    words = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}
    return None if fits else "must be " + " or ".join(words[n] for n in names if n in words)
