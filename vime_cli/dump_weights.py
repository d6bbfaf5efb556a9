"""``vime dump-weights``"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from vime.errors import UsageError
from vime.files import check_target
from vime_cli import output, weights_view
from vime_cli.options import Arguments, AsJson, PrintConfig, RayAddress, call
from vime_cli.prepare import console, prepare

COMMAND = "dump-weights"
From = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="VIEW",
        help="checkpoint, trainer, engine-received or engine-held (may be repeated, compared at once). [default: all]",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder of the manifests and tensors. [default: <run.dir>-weights]"),
]
DigestsOnly = Annotated[bool, typer.Option("--digests-only", help="Manifests alone; no tensors are written.")]
Layer = Annotated[int | None, typer.Option("--layer", metavar="N", min=0, help="Only the tensors of this layer.")]
Match = Annotated[
    str | None, typer.Option("--match", metavar="REGEX", help="Only tensors whose names contain a match.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Instead of model.path: a Hugging Face folder, or a checkpoint of a run (loaded through the trainer).",
    ),
]
CopyMissing = Annotated[
    Path | None,
    typer.Option(
        "--copy-missing",
        metavar="DIR",
        help="Copy from this Hugging Face folder what a view never had (vision, MTP), so that the dump loads.",
    ),
]
Diff = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--diff",
        metavar="A B",
        help="Compare B with A, offline: manifests, dumps or Hugging Face folders. Exit code 1 on any difference.",
    ),
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison as an offline page.")]
Map = Annotated[
    bool, typer.Option("--map", help="Prove every rank's names a bijection onto the checkpoint; start nothing.")
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Train, and report what each weight sync compared and what that cost.")
]


def dump_weights(
    arguments: Arguments = None,
    views: From = None,
    out: Out = None,
    digests_only: DigestsOnly = False,
    layer: Layer = None,
    match: Match = None,
    checkpoint: Checkpoint = None,
    copy_missing: CopyMissing = None,
    diff: Diff = None,
    html: Html = None,
    is_map: Map = False,
    is_watch: Watch = False,
    ray_address: RayAddress = None,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> None:
    """Compare the weights of checkpoint, trainer and engine.

    Each is dumped, and compared with the first tensor by tensor. Exit code 1 where they differ.
    """
    taking: dict[str, Any] = {"--from": views, "--out": out, "--digests-only": digests_only or None, "--layer": layer}
    taking |= {"--match": match, "--checkpoint": checkpoint, "--copy-missing": copy_missing}
    if diff is not None:
        _alone("--diff", taking | {"RUN.toml": arguments, "--map": is_map or None, "--watch": is_watch or None})
        weights_view.compared(*diff, html, as_json)
        return
    options: dict[str, Any] = {"cluster.ray_address": ray_address}
    printed = {"is_print_config": print_config, "as_json": as_json}
    if is_map:
        _alone("--map", taking | {"--watch": is_watch or None, "--html": html})
        weights_view.static_map(prepare(call(f"{COMMAND} --map", arguments, options, **printed)), as_json)
        return
    if is_watch:
        _alone("--watch", taking | {"--html": html})
        _watched(arguments, options, printed)
        return
    chosen = _views(views)
    if html is not None:
        check_target(html, "--html")
    if "trainer" not in chosen and checkpoint is None:  # Megatron is never loaded
        options["debug.rollout_only"] = True
    loaded = prepare(call(COMMAND, arguments, options, **printed))
    from vime.runs.dump import Asked, dump_weights

    asked = Asked(
        chosen,
        out or _own_folder(loaded.config.run_dir),
        digests_only,
        layer,
        match,
        checkpoint,
        copy_missing,
    )
    with output.talk():
        found = dump_weights(loaded=loaded, console=console(loaded), asked=asked)
    weights_view.dumped(found, html, as_json)


def _watched(arguments: list[str] | None, options: dict[str, Any], printed: dict[str, Any]) -> None:
    as_json = printed["as_json"]
    loaded = prepare(call("train", arguments, options, **printed))
    from vime import runs

    with output.talk():
        found = runs.train(loaded=loaded, console=console(loaded))
    weights_view.watched(found, as_json)


def _views(names: list[str] | None) -> tuple[str, ...]:
    from difflib import get_close_matches

    from vime.preflight.packages import require

    require("vime dump-weights", "numpy")
    from vime.weights.manifest_file import VIEWS

    for name in names or ():
        if name not in VIEWS:
            near = get_close_matches(name, VIEWS, n=1, cutoff=0.4)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"--from {name}: is no view{meant}", f"views: {', '.join(VIEWS)}")
    return tuple(names or VIEWS)


def _own_folder(run_dir: str) -> Path:
    """Beside the run, and never over an earlier dump; what an interrupted one left is written over."""
    folder, number = Path(f"{run_dir}-weights"), 1
    while os.path.lexists(folder) and not _is_unfinished(folder):
        number += 1
        folder = Path(f"{run_dir}-weights-{number}")
    return folder


def _is_unfinished(folder: Path) -> bool:
    return folder.is_dir() and all(path.name.endswith(".writing") for path in folder.iterdir())


def _alone(option: str, others: dict[str, Any]) -> None:
    if stray := [name for name, value in others.items() if value is not None]:
        raise UsageError(f"{option} does not go with {', '.join(stray)}", "vime dump-weights --help shows the usage")
