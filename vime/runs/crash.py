"""``vime rollout --bisect-crash``: which settings and which requests make the engine crash."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vime.cluster.leftovers import temp_dir
from vime.config.load import Loaded
from vime.debug.crash import core_dump
from vime.debug.crash.commands import Commands, way_out
from vime.debug.crash.found import Found, Plan, count
from vime.debug.crash.ledger import Attempt, Ledger
from vime.debug.crash.planted import PlantedCrash
from vime.debug.crash.report import CrashReport
from vime.debug.crash.search import search
from vime.debug.crash.toggles import Toggle, environment_of, overlaid
from vime.debug.crash.trial import Ending, Trial
from vime.errors import UsageError
from vime.log import Progress
from vime.report.crash import crash_page
from vime.run_folder import RunFolder, write_text
from vime.runs.crash_attempt import Order, write_json
from vime.runs.crash_processes import Limits, Processes, ending
from vime.runs.crash_requests import Requests, requests_of
from vime.runs.ending import ends_in_order

MAX_ATTEMPTS = 100
TIMEOUT_SECONDS = 120.0
NUM_RUNS = 3
ORDER, REQUESTS, MINIMAL, ATTEMPTS, AGAIN = "order.json", "requests.json", "minimal.pt", "attempts", "again"

IN_RECORD = ("rollout.rollout_batch_size=", "rollout.num_samples_per_prompt=", "rollout.sampling.")
"""Settings that the record of the smallest case holds itself."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks for. ``words``: files and KEY=VALUE as they were given. ``page``: an HTML file."""

    words: tuple[str, ...]
    template: str | None = None
    ids: str | None = None
    num_runs: int = NUM_RUNS
    timeout_seconds: float = TIMEOUT_SECONDS
    max_attempts: int = MAX_ATTEMPTS
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    planted: tuple[PlantedCrash, ...] = ()
    page: Path | None = None


def check(loaded: Loaded) -> None:
    """UsageError where the engines are not ours to start."""
    if loaded.config.rollout.engines:
        raise UsageError(
            "--bisect-crash starts engines of its own again and again; rollout.engines names somebody else's",
            "leave rollout.engines out",
        )


def bisect_crash(*, loaded: Loaded, console: Progress, asked: Asked) -> CrashReport:
    """Confirm, search, report; everything is written down in the run folder. Every process has ended on return."""
    began = time.monotonic()
    folder = RunFolder(Path(loaded.config.run_dir))
    with ExitStack() as stack:
        stack.enter_context(folder.held())
        stack.enter_context(console)
        stack.enter_context(ends_in_order())
        requests = requests_of(loaded, asked.template, asked.ids)
        planted = tuple(fault.named(requests.names) for fault in asked.planted)
        folder.begin(loaded, resume=False, template=asked.template)
        shutil.rmtree(folder.path / ATTEMPTS, ignore_errors=True)
        temporary = stack.enter_context(temp_dir())
        limits = Limits(loaded.config.cluster.start_timeout_seconds, asked.timeout_seconds)
        processes = stack.enter_context(closing(Processes(limits, temporary)))
        runner = Runner(loaded, requests, planted, processes, folder.path)
        for fault in planted:
            console.warn(f"PLANTED CRASH {fault} (--inject)")
        limit = count(asked.max_attempts, "engine start")
        console.note(f"{count(len(requests.samples), 'request')}, at most {limit}, {folder.path}")
        ledger = Ledger(runner, asked.max_attempts, partial(_say, console))
        plan = Plan(len(requests.samples), asked.num_runs, asked.only, asked.skip)
        found = search(ledger, plan, console.note)
        if not ledger.attempts:  # interrupted in the first one: nothing is known
            raise KeyboardInterrupt
        report = _report(loaded, asked, ledger, found, requests, runner, time.monotonic() - began)
        write_text(folder.report, json.dumps(report.as_dict(), indent=1) + "\n")
        if asked.page is not None:
            write_text(asked.page, crash_page(report.verdict, loaded.config.model.path, report.rows(), report.tables()))
    return report


