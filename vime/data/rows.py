"""Rows of prompt files. Every bad row is a problem with file, row and key; all problems are reported at once."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.config import schema
from vime.data.problems import listed
from vime.errors import UsageError

SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that may be half a pair; only lines that have one are looked at again."""
SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a prompt file. ``where`` is "file line 3" (JSONL) or "file row 3" (parquet), counted from 1."""

    where: str
    prompt: str | list[dict[str, Any]]
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def read_rows(data: schema.Data, needs_label: bool = False) -> list[Row]:
    """All rows of ``data.prompts`` in file order. UsageError listing every bad row (the first 20 and the count).

    ``needs_label``: the reward compares with the label, so a row without one is bad. Blank lines are no rows.
    """
    rows, problems = _collect(data, data.prompts, needs_label)
    if problems:
        raise UsageError(listed(problems), "mend the rows, or take a slice that leaves them out: path@[a:b]")
    if not rows:
        raise UsageError(f"data.prompts: no rows in {', '.join(data.prompts)}")
    return rows


def check_files(data: schema.Data, needs_label: bool = False) -> list[str]:
    """Every problem of the prompt files; empty where all is well. Parquet is only looked into if pyarrow is there."""
    has_pyarrow = importlib.util.find_spec("pyarrow") is not None
    specs = [s for s in data.prompts if has_pyarrow or not split_slice(s)[0].endswith(".parquet")]
    rows, problems = _collect(data, specs, needs_label)
    problems += [f"data.prompts: {p}: no such file" for p in data.prompts if p not in specs and not _exists(p)]
    if not rows and not problems and specs == data.prompts:
        problems.append(f"data.prompts: no rows in {', '.join(data.prompts)}")
    return problems


def split_slice(spec: str) -> tuple[str, slice]:
    """``"a.jsonl@[2:-1]"`` -> ``("a.jsonl", slice(2, -1))``; without suffix the slice takes everything."""
    match = SLICE.fullmatch(spec)
    if not match:
        return spec, slice(None)
    start, stop = (int(text) if text not in ("", "-") else None for text in (match["start"], match["stop"]))
    return match["path"], slice(start, stop)


def _exists(spec: str) -> bool:
    return Path(split_slice(spec)[0]).is_file()


def _collect(data: schema.Data, specs: Sequence[str], needs_label: bool) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    problems: list[str] = []
    for spec in specs:
        path, cut = split_slice(spec)
        problem = _path_problem(spec, path)
        if problem:
            problems.append(problem)
            continue
        for where, value in list(_raw_rows(path))[cut]:
            row = value if isinstance(value, str) else _row(where, value, data, needs_label)
            if isinstance(row, Row):
                rows.append(row)
            else:
                problems.extend(f"{where}: {problem}" for problem in ([row] if isinstance(row, str) else row))
    return rows, problems


def _path_problem(spec: str, path: str) -> str | None:
    if "@[" in path:
        return f"data.prompts: {spec}: a slice is written path@[a:b]"
    if not path.endswith(SUFFIXES):
        return f"data.prompts: {spec}: only {' and '.join(SUFFIXES)} files are read"
    if Path(path).is_dir():
        return f"data.prompts: {path}: is a folder; name the files in it"
    return None if Path(path).is_file() else f"data.prompts: {path}: no such file"


def _raw_rows(path: str) -> Iterator[tuple[str, Any]]:
    """(where, row); a row that cannot be parsed comes as the text of the problem."""
    if path.endswith(".parquet"):
        yield from _parquet_rows(path)
        return
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path} line {number}", _parse(line.rstrip())
    except OSError as error:
        yield f"{path} line {number + 1}", f"cannot be read: {error.strerror}"


def _parse(line: bytes) -> Any:
    try:
        value = json.loads(line.decode("utf-8"))  # bytes would be guessed at, UTF-16 too
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"invalid JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return "invalid JSON: nested too deeply"
    except ValueError as error:
        return f"invalid JSON: {error}"  # a number of more digits than Python reads
    if LONE_SURROGATE.search(line) and not _is_unicode(value):
        return "holds half a surrogate pair, which is no character and cannot be encoded"
    return value if isinstance(value, dict) else f"{_kind(value)}, expected an object"


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(f"{path}: reading parquet needs pyarrow", "pip install 'vime[cpu]'") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for value in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", value
    except (pyarrow.ArrowInvalid, OSError) as error:
        yield f"{path} row {number + 1}", f"not readable as parquet: {error}"


def _row(where: str, value: dict[str, Any], data: schema.Data, needs_label: bool) -> Row | list[str]:
    """The row, or every problem it has."""
    problems: list[str] = []
    prompt = _prompt(value, data, problems)
    label = _label(value, data.label_key, needs_label, problems)
    metadata = _metadata(value, data.metadata_key, problems)
    return problems or Row(where, prompt, label, metadata)


_MISSING = object()


def lookup(row: dict[str, Any], key: str) -> Any:
    """``row["a"]["b"]`` for "a.b"; a column whose own name is "a.b" comes first."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _prompt(row: dict[str, Any], data: schema.Data, problems: list[str]) -> str | list[dict[str, Any]]:
    key, value = data.prompt_key, lookup(row, data.prompt_key)
    if value is _MISSING:
        problems.append(f"no key {key!r} (keys: {', '.join(sorted(row))})")
    elif isinstance(value, str):
        if value.strip():
            return value
        problems.append(f"{key}: empty prompt")
    elif not isinstance(value, list):
        problems.append(f"{key}: {_kind(value)}, expected a string or a list of messages")
    elif not value:
        problems.append(f"{key}: empty list of messages")
    elif not data.apply_chat_template:
        problems.append(f"{key}: a list of messages needs data.apply_chat_template=true")
    else:
        return [_message(f"{key}[{i}]", message, problems) for i, message in enumerate(value)]
    return ""


