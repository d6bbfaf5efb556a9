"""Names of record files: a template such as ``data_{rollout_id}.pt``, as in ``template.format(rollout_id=...)``."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Formatter

from vime.config.rules import template_problem
from vime.errors import UsageError

PLACEHOLDER = "rollout_id"
TRAINING_SUFFIX = ".train.pt"
MAX_IDS = 100_000
WRITTEN_BY = "records are written by vime rollout --save and vime train --save-debug-rollout-data"


def template_path(template: str, rollout_id: int) -> Path:
    """The file of one rollout. UsageError if the template has another placeholder or a broken one."""
    problems = _syntax_problems(template)
    if problems:
        raise UsageError("\n".join(problems), f"the only placeholder is {{{PLACEHOLDER}}}")
    return Path(template.format(rollout_id=rollout_id))


def training_template(template: str) -> str:
    """Name of the training record beside a record: data_{rollout_id}.pt -> data_{rollout_id}.train.pt."""
    stem, dot, suffix = template.rpartition(".")
    if dot and not set("}/") & set(suffix):
        return f"{stem}.train.{suffix}"
    return f"{template}.train"


def check_template(
    template: str, num_rollouts: int, *, first_rollout_id: int = 0, overwrite: bool = False
) -> list[str]:
    """Problems of writing ``num_rollouts`` files to ``template``; empty where all is well.

    Several rollouts need ``{rollout_id}``; a literal path is good for exactly one. Files that exist are a problem
    unless ``overwrite``. A format such as ``{rollout_id:05d}`` is allowed.
    """
    problems = _syntax_problems(template)
    if problems:
        return problems
    ids = range(first_rollout_id, first_rollout_id + num_rollouts)
    if num_rollouts > 1 and not has_placeholder(template):
        return [
            f"{template!r} names one file for {num_rollouts} rollouts: each would overwrite the one before; "
            f"put {{{PLACEHOLDER}}} into the name"
        ]
    if overwrite or not num_rollouts:
        return []
    done = [i for i in list_ids(template) if i in ids] if has_placeholder(template) else [first_rollout_id]
    existing = [path for path in (template_path(template, i) for i in done) if path.exists()]
    return [f"{p} exists already (set run.overwrite=true to replace it)" for p in existing]


def list_ids(template: str) -> list[int]:
    """The rollout ids whose files exist, in order. A literal path (no placeholder) has no ids: []."""
    if _syntax_problems(template) or not has_placeholder(template):
        return []
    pattern, expression = "", ""
    for literal, name, _, _ in Formatter().parse(template):
        pattern += glob.escape(literal) + ("*" if name is not None else "")
        expression += re.escape(literal) + (r"(\d+)" if name is not None else "")
    ids = set()
    for found in glob.glob(pattern):
        match = re.fullmatch(expression, found)
        if match and len(set(map(int, match.groups()))) == 1 and template.format(rollout_id=int(match[1])) == found:
            ids.add(int(match[1]))
    return sorted(ids)


def absent_problem(path: Path) -> str | None:
    """Why ``path`` is no file to read; None if it is one."""
    if path.is_file():
        return None
    return f"{path}: {'is no regular file' if path.exists() else 'no such file'}"


def missing_problem(template: str, rollout_ids: Iterable[int]) -> str | None:
    """One message naming the rollout ids that have no file beside those that exist; None if all are there."""
    wanted = list(rollout_ids)
    if not has_placeholder(template):
        if len(wanted) > 1:
            return f"{template!r} names one file, but {len(wanted)} rollouts are asked for; put {{{PLACEHOLDER}}} in"
        return absent_problem(template_path(template, wanted[0])) if wanted else None
    missing = [i for i in wanted if not template_path(template, i).is_file()]
    if not missing:
        return None
    existing = list_ids(template)
    there = f"existing ids: {_ranges(existing)}" if existing else "there is no file for any id"
    return f"{template}: no file for rollout_id {_ranges(missing)}; {there}"


def parse_ids(text: str, existing: Sequence[int]) -> list[int]:
    """``--ids``: one rollout id, or ``A:B`` as in Python (A to B - 1). A bound that is left out is the end of the list.

    Negative numbers count from the last of the ids that exist: -1 is the last, ``-2:`` the last two. UsageError where
    the text is something else, or names no id. Whether the ids have a file is for ``missing_problem`` to say.
    """
    match = re.fullmatch(r"\s*(-?\d{1,18})?\s*(?:(:)\s*(-?\d{1,18})?\s*)?", text)
    if match is None or not (match[1] or match[2]):
        raise UsageError(f"--ids {text}: is no rollout id and no range", "for example --ids 3, --ids 0:4 or --ids -1")
    if not match[2]:
        return [_counted(int(match[1]), existing)]
    first = _counted(int(match[1]), existing) if match[1] else min(existing, default=0)
    end = _counted(int(match[3]), existing) if match[3] else max(existing, default=-1) + 1
    # With both bounds every id of the range is asked for, with an open end those that exist.
    ids = range(first, end) if match[1] and match[3] else [i for i in existing if first <= i < end]
    if not ids or len(ids) > MAX_IDS:
        there = f"existing ids: {_ranges(list(existing))}" if existing else "there is no file for any id"
        problem = f"more than {MAX_IDS} rollouts" if ids else "no rollout"
        raise UsageError(f"--ids {text}: names {problem}; {there}", "A:B goes from A to B - 1, as in Python")
    return list(ids)


def _counted(i: int, existing: Sequence[int]) -> int:
    if i >= 0:
        return i
    if -i > len(existing):
        raise UsageError(f"--ids {i}: only {len(existing)} rollouts exist", "-1 is the last one that exists")
    return existing[i]


def _syntax_problems(template: str) -> list[str]:
    if not template:
        return ["the record template is empty"]
    problem = template_problem(template)
    return [f"{template!r} is no template: {problem}"] if problem else []


def has_placeholder(template: str) -> bool:
    """False for a literal path, which is good for exactly one rollout."""
    return any(name is not None for _, name, _, _ in Formatter().parse(template))


def _ranges(ids: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    parts: list[list[int]] = []
    for i in ids:
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
