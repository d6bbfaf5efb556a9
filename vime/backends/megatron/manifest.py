"""Files of a checkpoint: what makes it complete, and how a folder is put in place in one piece. No torch.

``manifest.json`` holds size and blake3 of every other file and is written last; a folder without it is no checkpoint.
Megatron's own format has no checksums: flipped bytes would load silently.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from vime.errors import VimeError
from vime.files import sync_folder

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1


def is_checkpoint(path: str | Path) -> bool:
    """True if ``path`` holds a checkpoint that was written to the end. Does not read the weights."""
    return (Path(path) / MANIFEST).is_file()


def read_state(path: str | Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint: ``state`` as given to ``save``, and facts about the run. Verifies only that file.

    Raises VimeError if there is no complete checkpoint or the file was changed.
    """
    folder = Path(path)
    listed = _read_manifest(folder)
    _verify_file(folder, STATE, listed.get(STATE, {"bytes": -1}))
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def write_json(file: Path, content: Any) -> None:
    """Write and flush to disk."""
    with open(file, "w", encoding="utf-8") as out:
        json.dump(content, out, indent=1, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())


def write_manifest(folder: Path) -> None:
    """List every file below ``folder`` with its size and digest."""
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    files = {name: {"bytes": (folder / name).stat().st_size, "blake3": digest(folder / name)} for name in names}
    write_json(folder / MANIFEST, {"format": FORMAT, "files": files})


def verify(path: str | Path) -> None:
    """Raise VimeError naming the first file that is missing, cut short or changed."""
    folder = Path(path)
    for name, entry in _read_manifest(folder).items():
        _verify_file(folder, name, entry)


def digest(file: Path) -> str:
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def temporary(path: Path) -> Path:
    """Where the folder ``path`` is written until it is complete; leftovers of an interrupted write are removed."""
    folder = path.with_name(f".{path.name}.writing")
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def put_in_place(written: Path, path: Path) -> None:
    """Rename a complete folder to ``path``; an older one there is kept until the new one has its name."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    written.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] > FORMAT:
            raise VimeError(f"{folder}: checkpoint format {content['format']} is newer than {FORMAT}", "update vime")
        return content["files"]
    except FileNotFoundError:
        raise VimeError(
            f"{folder}: no complete checkpoint (no {MANIFEST})", "an interrupted save leaves none; take an older one"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise VimeError(f"{folder / MANIFEST}: damaged ({error})", "take an older checkpoint") from None


def _verify_file(folder: Path, name: str, entry: dict[str, Any]) -> None:
    file = folder / name
    if not file.is_file():
        raise VimeError(f"{file}: missing from the checkpoint", "take an older checkpoint")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise VimeError(f"{file}: {size} bytes, written were {entry['bytes']}", "take an older checkpoint")
    if digest(file) != entry["blake3"]:
        raise VimeError(f"{file}: content has changed since it was written", "take an older checkpoint")
