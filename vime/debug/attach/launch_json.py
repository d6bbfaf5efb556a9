"""Entries for VS Code's launch.json: one for each stop, and one that attaches to all.

A file that is plain JSON is merged: what is named "vime: ..." is replaced, the rest stays. One with comments or commas
at the end is never written: what would be lost is the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.debug.stop.records import Stop
from vime.errors import UsageError
from vime.files import whole_file

DEFAULT = Path(".vscode/launch.json")
PREFIX = "vime: "
ALL = f"{PREFIX}all stopped"
VERSION = "0.2.0"


class NotPlain(UsageError):
    """The file cannot be merged without losing something of it."""


def snippet(stops: Sequence[Stop], ports: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A whole launch.json. ``ports``: key of a stop -> port of a tunnel to it on this machine."""
    entries = [_entry(stop, (ports or {}).get(stop.key)) for stop in stops]
    found: dict[str, Any] = {"version": VERSION, "configurations": entries}
    if len(entries) > 1:
        found["compounds"] = [{"name": ALL, "configurations": [entry["name"] for entry in entries]}]
    return found


def text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=4, ensure_ascii=False) + "\n"


def merge(file: Path, new: Mapping[str, Any]) -> None:
    """Write ``new`` to ``file``, whole, with what it held but for our own entries. NotPlain where that cannot be,
    UsageError where the file cannot be read, or its folder made.
    """
    content = dict(new)
    try:
        if file.exists():
            content = _merged(_read(file), new)
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "give another file, or --launch-json - to have the entries printed"
        raise UsageError(f"{error.filename or file}: {error.strerror}: {file} is not written", hint) from error
    with whole_file(file.resolve()) as out:  # a link stays one
        out.write(text(content).encode())


def path_mappings(stop: Stop) -> list[dict[str, str]]:
    """Where the code lies here, and where in the stopped process (case D18); empty where that is one folder."""
    if not stop.local_root or stop.local_root == stop.remote_root:
        return []
    return [{"localRoot": stop.local_root, "remoteRoot": stop.remote_root}]


def _entry(stop: Stop, port: int | None) -> dict[str, Any]:
    return {
        "name": f"{PREFIX}{stop.who} ({stop.key})",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port} if port else {"host": stop.host, "port": stop.port},
        "justMyCode": False,
        "subProcess": False,
        "pathMappings": path_mappings(stop),
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except ValueError as error:
        why = f"{file} has comments or is no plain JSON ({error}): it is left as it is"
        raise NotPlain(why, 'paste the entries below into its "configurations"') from error
    lists = ("configurations", "compounds")
    if not isinstance(found, dict) or any(not isinstance(found.get(name, []), list) for name in lists):
        raise NotPlain(f"{file} is no launch.json: it is left as it is", "paste the entries below where they belong")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that comes twice would lose what it says first."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _merged(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    content = dict(old)
    for name in ("configurations", "compounds"):
        kept = [entry for entry in old.get(name, []) if not _is_ours(entry)]
        if kept or name in old or name in new:
            content[name] = kept + list(new.get(name, []))
    content.setdefault("version", VERSION)
    if not content.get("compounds") and "compounds" not in old:
        content.pop("compounds", None)
    return content


def _is_ours(entry: object) -> bool:
    return isinstance(entry, dict) and str(entry.get("name", "")).startswith(PREFIX)