@dataclass
class Runner:
    """Makes one attempt: ``debug.crash.ledger.Run``."""

    loaded: Loaded
    requests: Requests
    planted: Sequence[PlantedCrash]
    processes: Processes
    folder: Path
    number: int = 0
    last: Path = field(default_factory=Path)

    def __post_init__(self) -> None:
        write_json(self.folder / REQUESTS, self.requests.as_rows())

    def __call__(self, trial: Trial) -> Ending:
        self.number += 1
        self.last = folder = self.folder / ATTEMPTS / f"{self.number:03d}"
        folder.mkdir(parents=True)
        environment = environment_of(trial.changed)
        if trial.with_core_dump:
            environment |= core_dump.variables(folder)
        order = Order(
            self._config(trial), list(trial.requests), str(self.folder / REQUESTS), self._drawn(), str(folder)
        )
        order.write(folder / ORDER)
        ended = self.processes.run(folder / ORDER, environment)
        return ending(folder, ended, self.processes.limits)

    def _config(self, trial: Trial) -> dict:
        config = self.requests.longest(self.loaded.config)
        vllm = overlaid(config.vllm, trial.changed)
        return config.model_copy(update={"vllm": vllm}).model_dump(mode="json")

    def _drawn(self) -> list[str]:
        """The crashes that are planted in this attempt: one with a probability in a share of them."""
        seed = self.loaded.config.run.seed
        drawn = [(f, random.Random(f"{seed}/{self.number}/{i}").random()) for i, f in enumerate(self.planted)]
        return [str(replace(fault, probability=1.0)) for fault, share in drawn if share < fault.probability]


def _say(console: Progress, attempt: Attempt) -> None:
    trial, end = attempt.trial, attempt.ending
    changed = " + ".join(trial.names) or "as it is"
    outcome = "NOT APPLIED" if attempt.not_applied else str(end.outcome)
    cause = f": {end.short}" if end.cause else ""
    about = f"{changed}, {count(len(trial.requests), 'request')}: {outcome}{cause} ({end.seconds:.1f} s)"
    console.note(f"{attempt.number:3d} {attempt.purpose:8s} {about}")


def _report(
    loaded: Loaded, asked: Asked, ledger: Ledger, found: Found, requests: Requests, runner: Runner, seconds: float
) -> CrashReport:
    dump = None
    commands = Commands()
    if found.is_reproduced:
        if found.requests:
            requests.save(found.requests, runner.folder / MINIMAL)
        if found.last is not None and ledger.shows(found.last.ending):
            dump = core_dump.collect(runner.last, found.last.ending.device)
        commands = _commands(loaded, asked, found, runner)
    return CrashReport(
        found,
        ledger.attempts,
        ledger.max_attempts,
        requests.described(),
        ledger.sought,
        str(runner.folder),
        seconds,
        dump,
        commands,
        tuple(map(str, runner.planted)),
    )


def _commands(loaded: Loaded, asked: Asked, found: Found, runner: Runner) -> Commands:
    """The smallest case again, in a folder of its own below this one; and the run without the crash."""
    words = ["vime", "rollout", *(word for word in asked.words if not word.startswith("run.dir="))]
    held = (*IN_RECORD, "run.overwrite=") if found.requests else ("run.overwrite=",)
    again = [*(word for word in words if not word.startswith(held)), "--bisect-crash"]
    again += [f"run.dir={runner.folder / AGAIN}", "run.overwrite=true"]
    again += ["--from-record", str(runner.folder / MINIMAL)] if found.requests else []
    runs = str(asked.num_runs if found.is_flaky else 1)
    again += ["--runs", runs, "--max-attempts", runs]
    if asked.timeout_seconds != TIMEOUT_SECONDS:
        again += ["--attempt-timeout", f"{asked.timeout_seconds:g}"]
    for fault in runner.planted:
        again += ["--inject", str(fault)]
    mildest = {toggle.axis: toggle for toggle in found.removing}
    ways: list[tuple[Toggle, ...]] = [(toggle,) for toggle in mildest.values()]
    if found.removing_set:
        ways.append(found.removing_set)
    plain = shlex.join(words)
    return Commands(shlex.join(again), tuple(way_out(way, loaded.config.vllm, plain) for way in ways))
