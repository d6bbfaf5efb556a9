"""Python files on disk: which there are below a path, what leftovers they hold, and the files without them."""

from __future__ import annotations

import codecs
import io
import os
import stat
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vime.debug.leftovers.found import CannotParse, Leftover, Module, find
from vime.debug.leftovers.removal import remove
from vime.errors import UsageError

STDIN = "-"
SKIPPED = frozenset({"__pycache__", "node_modules", "build", "dist"})
"""Folders that are not entered, besides hidden ones and virtual environments; one that is named itself always is."""

NO_FILE = f"no Python file in it (not entered: hidden folders, {', '.join(sorted(SKIPPED))}, virtual environments)"


@dataclass(frozen=True, slots=True)
class Removed:
    """What ``--fix`` took out of one file."""

    file: str
    leftovers: tuple[Leftover, ...]
    imports: tuple[str, ...]


@dataclass
class Checked:
    """What was found in the files.

    num_files    files that were read
    leftovers    those that are there now, in order
    kept         those whose line says ``# vime: keep``
    removed      what was taken out, by file
    reasons      place -> why a leftover was not taken out
    not_checked  (file, reason) of what could not be read
    """

    num_files: int = 0
    leftovers: list[Leftover] = field(default_factory=list)
    kept: list[Leftover] = field(default_factory=list)
    removed: list[Removed] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    not_checked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_removed(self) -> int:
        return sum(len(one.leftovers) for one in self.removed)


class Unreadable(Exception):
    """A file that cannot be read as Python source; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Source:
    """A text with what it takes to write it back byte for byte."""

    text: str
    encoding: str
    mark: bytes = b""

    @classmethod
    def of(cls, raw: bytes) -> Source:
        """Decode as Python does: byte-order mark, then the declared encoding, then UTF-8. Raises Unreadable."""
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
            encoding = "utf-8" if mark else encoding
            return cls(raw[len(mark) :].decode(encoding), encoding, mark)
        except (SyntaxError, UnicodeError, LookupError) as error:
            raise Unreadable(f"its encoding: {error}") from error

    def encode(self, text: str) -> bytes:
        return self.mark + text.encode(self.encoding)


def check(paths: Sequence[str], stdin: bytes | None = None, fix: bool = False) -> Checked:
    """Check files and the ``*.py`` files below folders; with ``fix`` take out what can be taken out.

    ``-`` stands for ``stdin``. Raises UsageError, before anything is written, for a path that does not exist.
    """
    found = Checked()
    _refuse(paths, fix)
    seen: set[str] = set()
    for path in paths:
        if path == STDIN:
            _one(found, "<stdin>", stdin or b"", None)
            continue
        before = found.num_files + len(found.not_checked)
        for file in _files(path, found):
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                _read(found, file, real if fix else None)
        if found.num_files + len(found.not_checked) == before and not any(_is_below(s, path) for s in seen):
            found.not_checked.append((path, NO_FILE))
    return found


def _refuse(paths: Sequence[str], fix: bool) -> None:
    for path in paths:
        if path != STDIN and not os.path.lexists(path):
            raise UsageError(f"{path}: no such file or folder")
    if fix and STDIN in paths:
        raise UsageError("--fix -: standard input cannot be written back", "name the file")


def _is_below(file: str, path: str) -> bool:
    return Path(file).is_relative_to(os.path.realpath(path))


def _files(path: str, found: Checked) -> Iterator[str]:
    """A file itself, whatever it is called; of a folder the ``*.py`` files in order of their names."""
    if not os.path.isdir(path):
        yield path
        return

    def unread(error: OSError) -> None:
        found.not_checked.append((str(error.filename), error.strerror or "cannot be read"))

    for folder, folders, names in os.walk(path, onerror=unread):
        folders[:] = sorted(name for name in folders if _is_entered(folder, name))
        for name in sorted(names):
            if name.endswith((".py", ".pyw")):
                yield os.path.join(folder, name)


def _is_entered(folder: str, name: str) -> bool:
    is_ours = name not in SKIPPED and not name.startswith(".")
    return is_ours and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))


def _read(found: Checked, file: str, target: str | None) -> None:
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise Unreadable("is no regular file")
        raw = Path(file).read_bytes()
    except (OSError, Unreadable) as error:
        found.not_checked.append((file, error.strerror or str(error) if isinstance(error, OSError) else str(error)))
        return
    _one(found, file, raw, target)


def _one(found: Checked, file: str, raw: bytes, target: str | None) -> None:
    """Check one file; ``target`` is where to write it without its leftovers."""
    try:
        source = Source.of(raw)
        module = find(source.text, file)
    except (Unreadable, CannotParse) as error:
        found.not_checked.append((file, str(error)))
        return
    found.num_files += 1
    if target is not None and any(not one.leftover.is_kept for one in module.found):
        module = _fixed(found, module, source, target)
    for one in module.found:
        (found.kept if one.leftover.is_kept else found.leftovers).append(one.leftover)


def _fixed(found: Checked, module: Module, source: Source, target: str) -> Module:
    """The module as it is on disk afterwards."""
    file = module.found[0].leftover.file
    removal = remove(module)
    after = module
    if removal.removed:
        after = find(removal.text, file)
        try:
            replace_file(Path(target), source.encode(removal.text))
        except OSError as error:
            reason = f"the file cannot be written: {error.strerror}"
            found.reasons |= {one.leftover.place: reason for one in module.found}
            return module
        found.removed.append(Removed(file, removal.removed, removal.imports))
    reasons = [reason for _, reason in removal.left]
    still = [one.leftover for one in after.found if not one.leftover.is_kept]
    found.reasons |= {one.place: reason for one, reason in zip(still, reasons, strict=True)}
    return after


def replace_file(path: Path, content: bytes) -> None:
    """Write all of it or nothing, with the file's own mode and owner."""
    before = path.stat()
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if os.geteuid() == 0:
            os.chown(name, before.st_uid, before.st_gid)
        os.chmod(name, stat.S_IMODE(before.st_mode))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def as_dict(found: Checked) -> dict[str, object]:
    """For ``--json``."""
    return {
        "num_files": found.num_files,
        "leftovers": [_row(one) | {"not_removed": found.reasons.get(one.place)} for one in found.leftovers],
        "kept": [_row(one) for one in found.kept],
        "removed": [
            {"file": one.file, "leftovers": [_row(x) for x in one.leftovers], "imports": list(one.imports)}
            for one in found.removed
        ],
        "not_checked": [{"file": file, "reason": reason} for file, reason in found.not_checked],
    }


def _row(one: Leftover) -> dict[str, object]:
    return {
        "file": one.file,
        "line": one.line,
        "column": one.column,
        "name": one.name,
        "what": one.what,
        "why": one.why,
    }
