"""``vime replay --vs LAYOUT|RECORD`` and ``--repeat K``: the same rollouts trained on twice, and a verdict.

References run first, each with trainer processes of its own, then the candidate: the replay that was asked for.
Every run leaves a trail in a folder beside its metrics; the folder is removed at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime import loop
from vime.align.step_compare import CAUSES, Row, first_mismatch
from vime.align.tensors import TensorGap
from vime.cluster.session import RaySession, num_processes
from vime.config.load import Loaded
from vime.config.schema import Config
from vime.debug.stop.hold import raised_run
from vime.debug.watchdog import Watchdog
from vime.errors import UsageError
from vime.log import Progress
from vime.metrics import Metrics
from vime.models import load_spec
from vime.observe import Observer
from vime.preflight.against import Against
from vime.runs.judge import EVERYTHING, Judge
from vime.runs.parts import started
from vime.runs.trail import RecordedTrail, Trail, watched
from vime.types import CheckResult, Verdict

FOLDER = ".comparison"
NUM_PARAMETERS = 5  # shown of each step's gradients


@dataclass(frozen=True)
class Compared:
    """The outcome of one comparison: rows for the table, what to know beside it, and the verdict of it all."""

    title: str
    rows: list[Row]
    notes: list[str]
    check: CheckResult

    @property
    def is_failed(self) -> bool:
        return self.check.verdict == Verdict.FAIL

    def table_rows(self) -> list[tuple[str, ...]]:
        return [(str(r.rollout_id), r.quantity, str(r.verdict), r.measured, r.limit, r.where) for r in self.rows]

    def gradient_tables(self) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
        """(title, rows) of the gradients of each step, by parameter: those that differ most, against their size."""
        for row in (row for row in self.rows if any(gap.distance for gap, _ in row.tensors)):
            shown = row.tensors[:NUM_PARAMETERS]
            count = f"the worst {len(shown)} of {len(row.tensors)} parameters (all: --json)"
            yield f"gradients of rollout {row.rollout_id}, {count}", [_gradient(*entry) for entry in shown]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        names = ("rollout_id", "quantity", "verdict", "measured", "limit", "where", "evidence", "numbers")
        rows = [{name: getattr(row, name) for name in names} | _tensors(row) for row in self.rows]
        verdict = {"verdict": str(self.check.verdict), "measured": self.check.measured, "cause": self.check.cause}
        return {"title": self.title, **verdict, "rows": rows, "notes": self.notes}


def _gradient(gap: TensorGap, held_by: str) -> tuple[str, ...]:
    return gap.name, held_by, f"{gap.relative_l2:.2g}", f"{gap.cosine:.9g}", f"{gap.max_abs:.2g}", f"{gap.norm:.3g}"


def _tensors(row: Row) -> dict[str, Any]:
    numbers = ("name", "relative_l2", "cosine", "max_abs", "norm")
    found = [{n: getattr(gap, n) for n in numbers} | {"held_by": held_by} for gap, held_by in row.tensors]
    return {"tensors": found} if found else {}


@dataclass
class Comparison:
    """One replay of rollouts ``ids`` that is compared. ``folder`` takes the trails; ``say`` hears how it goes."""

    against: Against
    config: Config
    ids: range
    folder: Path
    say: Progress
    outcomes: list[Compared] = field(default_factory=list)
    session: RaySession | None = None
    watchdog: Watchdog | None = None

    @contextmanager
    def held(self, watchdog: Watchdog | None = None) -> Iterator[None]:
        """What a killed run left behind goes first, and everything at the end. Several runs share one Ray session."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if self.against.references:
                configs = [self.config, *(reference.config for reference in self.against.references)]
                roster = None if watchdog is None else watchdog.roster
                self.session = RaySession.start(max(configs, key=num_processes), roster)
                stack.callback(self.session.close)
            self.watchdog = watchdog
            yield

    def check(self) -> None:
        """Raises UsageError if the disk has no room for two trails, or a training record cannot be read."""
        if self.against.references:
            self._check_room()
        else:
            for rollout_id in self.ids:
                self._recorded.record(rollout_id)

    def run_references(self) -> None:
        """Every run that comes before the candidate."""
        for number, reference in enumerate(self.against.references):
            name = "reference" if number == 0 else f"run {number + 1} of {len(self.against.references) + 1}"
            self.say.note(f"{name}: {layout_line(reference.config)}")
            self._run(reference, self._trail(number))
            if number:
                self._judge(self._trail(0), self._trail(number), f"run {number + 1} against run 1")
                shutil.rmtree(self._trail(number).folder)
        if self.against.references:
            self.say.note(f"candidate: {layout_line(self.config)}")

    def watched(self, parts: loop.Parts) -> loop.Parts:
        """The parts of the candidate."""
        return watched(parts, self.config, self._candidate)

    def judge(self) -> None:
        """Compare the candidate, which has ended, with the reference."""
        references = self.against.references
        if not references:
            self._judge(self._recorded, self._candidate, f"replay against {self.against.title}")
        elif self.against.is_repeat:
            run = len(references) + 1
            self._judge(self._trail(0), self._candidate, f"run {run} against run 1 ({self.against.title})")
        else:
            self._judge(self._trail(0), self._candidate, f"replay against {self.against.title}")

    @property
    def _recorded(self) -> RecordedTrail:
        assert self.config.debug.load_rollout_data is not None
        return RecordedTrail(self.config.debug.load_rollout_data)

    @property
    def _candidate(self) -> Trail:
        return Trail(self.folder / "candidate", keeps_tensors=bool(self.against.references))

    def _trail(self, number: int) -> Trail:
        return Trail(self.folder / f"run_{number}", keeps_tensors=True)

    def _run(self, reference: Loaded, trail: Trail) -> None:
        reference, _ = raised_run(reference)
        nowhere = lambda *_: self.folder / "none"  # noqa: E731 - nothing is evaluated in a replay
        observer = Observer(reference.config, self.say, Metrics([]), nowhere, verify_first_step=False)
        observer.watchdog = self.watchdog
        with started(reference, observer, self.session) as parts:
            loop.run(reference.config, watched(parts, reference.config, trail), observer, self.ids.start)

    def _check_room(self) -> None:
        """Two trails: weights before, and per rollout the weights and a float32 gradient per step."""
        count = load_spec(self.config.model.path).num_parameters
        of_weights = count * (2 if self.config.model.dtype == "bfloat16" else 4)
        per_rollout = of_weights + 4 * count * self.config.train.num_steps_per_rollout
        needed = 2 * (of_weights + per_rollout * len(self.ids))
        free = shutil.disk_usage(self.folder.parent).free
        if needed > free:
            raise UsageError(
                f"run.dir = {str(self.folder.parent)!r}: {free / 1e9:.1f} GB are free, gradients and weights of "
                f"two runs over {len(self.ids)} rollouts need {needed / 1e9:.1f} GB",
                "compare fewer rollouts (--ids 0), or set run.dir to a larger disk",
            )

    def _judge(self, reference: Trail | RecordedTrail, candidate: Trail, title: str) -> None:
        with self.say.phase("comparing"):
            judge = Judge(self.config, self.ids, reference, candidate, self.against.is_asked)
            rows = judge.rows()
        self.outcomes.append(Compared(title, rows, judge.notes, verdict_of(title, rows)))


