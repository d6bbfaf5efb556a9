"""From a call to a checked configuration; nothing is started and nothing heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vime_cli import output
from vime_cli.options import Call

if TYPE_CHECKING:
    from vime.config.load import Loaded
    from vime.log import Progress

OWN_FOLDER = {"rollout": "rollout", "replay": "replay", "align-check": "align", "rollout --bisect-crash": "crash"}


def prepare(call: Call, and_check: Callable[[Loaded], None] = lambda loaded: None) -> Loaded:
    """The configuration, free of problems. Ends the command after --print-config and --dry-run.

    Raises ConfigError with all problems of the configuration and of what it names, and what ``and_check`` raises.
    """
    from vime.config.load import read
    from vime.config.sources import DEFAULT
    from vime.debug.stop.hold import raised_run
    from vime.log import setup_logging
    from vime.preflight import preflight

    setup_logging()
    loaded = read(call.files, call.overrides, derived=call.derived)
    if call.command in OWN_FOLDER and loaded.origin("run.dir") == DEFAULT:
        own = _own_folder(loaded, OWN_FOLDER[call.command])
        loaded = read(call.files, call.overrides, own, call.derived)
    if call.is_print_config:
        print_config(call, loaded)
    with output.talk():
        found = preflight(loaded, call.command, resume=call.resume, start=call.start, is_dry_run=call.is_dry_run)
        output.warn(found.warnings)
        found.raise_problems()
        and_check(loaded)
    if call.is_dry_run:
        output.dry_run(found, call.as_json)
        raise typer.Exit
    loaded, text = raised_run(loaded)
    if text:
        output.say(text)
    return loaded


def _own_folder(loaded: Loaded, name: str) -> str:
    """Where a command that one gives again and again writes by default: beside the training run, and never over it."""
    from vime.run_folder import RunFolder

    folder, number = f"runs/{{name}}-{name}", 1
    while RunFolder(Path(folder.replace("{name}", loaded.config.run.name))).has_results():
        if loaded.config.run.overwrite:
            break
        number += 1
        folder = f"runs/{{name}}-{name}-{number}"
    return folder


def print_config(call: Call, loaded: Loaded) -> None:
    """Print the settings, then end: with ConfigError where one of them is wrong."""
    from vime.config.show import rows
    from vime.errors import ConfigError

    output.settings(rows(loaded), call.as_json)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    raise typer.Exit


def console(loaded: Loaded) -> Progress:
    """Where a run says how it goes (stderr)."""
    from vime.log import Progress

    return Progress(loaded.config.run.num_rollouts)
