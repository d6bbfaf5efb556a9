"""``vime rollout``"""

from __future__ import annotations

from typing import Annotated

import typer

from vime.align.faults import Place, listed
from vime_cli import output
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
        f"{listed(Place.ENGINE, Place.PROMPTS, Place.CHECKPOINT)} (may be repeated).",
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
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Generate and score only; Megatron is never loaded."""
    options = {
        "debug.rollout_only": True,
        "debug.save_rollout_data": save,
        "run.num_rollouts": num_rollouts,
        "debug.inject": inject or None,
        "cluster.ray_address": ray_address,
    }
    printed = {"is_print_config": print_config, "is_dry_run": dry_run, "as_json": as_json}
    loaded = prepare(call("rollout", arguments, options, **printed))
    from vime import runs

    with output.talk():
        found = runs.rollout(loaded=loaded, console=console(loaded))
    output.result(found, as_json)