def verdict_of(title: str, rows: list[Row]) -> CheckResult:
    """One verdict for all rows: the first mismatch where there is one."""
    found = first_mismatch(rows)
    if found is not None:
        place = f"; {found.where}" if found.where else ""
        later = [r for r in rows if r.verdict == Verdict.FAIL and r.rollout_id == found.rollout_id and r is not found]
        return CheckResult(
            title,
            Verdict.FAIL,
            f"first mismatch: rollout {found.rollout_id}, {found.quantity}: {found.measured}{place}",
            found.limit,
            (*found.evidence, *map(_consequence, later)),
            CAUSES[found.quantity],
            "--repeat 2 tells whether this layout is deterministic at all; --vs names one change of it at a time",
        )
    passed = [row for row in rows if row.verdict == Verdict.PASS]
    left = [row for row in rows if row.verdict == Verdict.NOT_TESTED]
    if not passed:
        return CheckResult(title, Verdict.NOT_TESTED, cause=left[0].where if left else "there is nothing to compare")
    names = ", ".join(dict.fromkeys(_untested(row) for row in left))
    return CheckResult(
        title, Verdict.PASS, f"{len(passed)} quantities within limits" + (f"; not tested: {names}" if left else "")
    )


def _untested(row: Row) -> str:
    return f"rollout {row.rollout_id}" if row.quantity == EVERYTHING else row.quantity


def _consequence(row: Row) -> str:
    return f"then {row.quantity}: " + "; ".join(text for text in (row.measured, row.where) if text)


def layout_line(config: Config) -> str:
    """The layout for people: what is not 1, and the packing."""
    p = config.parallel
    sizes = [f"{name} {getattr(p, name)}" for name in ("tp", "pp", "cp", "dp")]
    sizes += [f"vpp {p.vpp}"] if p.vpp else []
    return f"{', '.join(sizes)}, at most {config.train.max_tokens_per_micro_batch} tokens a micro-batch"
