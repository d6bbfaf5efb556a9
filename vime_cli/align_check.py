"""``vime align-check``"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vime.errors import UsageError
from vime.files import check_target
from vime_cli import output
from vime_cli.options import Arguments, AsJson, Call, DryRun, PrintConfig, RayAddress, call
from vime_cli.prepare import console, prepare

if TYPE_CHECKING:
    from vime.config.load import Loaded
    from vime.preflight.small import Size

Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="CHECK", help="Only this check, by name or step: weights, 8, 8c (may be repeated)."),
]
Skip = Annotated[list[str] | None, typer.Option("--skip", metavar="CHECK", help="Not this check (may be repeated).")]
FromRecord = Annotated[
    str | None,
    typer.Option("--from-record", metavar="TEMPLATE", help="Check on saved rollouts; vLLM is never loaded."),
]
Ids = Annotated[str | None, typer.Option("--ids", metavar="A:B", help="Which saved rollout; the first by default.")]
HowMuch = Annotated[
    str,
    typer.Option("--size", metavar="PxSxT", help="At most so many prompts, samples of each, tokens of a response."),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the page there too; it is report.html of run.dir.")
]
Inject = Annotated[
    list[str] | None,
    typer.Option("--inject", metavar="FAULT", help="Plant a fault, see it caught; --list names them."),
]
SelfTest = Annotated[
    bool, typer.Option("--self-test", help="Plant every fault in tiny models: the table of faults and checks.")
]
Family = Annotated[
    list[str] | None, typer.Option("--family", metavar="NAME", help="With --self-test: only this model (repeatable).")
]
OneFault = Annotated[
    list[str] | None, typer.Option("--fault", metavar="FAULT", help="With --self-test: only this fault (repeatable).")
]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="With --self-test: write the table there too.")
]
Bisect = Annotated[
    bool, typer.Option("--bisect", help="Find the first module whose output differs between trainer and engine.")
]
Of = Annotated[
    str | None, typer.Option("--of", metavar="SIDE", help="With --bisect: trainer, engine or hf. [default: engine]")
]
Versus = Annotated[
    str | None,
    typer.Option("--against", metavar="SIDE", help="With --bisect: the side it is compared with. [default: trainer]"),
]
OneSample = Annotated[
    str | None,
    typer.Option("--sample", metavar="GROUP/INDEX", help="With --bisect: which sample; else the worst one."),
]
SIZE = "4x4x64"
Listed = Annotated[bool, typer.Option("--list", help="List checks and faults; start nothing.")]


def align_check(
    arguments: Arguments = None,
    only: Only = None,
    skip: Skip = None,
    from_record: FromRecord = None,
    ids: Ids = None,
    size: HowMuch = SIZE,
    html: Html = None,
    inject: Inject = None,
    self_test: SelfTest = False,
    family: Family = None,
    fault: OneFault = None,
    markdown: Markdown = None,
    bisect: Bisect = False,
    of: Of = None,
    against: Versus = None,
    sample: OneSample = None,
    is_list: Listed = False,
    ray_address: RayAddress = None,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Walk the debug guide: each check with a verdict, and why.

    Trainer and engine, on a small rollout of the run as it is configured. Exit code 1 where a check failed.
    """
    from vime.preflight.packages import require
    from vime.preflight.small import Size

    if is_list:
        require("the list of checks", "numpy")
        output.checks(as_json)
        return
    chosen = {"--only": only, "--skip": skip}
    others: dict[str, object] = {"RUN.toml": arguments, **chosen, "--from-record": from_record, "--ids": ids}
    others |= {"--size": size if size != SIZE else None, "--html": html, "--inject": inject, "--bisect": bisect}
    others |= {"--ray-address": ray_address, "--print-config": print_config, "--dry-run": dry_run}
    if _is_self_test(self_test, {"--family": family, "--fault": fault, "--markdown": markdown}, others):
        _self_test(family, fault, markdown, as_json)
        return
    if bisect:
        _alone("--bisect", chosen, "it is one comparison and no walk over checks")
    if ids is not None and from_record is None:
        raise UsageError(f"--ids {ids}: belongs to --from-record", "name the records with --from-record")
    if html is not None:
        check_target(html, "--html")
    sides = _sides(bisect, {"--of": of, "--against": against, "--sample": sample})
    record = from_record if sides is None else None  # a bisection runs engines beside recorded tokens
    options = {
        "debug.load_rollout_data": record,
        "debug.inject": inject or None,
        "cluster.ray_address": ray_address,
    }
    printed = {"is_print_config": print_config, "is_dry_run": dry_run, "as_json": as_json}
    asked = _small(call("align-check", arguments, options, **printed), Size.of(size), _recorded(record, ids))
    names = (_names(only), _names(skip))
    loaded = prepare(asked, lambda loaded: _say_settings(asked, loaded, *names))
    if sides is not None:
        from vime.runs.bisect import Asked as Sides
        from vime.runs.bisect import bisected

        with output.talk():
            wanted = Sides(*sides, sample, from_record, ids, html)
            difference = bisected(loaded=loaded, console=console(loaded), asked=wanted)
        output.bisected(difference, as_json)
        return
    from vime.runs.align import Asked, align_check

    with output.talk():
        what = Asked(*names, from_record, ids, html)
        found = align_check(loaded=loaded, console=console(loaded), asked=what)
    output.aligned(found, as_json)


