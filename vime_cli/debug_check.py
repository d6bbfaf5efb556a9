"""``vime debug-attach check``"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vime.errors import CheckFailed, UsageError
from vime_cli import output

if TYPE_CHECKING:
    from vime.debug.leftovers.sources import Checked

Paths = Annotated[
    list[str], typer.Argument(metavar="PATHS", help="Files, folders (their *.py files), or - for standard input.")
]
Fix = Annotated[
    bool, typer.Option("--fix", help="Take out what stands alone, and imports that nothing else uses; leave the rest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was found as JSON on stdout.")]


def check(paths: Paths, fix: Fix = False, as_json: AsJson = False) -> None:
    """Find breakpoints and other leftovers of debugging in files.

    One line each: file:line:column. A line that says # vime: keep is left alone. Exit code 1 where there is a
    leftover or a file that could not be read, 2 where nothing could be checked.
    """
    from vime.debug.leftovers import sources

    stdin = sys.stdin.buffer.read() if sources.STDIN in paths else None
    found = sources.check(paths, stdin, fix)
    if as_json:
        output.data(sources.as_dict(found))
    else:
        _show(found)
    _judge(found, fix)


def _show(found: Checked) -> None:
    for file in found.removed:
        for one in file.leftovers:
            output.say(f"{one.place}: removed {one.text}")
        if file.imports:
            output.say(f"{file.file}: removed the import of {', '.join(file.imports)}, which nothing else uses")
    lines = []
    for leftover in found.leftovers:
        reason = found.reasons.get(leftover.place)
        lines.append(
            f"{leftover.place}: {leftover.text}: {leftover.why}" + (f"; not removed: {reason}" if reason else "")
        )
    lines += [f"{name}: not checked: {reason}" for name, reason in found.not_checked]
    if lines:
        output.report(lines)


def _judge(found: Checked, fix: bool) -> None:
    files = {one.file for one in found.leftovers}
    of = _count(found.num_files, "file")
    if found.not_checked and not found.num_files:
        reasons = list(dict.fromkeys(reason for _, reason in found.not_checked))
        raise UsageError(f"nothing was checked: {reasons[0] if len(reasons) == 1 else 'no file could be read'}")
    done = f"{found.num_removed} removed, " if fix else ""
    kept = f", {len(found.kept)} kept by # vime: keep" if found.kept else ""
    unread = f", {len(found.not_checked)} not checked" if found.not_checked else ""
    if found.leftovers or found.not_checked:
        left = (
            f"{_count(len(found.leftovers), 'leftover')} in {len(files)} of {of}"
            if found.leftovers
            else f"none in {of}"
        )
        raise CheckFailed(f"{done}{left}{kept}{unread}", _hint(found, fix))
    output.say(f"{done}no leftovers in {of}{kept}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _hint(found: Checked, fix: bool) -> str | None:
    if not found.leftovers:
        return None
    if fix:
        return "take these out by hand, or write # vime: keep on the lines that are meant"
    return "--fix takes out what stands alone; # vime: keep on a line leaves it"
