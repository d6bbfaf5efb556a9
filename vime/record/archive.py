"""The file around a record: what ``torch.save`` writes, written whole or not at all, and read without torch."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vime.errors import UsageError
from vime.files import whole_file
from vime.record.unpickle import NotPlain, unpickle

MAX_NAME = 80
MAX_DEPTH = 200
EXTENT = 16
EXTENT_FLOOR = 1 << 20
"""A file may refer to one part several times; all in all it may be this many times its size, and a MiB."""

_LEAVES = {int, float, bool, type(None)}


def put_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` (plain containers, contiguous arrays) so that ``torch.load(path, weights_only=True)`` opens it.

    Whole or not at all; VimeError if the system refuses to write.
    """
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        try:
            torch.save(_with_tensors(content), file)
        except RuntimeError as error:  # torch hides what the system said behind a complaint of its own
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _with_tensors(value: Any) -> Any:
    import torch

    if isinstance(value, np.ndarray):  # torch warns of memory that it must not write to, as arrays out of Ray are
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return {k: _with_tensors(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def load_plain(path: Path) -> Any:
    """What ``path`` holds: plain containers, and numpy arrays (read-only) in place of tensors. Nothing in it is run.

    UsageError in one line if there is no such file or it cannot be read, is cut short, no such archive, or holds Python
    objects, the first of which is named.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a rollout record")
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if not path.is_file():
        raise UsageError(f"{path} is no regular file")
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise UsageError(f"{path} is cut short or not a rollout record (it has no readable zip directory)")
            file.seek(0)
            members = _members(file)
        if "data.pkl" not in members:
            raise UsageError(f"{path} is an archive without data.pkl, not a rollout record")
        pickled = members.pop("data.pkl").tobytes()
        if members.pop("byteorder", np.frombuffer(b"little", np.uint8)).tobytes() != b"little":
            raise UsageError(f"{path} was written on a big-endian machine")
        content = unpickle(pickled, {k.removeprefix("data/"): v for k, v in members.items() if k.startswith("data/")})
        problem = _extent_problem(content, EXTENT_FLOOR + EXTENT * path.stat().st_size)
        if problem is not None:
            raise UsageError(f"{path} {problem}")
        return content
    except UsageError:
        raise
    except NotPlain as error:
        what = f"the Python object {one_line(str(error))}"
        raise UsageError(f"{path} holds {what}; vime opens files of plain data and tensors only") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from error
    except Exception as error:  # a damaged file can raise anything; the cause stays chained
        what = one_line(f"{type(error).__name__}: {error}", 160)
        raise UsageError(f"{path} is damaged and cannot be read ({what})") from error


def format_of(content: Any) -> str:
    """What ``content`` says it is; "" if it says nothing."""
    found = content.get("format") if isinstance(content, dict) else None
    return found if isinstance(found, str) else ""


def _extent_problem(content: Any, limit: int) -> str | None:
    """What later code could not walk through in bounded time: parts in themselves, or in each other too often."""
    waiting = [(content, 0)]
    extent = 0
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"nests containers more than {MAX_DEPTH} levels deep; no record does"
        if isinstance(value, np.ndarray):
            extent += value.nbytes
        elif isinstance(value, dict | list | tuple):
            extent += EXTENT + len(value)  # at least a byte in the file each, if they are not one and the same
            parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            if not set(map(type, parts)) <= _LEAVES:
                waiting += [(part, depth + 1) for part in parts]
        elif isinstance(value, str | bytes):
            extent += len(value)
        if extent > limit:
            return f"unfolds to more than {EXTENT} times its size; no record does"
    return None


def one_line(text: str, limit: int = MAX_NAME) -> str:
    """Text out of a foreign file, fit for a message: printable, at most ``limit`` characters."""
    shown = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _members(file: BinaryIO) -> dict[str, np.ndarray]:
    """The bytes (uint8) of every member by its name inside the archive's one folder, without a copy.

    Members lie in the file as they are: a compressed one could unfold to any size.
    """
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
    file.seek(0)
    data = np.fromfile(file, np.uint8)
    found = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise ValueError(f"member {info.filename} is compressed or encrypted")
        header = data[info.header_offset : info.header_offset + 30].tobytes()
        start = (
            info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
        )
        if len(header) != 30 or start + info.file_size > len(data):
            raise ValueError(f"member {info.filename} does not lie in the file")
        found[info.filename.partition("/")[2]] = data[start : start + info.file_size]
    return found
