"""``vime debug-attach``: a group of commands, one file each."""

from __future__ import annotations

import typer

from vime_cli.debug_check import check
from vime_cli.stacks import stacks

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
app.command("check")(check)
app.command("stacks")(stacks)


@app.callback()
def debug_attach() -> None:
    """Find leftovers, show stacks; attach (to come)."""
