"""Options of ``vime replay`` that say which rollouts are trained on and what the replay is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from vime.align.faults import Place, listed
from vime.errors import UsageError
from vime_cli.options import Call

if TYPE_CHECKING:
    from vime.config.load import Loaded
    from vime.preflight.against import Against

Vs = Annotated[
    str | None,
    typer.Option(
        "--vs",
        metavar="LAYOUT|RECORD",
        help="Compare with another layout, run first (tp=1,pp=1; dp=2; max_tokens_per_micro_batch=64; one), "
        "or with the recorded run.",
    ),
]
Repeat = Annotated[
    int | None, typer.Option("--repeat", metavar="K", help="Run K times, and compare bitwise with the first run.")
]
Inject = Annotated[
    list[str] | None,
    typer.Option(
        "--inject",
        metavar="FAULT",
        help=f"Plant a fault in the replay, not in its reference, to see it found: {listed(Place.TRAINER)}.",
    ),
]


def with_ids(call: Call, ids: str | None, num_rollouts: int | None) -> Call:
    """``--ids A:B`` becomes the first rollout and run.num_rollouts. UsageError lists the ids that exist."""
    from vime.config.load import read
    from vime.preflight.against import rollout_ids

    if ids is None:
        return call
    if num_rollouts is not None:
        raise UsageError(f"--ids {ids} and --num-rollouts {num_rollouts}: both say which rollouts", "leave one out")
    template = read(call.files, call.overrides).config.debug.load_rollout_data
    if template is None:
        raise UsageError(f"--ids {ids}: there are no saved rollouts to choose from", "name them with --load TEMPLATE")
    found = rollout_ids(template, ids)
    return replace(call, start=found.start, overrides=(*call.overrides, f"run.num_rollouts={found.stop}"))


@dataclass
class Reference:
    """What ``--vs`` and ``--repeat`` ask for; ``against`` is known once it was checked."""

    call: Call
    vs: str | None
    repeat: int | None
    against: Against | None = None

    def check(self, loaded: Loaded) -> None:
        from vime.preflight.against import against

        call = self.call
        self.against = against(loaded, call.files, call.overrides, self.vs, self.repeat, call.start)
