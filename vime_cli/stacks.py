"""``vime debug-attach stacks``"""

from __future__ import annotations

from typing import Annotated

import typer

from vime.errors import UsageError
from vime_cli import output
from vime_cli.options import AsJson

RunDir = Annotated[
    str | None, typer.Argument(metavar="RUN_DIR", help="Folder of the run; without it, your only run on this machine.")
]
Rank = Annotated[int | None, typer.Option("--rank", metavar="N", help="Only this trainer rank, in full.")]
Native = Annotated[bool, typer.Option("--native", help="With the frames of C code (slower).")]


def stacks(run_dir: RunDir = None, rank: Rank = None, native: Native = False, as_json: AsJson = False) -> None:
    """Where every process of a run stands, the odd one first.

    Processes that stand alike are shown together. It needs no debug run.
    """
    from vime.debug.everywhere import look
    from vime.debug.processes import find_run, is_live, read_roster
    from vime.debug.stacks import in_full

    folder = find_run(run_dir)
    roster = read_roster(folder)
    if not is_live(roster):
        raise UsageError(f"{folder}: the run has ended", "what a hang left is in its stacks_*.txt")
    members = [m for m in roster.members if rank is None or (m.role, m.rank) == ("trainer", rank)]
    if not members:
        ranks = ", ".join(str(m.rank) for m in sorted(roster.members) if m.role == "trainer")
        raise UsageError(f"--rank {rank}: no such trainer rank", f"there are: {ranks or 'none (yet)'}")
    picture = look(members, roster.facts, native)
    if as_json:
        output.data({"run_dir": str(folder), **picture.as_dict()})
    elif rank is not None:
        output.report([in_full(picture.dumps)])
    else:
        output.report([f"{folder}: {picture.culprit or 'nobody stands out'}", "", *picture.short_lines()])
