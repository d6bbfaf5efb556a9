"""``vime replay``"""

from __future__ import annotations

from typing import Annotated

import typer

from vime_cli import output
from vime_cli.options import Arguments, AsJson, DryRun, PrintConfig, RayAddress, call
from vime_cli.prepare import console, prepare

Load = Annotated[
    str | None, typer.Option("--load", metavar="TEMPLATE", help="Saved rollouts, e.g. data_{rollout_id}.pt.")
]
Number = Annotated[int | None, typer.Option("-n", "--num-rollouts", metavar="N", help="Rollouts to train on.")]


def replay(
    arguments: Arguments = None,
    load: Load = None,
    num_rollouts: Number = None,
    ray_address: RayAddress = None,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train on saved rollouts, under any parallel layout."""
    options = {
        "debug.train_only": True,
        "debug.load_rollout_data": load,
        "run.num_rollouts": num_rollouts,
        "cluster.ray_address": ray_address,
    }
    printed = {"is_print_config": print_config, "is_dry_run": dry_run, "as_json": as_json}
    loaded = prepare(call("replay", arguments, options, **printed))
    from vime import runs

    output.result(runs.replay(loaded=loaded, console=console(loaded)), as_json)
