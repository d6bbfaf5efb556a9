"""``vime debug-attach``: a group of commands, one file each."""

from __future__ import annotations

import typer

from vime_cli import output
from vime_cli.debug_check import check
from vime_cli.debug_connect import WithOptionalValues, connect
from vime_cli.debug_doctor import doctor
from vime_cli.debug_list import list_stops
from vime_cli.debug_resume import pause, resume
from vime_cli.debug_run import CONTEXT, EXAMPLES, run
from vime_cli.debug_stop import stop
from vime_cli.stacks import stacks

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
app.command("run", context_settings=CONTEXT, epilog=EXAMPLES)(run)
app.command("list")(list_stops)
app.command("connect", cls=WithOptionalValues)(connect)
app.command("resume")(resume)
app.command("pause")(pause)
app.command("stop")(stop)
app.command("stacks")(stacks)
app.command("check")(check)
app.command("doctor")(doctor)


@app.callback()
def debug_attach(context: typer.Context) -> None:
    """Stop any process of a run, and attach to it.

    No file is changed, and nothing has to be taken out afterwards. run starts a program with points and is left
    open: it announces each stop. list, connect, resume, pause and stop are given in another terminal.
    """
    if context.invoked_subcommand in (None, "check"):  # a hook of pre-commit needs nothing but Python
        return
    from vime.debug.attach.doctor import quick

    output.warn(quick(context.invoked_subcommand or ""))
