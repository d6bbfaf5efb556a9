"""Which record files a template or a path names, and what to say where it names none."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from vime.errors import UsageError
from vime.record.template import (
    PLACEHOLDER,
    TRAINING_SUFFIX,
    WRITTEN_BY,
    absent_problem,
    has_placeholder,
    list_ids,
    missing_problem,
    parse_ids,
    template_path,
)


@dataclass(frozen=True, slots=True)
class RecordFile:
    """``rollout_id`` is that of the name; None for a literal path."""

    path: Path
    rollout_id: int | None


def record_files(template: str, ids: str | None = None, option: str = "--inspect") -> list[RecordFile]:
    """The files of ``template``, those of ``--ids`` alone if it is given. UsageError names the ids that exist."""
    if os.path.isdir(template):
        raise UsageError(f"{option} {template} is a folder", _templates_hint(Path(template)))
    first = template_path(template, 0)  # refuses what is no template
    if not has_placeholder(template):
        if ids is not None:
            raise UsageError(
                f"--ids {ids}: {template} is one file; ids need {{{PLACEHOLDER}}} in the name",
                _templates_hint(Path(template).parent),
            )
        if problem := absent_problem(first):
            raise UsageError(problem, _templates_hint(first.parent))
        return [RecordFile(first, None)]
    existing = list_ids(template)
    if not existing:
        raise UsageError(f"{template}: there is no file for any id", _templates_hint(first.parent))
    wanted = existing if ids is None else parse_ids(ids, existing)
    if problem := missing_problem(template, wanted):
        raise UsageError(problem)
    return [RecordFile(template_path(template, i), i) for i in wanted]


def _templates_hint(folder: Path) -> str:
    found = templates_in(folder)
    return f"records here: {', '.join(found)}" if found else WRITTEN_BY


def templates_in(folder: Path, limit: int = 5) -> list[str]:
    """The templates of the ``*.pt`` files of a folder: the last number of a name is taken for the rollout id.

    Training records are left out: nobody can look at them.
    """
    found: dict[str, int] = {}
    paths = sorted(folder.glob("*.pt")) if folder.is_dir() else []
    for path in (path for path in paths if not path.name.endswith(TRAINING_SUFFIX)):
        name = re.sub(r"(.*?)(\d+)(\D*)$", _placeholder, path.name, count=1)
        found[name] = found.get(name, 0) + 1
    return [str(folder / name) for name in sorted(found, key=lambda n: -found[n])[:limit]]


def _placeholder(match: re.Match[str]) -> str:
    digits = match[2]
    form = f":0{len(digits)}d" if len(digits) > 1 and digits.startswith("0") else ""
    return f"{match[1]}{{{PLACEHOLDER}{form}}}{match[3]}"
