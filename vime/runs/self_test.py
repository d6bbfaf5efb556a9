"""``vime align-check --self-test``: every fault planted in tiny models, one start for each family; who claims what."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.align.checks import CHECKS
from vime.align.confusion import COLUMNS, Confusion, Outcome, markdown
from vime.align.faults import FAULTS
from vime.align.tiny_model import Recipe, cached_tiny_model
from vime.align.walk import walk
from vime.config.load import Loaded, read
from vime.debug.stop.hold import held
from vime.errors import ConfigError, UsageError, VimeError
from vime.files import whole_file
from vime.log import Progress
from vime.metrics import Metrics
from vime.observe import Observer
from vime.preflight.small import Size, small_walk
from vime.runs.bench import LiveBench
from vime.runs.ending import ends_in_order
from vime.types import CheckResult, Verdict

CACHE = Path(tempfile.gettempdir()) / "vime-tiny-models"
"""Models are made once for each recipe."""
SIZE = Size(3, 3, 16)
"""An odd number of samples: data-parallel ranks train on different numbers of tokens."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A tiny model and how it is run. Both layouts together have a place for every fault."""

    recipe: Recipe
    parallel: dict[str, int | bool]


SUBJECTS: dict[str, Subject] = {
    "qwen3": Subject(Recipe("qwen3", chat=True), {"dp": 2}),
    "llama": Subject(Recipe("llama", tied=True, chat=True), {"tp": 2}),
    "qwen3_moe": Subject(Recipe("qwen3_moe", chat=True), {"dp": 2, "ep": 2}),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """families and faults: all where none is named. page: where the page of the documentation is written."""

    families: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    page: Path | None = None
    cache: Path = CACHE

    def __post_init__(self) -> None:
        for what, names, known in (("family", self.families, [*SUBJECTS]), ("fault", self.faults, planted_faults())):
            if unknown := [name for name in names if name not in known]:
                raise UsageError(f"--{what} {unknown[0]}: is none of the self-test", f"known: {', '.join(known)}")

    @property
    def subjects(self) -> dict[str, Subject]:
        return {name: each for name, each in SUBJECTS.items() if not self.families or name in self.families}

    @property
    def names(self) -> list[str]:
        return [name for name in planted_faults() if not self.faults or name in self.faults]


def planted_faults() -> list[str]:
    """The faults that a check is there for."""
    return [name for name, fault in FAULTS.items() if fault.check]


@dataclass(frozen=True, slots=True)
class Tested:
    """What a self-test came to."""

    found: Confusion
    seconds: float

    @property
    def failed_checks(self) -> list[CheckResult]:
        return [CheckResult("self-test", Verdict.FAIL, problem) for problem in self.found.problems]

    def tables(self) -> Iterator[tuple[str, tuple[str, ...], list[Any]]]:
        yield "faults of the self-test", COLUMNS, self.found.rows()

    def lines(self) -> list[str]:
        walks = [o for o in self.found.outcomes if not o.reason]
        verdict = "FAIL" if self.found.problems else "PASS"
        clean = sum(not outcome.fault for outcome in walks)
        counts = f"{len(walks) - clean} faults planted in {clean} models, {len(self.found.problems)} problems"
        return [*self.found.matrix_lines(), "", f"{verdict}: {counts}, {self.seconds:.0f} s"]

    def as_dict(self) -> dict[str, Any]:
        verdict = "FAIL" if self.found.problems else "PASS"
        head = {"command": "align-check --self-test", "verdict": verdict, "seconds": round(self.seconds, 1)}
        return head | self.found.as_dict()


def self_test(*, console: Progress, asked: Asked) -> Tested:
    """Plant every fault, one after the other, in every family; all processes end with it."""
    began = time.perf_counter()
    outcomes: list[Outcome] = []
    broken: list[str] = []
    with console, ends_in_order(), tempfile.TemporaryDirectory(prefix="vime-self-test-") as folder:
        for family, subject in asked.subjects.items():
            try:
                for outcome in _walks(Path(folder) / family, family, subject, asked, console):
                    console.note(f"{family}, {outcome.fault or 'no fault'}: {outcome.verdict}, {outcome.seconds:.1f} s")
                    outcomes.append(outcome)
            except VimeError as error:  # the other families, and what was found so far, are still worth knowing
                broken.append(f"{family}: ended before its last fault: {error.message}")
                console.warn(broken[-1])
    found = Confusion(tuple(outcomes), CHECKS, len(asked.subjects) == len(SUBJECTS), tuple(broken))
    if asked.page is not None:
        with whole_file(asked.page) as file:
            file.write("".join(f"{line}\n" for line in markdown(found)).encode())
    return Tested(found, time.perf_counter() - began)


def _walks(folder: Path, family: str, subject: Subject, asked: Asked, console: Progress) -> Iterator[Outcome]:
    """The clean walk, then one for each fault, over one bench."""
    folder.mkdir()
    with console.phase(f"making the {family} model"):
        model = cached_tiny_model(asked.cache, subject.recipe)
    loaded = _loaded(folder, model, subject.parallel)
    with ExitStack() as stack:
        talk = stack.enter_context((folder / "talk.log").open("w"))
        quiet = stack.enter_context(Progress(stream=talk))
        bench = LiveBench(
            loaded, folder, Observer(loaded.config, quiet, Metrics([]), _nowhere), stack, serves_many=True
        )
        with console.phase(f"{family}: starting, clean walk"):
            yield _walked(bench, family, "")
        for fault in asked.names:
            with console.phase(f"{family}: {fault}"):
                outcome = _planted(bench, family, fault)
            yield outcome


def _nowhere(version: int, name: str = "eval") -> Path:
    raise AssertionError("a walk evaluates nothing")


def _planted(bench: LiveBench, family: str, fault: str) -> Outcome:
    bench.begin_again()
    _forget_files(bench.folder)
    try:
        said = bench.plant(fault)
    except UsageError as error:
        return Outcome(family, fault, reason=error.message)
    bench.say(f"PLANTED FAULT {fault}: {said}")
    return _walked(bench, family, fault, said)


def _walked(bench: LiveBench, family: str, fault: str, said: str = "") -> Outcome:
    began = time.perf_counter()
    report = walk(CHECKS, bench)
    return Outcome(family, fault, said, report, seconds=time.perf_counter() - began)


def _forget_files(folder: Path) -> None:
    """Gradients and checkpoints of the walk before."""
    for path in folder.iterdir():
        if path.is_dir() and path.name.startswith(("gradients", "checkpoint")):
            shutil.rmtree(path)


def _loaded(folder: Path, model: Path, parallel: dict[str, int | bool]) -> Loaded:
    """The run of one subject: small, at a temperature that shows where one side leaves it out."""
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in (3, 8)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings: dict[str, Any] = {
        "run.dir": str(folder),
        "model.path": str(model),
        "data.prompts": [str(prompts)],
        "rollout.rollout_batch_size": SIZE.prompts,
        "rollout.num_samples_per_prompt": SIZE.samples,
        "rollout.sampling.temperature": 0.7,
        "rollout.sampling.max_response_len": SIZE.tokens,
        "train.max_tokens_per_micro_batch": 100,
        "train.lr": 1e-3,
        "weights.timeout_seconds": held(60.0),
        **{f"parallel.{name}": value for name, value in parallel.items()},
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    derived = small_walk(read([], overrides).config, SIZE)
    loaded = read([], overrides, derived=derived)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded
