"""Arguments and options that several commands share, and how they become files and KEY=VALUE."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from vime.errors import UsageError

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN.toml|KEY=VALUE",
        help="TOML files in order, later ones win; then settings such as train.lr=1e-6 (--print-config lists them).",
        show_default=False,
    ),
]
SaveRecords = Annotated[
    str | None,
    typer.Option("--save-debug-rollout-data", metavar="TEMPLATE", help="Save each rollout, e.g. data_{rollout_id}.pt."),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", metavar="ADDRESS", help="Join this Ray cluster instead of starting a private one."),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print every setting, its value and where it came from; start nothing.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print layout and memory forecast; start nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]

_KEY_VALUE = re.compile(r"[\w-]+(\.[\w-]+)*=", re.ASCII)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of vime: what to do, with which settings, and what to print. ``start``: the first rollout to do;
    ``derived``: settings that the command itself wants, by dotted path.
    """

    command: str
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    resume: str | None = None
    start: int = 0
    is_print_config: bool = False
    is_dry_run: bool = False
    as_json: bool = False
    derived: Mapping[str, Any] = field(default_factory=dict)


def call(command: str, arguments: Sequence[str] | None, options: Mapping[str, Any], **rest: Any) -> Call:
    """Split ``arguments`` into TOML files and KEY=VALUE. ``options`` (dotted path -> value) win; None: not given."""
    files, overrides = split(arguments or ())
    if rest.get("resume") and not files:
        files = [_saved_config(Path(rest["resume"]))]
    given = {path: value for path, value in options.items() if value is not None}
    overrides += [f"{path}={json.dumps(value, ensure_ascii=False)}" for path, value in given.items()]
    return Call(command, tuple(files), tuple(overrides), **rest)


def _saved_config(folder: Path) -> Path:
    """A run folder says what it is."""
    file = folder / "config.toml"
    if not os.path.isfile(file):
        hint = "name the run.dir of an earlier run with checkpoint.save_interval > 0"
        raise UsageError(f"--resume {folder}: is no run folder (it has no config.toml)", hint)
    return file


def split(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(files, KEY=VALUE). What is neither is left among the latter, where it is reported with all other problems."""
    files = [Path(a) for a in arguments if not _KEY_VALUE.match(a) and a.endswith(".toml")]
    return files, [a for a in arguments if _KEY_VALUE.match(a) or not a.endswith(".toml")]


def flag(is_set: bool) -> bool | None:
    """A flag that is not given leaves the setting as the files have it."""
    return True if is_set else None
