"""The ``vime`` command: six commands, one place that turns an error into a message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vime.errors import EXIT_RUN_FAILED, UsageError, VimeError
from vime.reward.breakpoints import DEBUG_SPEC
from vime_cli import output
from vime_cli.align_check import align_check
from vime_cli.debug_attach import app as debug_attach
from vime_cli.dump_weights import dump_weights
from vime_cli.replay import replay
from vime_cli.rollout import rollout
from vime_cli.train import train

EXIT_INTERRUPTED = 130


class Commands(TyperGroup):
    """The group of commands, with the exit codes of vime: 0 ok, 1 a check failed, 2 usage, 3 the run failed."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VimeError as error:
            output.error(error)
            _stop_at(error)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            output.say("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if type(error).__module__.startswith(("click.", "typer.")):
                raise  # usage errors of the command line itself, which the parser prints
            output.fault(error)
            _stop_at(error)
            raise typer.Exit(EXIT_RUN_FAILED) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train)
app.command("rollout")(rollout)
app.command("replay")(replay)
app.command("align-check")(align_check)
app.command("dump-weights")(dump_weights)
app.add_typer(debug_attach, name="debug-attach")


def _print_versions(is_asked: bool) -> None:
    if is_asked:
        output.versions()
        raise typer.Exit


@app.callback()
def vime(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models that can be debugged: vLLM generates, Megatron-core learns."""


def _introduce() -> None:
    """In a debug run: this process is the driver."""
    if os.environ.get(DEBUG_SPEC):
        from vime.debug.stop.identity import introduce

        introduce("driver")


def _stop_at(error: Exception) -> None:
    """In a debug run with --post-mortem: where it was raised, unless that was before anything was started."""
    if os.environ.get(DEBUG_SPEC) and not isinstance(error, UsageError):
        from vime.debug.stop.post_mortem import stop_at

        stop_at(error)


def main() -> None:
    """Entry point of the console script."""
    if sys.stdout is None:  # closed by the caller: nobody wants the result
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end of the process
    _introduce()
    try:
        app()
    finally:  # only the interpreter's own end is left, and one more Ctrl-C would print a traceback of it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
