"""``vime rollout --bisect-crash``: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vime.errors import UsageError
from vime.files import check_target
from vime_cli import output
from vime_cli.options import Call
from vime_cli.prepare import console, prepare

COMMAND = "rollout --bisect-crash"

BisectCrash = Annotated[
    bool,
    typer.Option(
        "--bisect-crash",
        help="Find the settings and the requests that make the engine crash or hang; nothing else is run. "
        "Exit code 1 where it does, 0 where that is not reproduced.",
    ),
]
FromRecord = Annotated[
    str | None,
    typer.Option(
        "--from-record",
        metavar="FILE",
        help="With --bisect-crash: send the requests of this rollout record. [default: those of rollout 0]",
    ),
]
Ids = Annotated[
    str | None, typer.Option("--ids", metavar="IDS", help="With --from-record TEMPLATE: which rollouts, such as 3,5-7.")
]
Runs = Annotated[
    int | None,
    typer.Option("--runs", metavar="N", min=1, help="With --bisect-crash: runs that confirm it. [default: 3]"),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--attempt-timeout",
        metavar="SECONDS",
        min=1.0,
        help="With --bisect-crash: answers that take longer hang; the start has cluster.start_timeout_seconds. "
        "[default: 120]",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="AXIS", help="With --bisect-crash: change these settings alone (may be repeated)."),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="AXIS", help="With --bisect-crash: leave these settings (may be repeated)."),
]
MaxAttempts = Annotated[
    int | None,
    typer.Option(
        "--max-attempts", metavar="N", min=1, help="With --bisect-crash: at most so many engine starts. [default: 100]"
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="With --bisect-crash: also write the report as a page.")
]


@dataclass(frozen=True)
class Options:
    """As given; None where not."""

    words: tuple[str, ...]
    from_record: str | None
    ids: str | None
    runs: int | None
    timeout: float | None
    only: list[str] | None
    skip: list[str] | None
    max_attempts: int | None
    html: Path | None

    def refuse(self) -> None:
        """UsageError for one that is given without --bisect-crash."""
        given: Mapping[str, Any] = {
            "--from-record": self.from_record,
            "--ids": self.ids,
            "--runs": self.runs,
            "--attempt-timeout": self.timeout,
            "--only": self.only,
            "--skip": self.skip,
            "--max-attempts": self.max_attempts,
            "--html": self.html,
        }
        if lost := [name for name, value in given.items() if value]:
            raise UsageError(f"{lost[0]}: belongs to --bisect-crash", "add --bisect-crash")


def bisect(call: Call, options: Options, planted: Sequence[str], others: Mapping[str, Any]) -> None:
    """Search, print, judge. UsageError if ``others``, options of a rollout, were given too."""
    from vime.debug.crash.planted import parse
    from vime.debug.crash.toggles import check_axes

    if stray := [name for name, value in others.items() if value is not None]:
        raise UsageError(f"--bisect-crash searches: it does not go with {', '.join(stray)}")
    if options.ids is not None and options.from_record is None:
        raise UsageError(f"--ids {options.ids}: belongs to --from-record", "name the records with --from-record")
    if options.html is not None:
        check_target(options.html, "--html")
    check_axes(options.only or (), "--only")
    check_axes(options.skip or (), "--skip")
    faults = tuple(parse(text) for text in planted)
    loaded = prepare(call)
    from vime.runs import crash

    asked = crash.Asked(
        options.words,
        options.from_record,
        options.ids,
        options.runs or crash.NUM_RUNS,
        options.timeout or crash.TIMEOUT_SECONDS,
        options.max_attempts or crash.MAX_ATTEMPTS,
        tuple(options.only or ()),
        tuple(options.skip or ()),
        faults,
        options.html,
    )
    crash.check(loaded)
    with output.talk():
        found = crash.bisect_crash(loaded=loaded, console=console(loaded), asked=asked)
    output.crash(found, found.tables(), call.as_json)
    if found.found.is_interrupted:
        raise KeyboardInterrupt