def _message(where: str, message: Any, problems: list[str]) -> dict[str, Any]:
    """The message with its content as one string (text parts are joined without a separator)."""
    if not isinstance(message, dict):
        problems.append(f"{where}: {_kind(message)}, expected {{role, content}}")
        return {}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        problems.append(f"{where}.role: {_kind(role)}, expected a name such as 'user'")
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                problems.append(f"{where}.content[{i}]: expected {{type: 'text', text: string}}")
                return {}
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        problems.append(f"{where}.content: {_kind(content)}, expected a string or a list of text parts")
    elif not content.strip() and role == "user":
        problems.append(f"{where}.content: empty")
    return {**{k: v for k, v in message.items() if v is not None}, "content": content}


def _label(row: dict[str, Any], key: str | None, needs_label: bool, problems: list[str]) -> str | None:
    if key is None:
        return None
    value = lookup(row, key)
    if value is _MISSING or value is None or value == "":
        if needs_label:
            what = f"no key {key!r}" if value is _MISSING else f"{key}: empty label"
            problems.append(f"{what}, and the reward needs one")
        return None
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(f"{key}: {value} is no label")
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problems.append(f"{key}: {_kind(value)}, expected a string or a number")
        return None
    return str(value)


def _metadata(row: dict[str, Any], key: str | None, problems: list[str]) -> dict[str, Any]:
    if key is None:
        return {}
    value = lookup(row, key)
    if value is None or value is _MISSING:
        return {}
    if not isinstance(value, dict):
        problems.append(f"{key}: {_kind(value)}, expected an object")
        return {}
    return value


def _kind(value: Any) -> str:
    names: Iterable[tuple[type, str]] = (
        (type(None), "null"), (bool, "boolean"), (str, "string"), (dict, "object"), (list, "list"),
        (int, "number"), (float, "number"),
    )  # fmt: skip
    return next((name for kind, name in names if isinstance(value, kind)), type(value).__name__)
