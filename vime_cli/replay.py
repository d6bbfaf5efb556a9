"""``vime replay``"""

from __future__ import annotations

from typing import Annotated

import typer

from vime_cli import inspection, output
from vime_cli.comparison import Inject, Reference, Repeat, Vs, with_ids
from vime_cli.inspection import Diff, Export, Inspect, Limit, OneSample, Out, Sort, View, Where
from vime_cli.options import Arguments, AsJson, DryRun, PrintConfig, RayAddress, call
from vime_cli.prepare import console, prepare
from vime_cli.regenerate import COMMAND as REGENERATE
from vime_cli.regenerate import Regenerate, regenerate_records

Load = Annotated[
    str | None, typer.Option("--load", metavar="TEMPLATE", help="Saved rollouts, e.g. data_{rollout_id}.pt.")
]
Number = Annotated[int | None, typer.Option("-n", "--num-rollouts", metavar="N", help="Rollouts to train on.")]
Ids = Annotated[
    str | None, typer.Option("--ids", metavar="A:B", help="Rollouts A to B - 1, or one; -1 is the last that exists.")
]


def replay(
    arguments: Arguments = None,
    load: Load = None,
    num_rollouts: Number = None,
    ids: Ids = None,
    vs: Vs = None,
    repeat: Repeat = None,
    inject: Inject = None,
    regenerate: Regenerate = False,
    inspect: Inspect = None,
    where: Where = None,
    sort: Sort = None,
    limit: Limit = None,
    sample: OneSample = None,
    export: Export = None,
    out: Out = None,
    diff: Diff = None,
    ray_address: RayAddress = None,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train on saved rollouts under any parallel layout, and compare (--vs, --repeat); look (--inspect, --diff); or
    generate them again (--regenerate).
    """
    view = View(inspect, diff, ids, where, sort, limit, sample, export, out, as_json)
    run_options = {"RUN.toml or settings": arguments, "--load": load, "--num-rollouts": num_rollouts}
    run_options |= {"--vs": vs, "--repeat": repeat, "--inject": inject, "--regenerate": regenerate}
    run_options |= {"--ray-address": ray_address, "--print-config": print_config, "--dry-run": dry_run}
    if view.is_asked(run_options):
        inspection.look(view)
        return
    options = {
        "debug.train_only": True,
        "debug.load_rollout_data": load,
        "debug.inject": inject,
        "run.num_rollouts": num_rollouts,
        "cluster.ray_address": ray_address,
    }
    printed = {"is_print_config": print_config, "is_dry_run": dry_run, "as_json": as_json}
    if regenerate:
        live = {"debug.rollout_only": True, "debug.inject": inject, "cluster.ray_address": ray_address}
        others = {"--vs": vs, "--repeat": repeat, "--num-rollouts": num_rollouts}
        regenerate_records(call(REGENERATE, arguments, live, **printed), load, ids, others)
        return
    asked = with_ids(call("replay", arguments, options, **printed), ids, num_rollouts)
    reference = Reference(asked, vs, repeat)
    loaded = prepare(asked, reference.check)
    from vime import runs

    with output.talk():
        found = runs.replay(loaded=loaded, console=console(loaded), start=asked.start, against=reference.against)
    output.result(found, as_json)
