"""``vime train``"""

from __future__ import annotations

from typing import Annotated

import typer

from vime_cli import output
from vime_cli.options import Arguments, AsJson, DryRun, PrintConfig, RayAddress, SaveRecords, call, flag
from vime_cli.prepare import console, prepare

LoadRecords = Annotated[
    str | None,
    typer.Option(
        "--load-debug-rollout-data", metavar="TEMPLATE", help="Train on saved rollouts; sets --debug-train-only."
    ),
]
RolloutOnly = Annotated[bool, typer.Option("--debug-rollout-only", help="Generate only; Megatron is never loaded.")]
TrainOnly = Annotated[
    bool, typer.Option("--debug-train-only", help="Train on saved rollouts only; vLLM is never loaded.")
]
Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="RUN_DIR", help="Go on from the newest checkpoint of this run folder."),
]


def train(
    arguments: Arguments = None,
    debug_rollout_only: RolloutOnly = False,
    debug_train_only: TrainOnly = False,
    save_debug_rollout_data: SaveRecords = None,
    load_debug_rollout_data: LoadRecords = None,
    resume: Resume = None,
    ray_address: RayAddress = None,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Generate, score, learn, sync weights; again and again."""
    options = {
        "debug.rollout_only": flag(debug_rollout_only),
        "debug.train_only": flag(debug_train_only),
        "debug.save_rollout_data": save_debug_rollout_data,
        "debug.load_rollout_data": load_debug_rollout_data,
        "cluster.ray_address": ray_address,
        "run.dir": resume,
    }
    printed = {"is_print_config": print_config, "is_dry_run": dry_run, "as_json": as_json}
    loaded = prepare(call("train", arguments, options, resume=resume, **printed))
    from vime import runs

    with output.talk():
        found = runs.train(loaded=loaded, resume=resume, console=console(loaded))
    output.result(found, as_json)