def _is_self_test(is_asked: bool, given: dict[str, object], others: dict[str, object]) -> bool:
    """UsageError for options of a self-test that nobody asked for, and for what a self-test has no use for."""
    if not is_asked and (lost := [name for name, value in given.items() if value]):
        raise UsageError(f"{lost[0]}: belongs to --self-test", "add --self-test")
    if is_asked:
        _alone("--self-test", others, "it has models, settings and faults of its own")
    return is_asked


def _alone(option: str, others: Mapping[str, object], why: str) -> None:
    if stray := [name for name, value in others.items() if value]:
        raise UsageError(f"{option} does not go with {', '.join(stray)}: {why}", "leave one of them out")


def _self_test(families: list[str] | None, faults: list[str] | None, page: Path | None, as_json: bool) -> None:
    from vime.log import Progress, setup_logging
    from vime.preflight.packages import ENGINE, TRAINER, require

    require("align-check --self-test", *dict.fromkeys((*ENGINE, *TRAINER)))
    from vime.runs.self_test import Asked, self_test

    setup_logging()
    if page is not None:
        check_target(page, "--markdown")
    asked = Asked(_names(families), _names(faults), page)
    with output.talk():
        found = self_test(console=Progress(), asked=asked)
    output.bisected(found, as_json)


def _names(given: list[str] | None) -> tuple[str, ...]:
    """``--only names,8c --only 3`` names three checks. UsageError for an option that names nothing."""
    if empty := [text for text in given or () if not text.strip(", ")]:
        raise UsageError(f"{empty[0]!r} names nothing", "vime align-check --list shows what there is")
    return tuple(name.strip() for text in given or () for name in text.split(",") if name.strip())


def _say_settings(asked: Call, loaded: Loaded, only: tuple[str, ...], skip: tuple[str, ...]) -> None:
    """What the walk has otherwise than the files. UsageError for a name that is no check's, before anything starts."""
    from vime.config.load import read
    from vime.preflight.packages import is_installed
    from vime.preflight.small import changed

    if is_installed("numpy"):  # which the checks themselves need
        from vime.align.checks import CHECKS
        from vime.align.walk import chosen

        chosen(CHECKS, only, skip)
    if lines := changed(read(asked.files, asked.overrides), loaded, asked.derived):
        output.say(f"align-check has settings of its own: {', '.join(lines)}")


def _sides(is_bisection: bool, given: dict[str, str | None]) -> tuple[str, str] | None:
    """The sides of ``--bisect``; None without it. UsageError for sides that there are not, and options of nothing."""
    from vime.preflight.sides import two_sides

    if is_bisection:
        if (name := given["--sample"]) is not None and re.fullmatch(r"\d+/\d+", name, re.ASCII) is None:
            raise UsageError(f"--sample {name}: is not GROUP/INDEX", "for example --sample 0/1")
        return two_sides(given["--of"], given["--against"])
    if lost := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{lost[0]} {given[lost[0]]}: belongs to --bisect", "add --bisect")
    return None


def _recorded(template: str | None, ids: str | None) -> int | None:
    """The rollout that is walked on; None where it is a live one. UsageError where there is no such record."""
    from vime.record.files import record_files

    if template is None:
        return None
    found = record_files(template, ids, "--from-record")[0].rollout_id
    return found or 0


def _small(asked: Call, size: Size, recorded: int | None) -> Call:
    """With the settings of the walk."""
    from vime.config.load import read
    from vime.preflight.small import small_walk

    config = read(asked.files, asked.overrides).config
    return replace(asked, derived=small_walk(config, size, recorded), start=recorded or 0)
