"""``vime align-check``: start a bench, walk the checks over it, keep what they found, end everything."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime import device
from vime.align import summary
from vime.align.checks import CHECKS
from vime.align.faults import FAULTS
from vime.align.walk import Check, chosen, walk
from vime.config.load import Loaded
from vime.config.schema import Config
from vime.errors import VimeError
from vime.log import Progress
from vime.metrics import Metrics
from vime.observe import Observer
from vime.run_folder import RunFolder, versions, write_text
from vime.runs.bench import LiveBench
from vime.runs.ending import ends_in_order
from vime.runs.planted import planted, without
from vime.runs.recorded_bench import RecordedBench
from vime.runs.watched import watchdog
from vime.types import AlignReport, CheckResult

SCRATCH = ".walk"


@dataclass(frozen=True)
class Asked:
    """What is walked. ``template``, ``ids``: recorded rollouts in place of a live one; ``html``: one more page."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    template: str | None = None
    ids: str | None = None
    html: Path | None = None

    @property
    def checks(self) -> list[Check]:
        """UsageError for a name or step that is none."""
        return chosen(CHECKS, self.only, self.skip)


@dataclass(frozen=True)
class Aligned:
    """The report and where it lies. ``unwritten``: why it does not, which is told after what was found."""

    report: AlignReport
    files: dict[str, str]
    unwritten: VimeError | None = None

    @property
    def failed_checks(self) -> list[CheckResult]:
        return list(self.report.findings)

    def table_rows(self) -> list[tuple[str, str, str, str, str]]:
        return summary.rows(self.report, CHECKS)

    def lines(self) -> list[str]:
        """What is below the table; the last is the verdict of all."""
        files = [f"{name}: {path}" for name, path in self.files.items()]
        return [*summary.told(self.report, CHECKS), *files, summary.line(self.report)]

    def as_dict(self) -> dict[str, Any]:
        return summary.as_dict(self.report, CHECKS) | {"files": self.files}


def align_check(*, loaded: Loaded, console: Progress, asked: Asked) -> Aligned:
    """Walk the checks. Whatever stops one of them is its finding; what stops the walk itself is raised."""
    folder = RunFolder(Path(loaded.config.run_dir))
    with ExitStack() as stack:
        stack.enter_context(folder.held())
        folder.begin(loaded, resume=False, template=asked.template)
        stack.enter_context(console)
        stack.enter_context(ends_in_order())
        faults = [name for name in loaded.config.debug.inject if name in FAULTS and not FAULTS[name].is_early]
        loaded = without(stack.enter_context(planted(loaded, folder.path, console)), faults)
        loaded = _recording(loaded, folder, asked)
        scratch = scratch_of(folder, stack)
        observer = Observer(loaded.config, console, Metrics([]), folder.evaluation)
        observer.watchdog = watchdog("align-check", loaded.config, folder, console)
        stack.enter_context(observer.watchdog.awake())
        report = walked(loaded, asked, observer, scratch, stack, faults)
        found = _kept(report, folder, asked)  # before anything is ended, which may fail
    return found


def walked(
    loaded: Loaded, asked: Asked, observer: Observer, scratch: Path, stack: ExitStack, faults: Sequence[str] = ()
) -> AlignReport:
    """The checks over a bench of their own, which ends with ``stack``; ``faults`` are planted first."""
    checks = asked.checks
    bench = _bench(loaded, asked, observer, scratch, stack)
    for name in faults:
        observer.progress.warn(f"PLANTED FAULT {name}: {bench.plant(name)}")
    report = walk(checks, bench, _teller(observer.progress))
    return replace(report, environment=_environment(loaded.config))


def _bench(loaded: Loaded, asked: Asked, observer: Observer, scratch: Path, stack: ExitStack) -> LiveBench:
    if asked.template is not None:
        return RecordedBench.of(loaded, scratch, observer, stack, asked.template, asked.ids)
    wants_engines = any(not check.of_trainer for check in asked.checks)
    return LiveBench(loaded, scratch, observer, stack, wants_engines)


def _recording(loaded: Loaded, folder: RunFolder, asked: Asked) -> Loaded:
    """A live rollout is kept beside the report."""
    if asked.template is not None:
        return loaded
    debug = loaded.config.debug.model_copy(update={"save_rollout_data": folder.records})
    return replace(loaded, config=loaded.config.model_copy(update={"debug": debug}))


def scratch_of(folder: RunFolder, stack: ExitStack) -> Path:
    """What a killed walk left behind goes first, and everything at the end."""
    scratch = folder.path / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    return scratch


def _teller(say: Progress) -> Callable[[Check, CheckResult | None], None]:
    """Says each check as it begins and as it ends."""
    began: dict[str, float] = {}

    def hear(check: Check, result: CheckResult | None) -> None:
        if result is None:
            began[check.name] = time.perf_counter()
            say.note(f"{check.step:>3} {check.name}: {check.title} ...")
            return
        seconds = time.perf_counter() - began[check.name]
        verdict = f"{result.verdict} (follows from {result.follows})" if result.follows else str(result.verdict)
        say.note(f"{check.step:>3} {check.name}: {verdict}, {seconds:.1f} s: {result.measured or result.cause}")

    return hear


def _environment(config: Config) -> dict[str, str]:
    """What the numbers depend on, for people."""
    layout, rollout = config.parallel, config.rollout
    sizes = {name: value for name, value in layout.model_dump().items() if value not in (None, False)}
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "device": device.kind(),
        "trainer": " ".join(f"{name}={value}" for name, value in sizes.items()),
        "engines": f"{rollout.num_engines} x tensor-parallel {rollout.engine_tp}",
        "rollout": f"{rollout.rollout_batch_size} prompts x {rollout.num_samples_per_prompt} samples, "
        f"at most {rollout.sampling.max_response_len} tokens each",
        "sampling": f"temperature {rollout.sampling.temperature:g}",
        **versions(),
    }


def _kept(report: AlignReport, folder: RunFolder, asked: Asked) -> Aligned:
    try:
        return Aligned(report, _written(report, folder, asked))
    except VimeError as error:
        return Aligned(report, {}, error)


def _written(report: AlignReport, folder: RunFolder, asked: Asked) -> dict[str, str]:
    """Write the report into the run folder; returns what lies where."""
    from vime.report.align import align_page

    write_text(folder.report, json.dumps(summary.as_dict(report, CHECKS), indent=1) + "\n")
    page = align_page(report, CHECKS)
    for file in dict.fromkeys((folder.page, asked.html or folder.page)):
        write_text(file, page)
    files = {"report": str(asked.html or folder.page), "as JSON": str(folder.report)}
    record = Path(folder.records.format(rollout_id=0))
    return files | ({"rollout": str(record)} if record.exists() else {})
