"""``vime rollout``"""

from __future__ import annotations

from typing import Annotated

import typer

from vime.align.faults import Place, listed
from vime_cli import crash_view, output
from vime_cli.options import Arguments, AsJson, DryRun, PrintConfig, RayAddress, call
from vime_cli.prepare import console, prepare

Save = Annotated[
    str | None, typer.Option("--save", metavar="TEMPLATE", help="Save each rollout, e.g. data_{rollout_id}.pt.")
]
Inject = Annotated[
    list[str] | None,
    typer.Option(
        "--inject",
        metavar="FAULT",
        help="Plant a fault and see it caught: "
        f"{listed(Place.ENGINE, Place.PROMPTS, Place.CHECKPOINT)} (may be repeated). "
        "With --bisect-crash: a crash, such as 'segfault if prefix_caching and batch > 4'.",
    ),
]
Number = Annotated[
    int | None, typer.Option("-n", "--num-rollouts", metavar="N", help="Rollouts to generate; 0: evaluate once.")
]


def rollout(
    arguments: Arguments = None,
    save: Save = None,
    num_rollouts: Number = None,
    inject: Inject = None,
    ray_address: RayAddress = None,
    bisect_crash: crash_view.BisectCrash = False,
    from_record: crash_view.FromRecord = None,
    ids: crash_view.Ids = None,
    num_runs: crash_view.Runs = None,
    attempt_timeout: crash_view.Timeout = None,
    only: crash_view.Only = None,
    skip: crash_view.Skip = None,
    max_attempts: crash_view.MaxAttempts = None,
    html: crash_view.Html = None,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Generate and score only; Megatron is never loaded."""
    searching = crash_view.Options(
        tuple(arguments or ()), from_record, ids, num_runs, attempt_timeout, only, skip, max_attempts, html
    )
    printed = {"is_print_config": print_config, "is_dry_run": dry_run, "as_json": as_json}
    if bisect_crash:
        others = {"--save": save, "--num-rollouts": num_rollouts, "--ray-address": ray_address}
        asked = call(crash_view.COMMAND, arguments, {"debug.rollout_only": True}, **printed)
        crash_view.bisect(asked, searching, inject or [], others)
        return
    searching.refuse()
    options = {
        "debug.rollout_only": True,
        "debug.save_rollout_data": save,
        "run.num_rollouts": num_rollouts,
        "debug.inject": inject or None,
        "cluster.ray_address": ray_address,
    }
    loaded = prepare(call("rollout", arguments, options, **printed))
    from vime import runs

    with output.talk():
        found = runs.rollout(loaded=loaded, console=console(loaded))
    output.result(found, as_json)
