"""``vime align-check --bisect``: one sequence of a rollout through two of trainer, engine and Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vime.align import plots
from vime.align.bisect import Bisection, Difference, Side, bisect, tolerance_of, worst_sample
from vime.align.export_faults import EXPORT_FAULTS
from vime.align.faults import FAULTS, Place
from vime.align.hf_outputs import HfOutputs
from vime.align.points import operation
from vime.align.summary import as_dict, plain
from vime.align.walk import Check
from vime.backends.vllm.arguments import max_model_len, read_model_config
from vime.config.load import Loaded
from vime.data.tokenizer import load_tokenizer, tokenizer_digest
from vime.errors import UsageError, VimeError
from vime.log import Progress
from vime.metrics import Metrics
from vime.observe import Observer
from vime.preflight.sides import ENGINE, TRAINER
from vime.record.files import record_files
from vime.record.reader import read
from vime.run_folder import RunFolder, versions, write_text
from vime.runs.align import scratch_of
from vime.runs.bench import LiveBench
from vime.runs.ending import ends_in_order
from vime.runs.planted import planted
from vime.runs.watched import watchdog
from vime.types import AlignReport, CheckResult, RolloutBatch, Sample, Verdict

COLUMNS = ("point", "operation", "error", "worst token", "tokens above")


@dataclass(frozen=True)
class Asked:
    """Which sides (``vime.preflight.sides``), and which tokens: of a live rollout, or of a recorded one (``template``,
    the first of ``ids``).

    sample   "GROUP/INDEX"; None: that whose log-probs are furthest apart, where trainer and engine are the sides
    """

    one: str = ENGINE
    other: str = TRAINER
    sample: str | None = None
    template: str | None = None
    ids: str | None = None
    html: Path | None = None

    @property
    def wants_engines(self) -> bool:
        return ENGINE in (self.one, self.other) or self.template is None


@dataclass(frozen=True)
class Bisected:
    """What was found, for people and as data."""

    found: Bisection
    result: CheckResult
    sample: str
    environment: Mapping[str, str]
    files: Mapping[str, str]

    @property
    def failed_checks(self) -> list[CheckResult]:
        return [self.result] if self.result.verdict == Verdict.FAIL else []

    def tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """(title, columns, rows): inside the layer in doubt, then layer by layer."""
        shown = [("from layer to layer", self.found.layers)]
        if self.found.inside:
            shown.insert(0, ("inside the layer of the first difference", self.found.inside))
        return [(title, COLUMNS, [self._row(d) for d in differences]) for title, differences in shown]

    def _row(self, d: Difference) -> tuple[str, ...]:
        above = str(d.num_tokens) if d.num_tokens else "-"
        return (d.point, operation(d.point), f"{d.error:.2g}", str(d.token) if d.error else "-", above)

    def lines(self) -> list[str]:
        """What is below the tables; the last is the verdict."""
        lines = list(self.result.evidence)
        lines += [f"likely: {self.result.cause}"] if self.result.cause else []
        lines += [f"try:    {self.result.next_step}"] if self.result.next_step else []
        lines += [f"{name}: {path}" for name, path in self.files.items()]
        return [*lines, f"{self.result.verdict}: {self.found.sentence}"]

    def as_dict(self) -> dict[str, Any]:
        report = AlignReport((self.result,), self.environment)
        return as_dict(report, (CHECK,)) | {"sample": self.sample, "files": dict(self.files)}


def _unused(_bench: Any) -> CheckResult:
    raise AssertionError("a bisection is no check of the walk")


CHECK = Check(
    "bisect",
    "8",
    "the first module whose output differs",
    "trainer and engine log-probs agree; where not, which module",
    _unused,
)
"""How the report calls it."""


def bisected(*, loaded: Loaded, console: Progress, asked: Asked) -> Bisected:
    """Start what takes part, compare, end everything. Faults of ``debug.inject`` are planted after the rollout."""
    _require(loaded.config.debug.inject)
    recorded = None if asked.template is None else _recorded(loaded, asked)
    folder = RunFolder(Path(loaded.config.run_dir))
    with ExitStack() as stack:
        stack.enter_context(folder.held())
        folder.begin(loaded, resume=False, template=asked.template)
        stack.enter_context(console)
        stack.enter_context(ends_in_order())
        faults = tuple(loaded.config.debug.inject)
        loaded = stack.enter_context(planted(loaded, folder.path, console))
        loaded = _with_own(loaded, None if asked.template else folder.records)
        scratch = scratch_of(folder, stack)
        observer = Observer(loaded.config, console, Metrics([]), folder.evaluation)
        observer.watchdog = watchdog("align-check", loaded.config, folder, console)
        stack.enter_context(observer.watchdog.awake())
        bench = LiveBench(loaded, scratch, observer, stack, asked.wants_engines)
        sample = _sample(bench, asked, recorded, faults)
        found = _compared(bench, asked, sample.token_ids)
        result = result_of(found, sample, bench.tokenizer, loaded.config.model.dtype)
    environment = {"model": loaded.config.model.path, "dtype": loaded.config.model.dtype, **versions()}
    return _kept(Bisected(found, result, sample.name, environment, {}), folder, asked)


def _with_own(loaded: Loaded, records: str | None) -> Loaded:
    """Faults are planted later; a live rollout is kept, for another ``--from-record``."""
    debug = loaded.config.debug.model_copy(update={"inject": [], "save_rollout_data": records})
    return replace(loaded, config=loaded.config.model_copy(update={"debug": debug}))


# ---------------------------------------------------------------- the tokens


def _require(faults: Sequence[str]) -> None:
    """UsageError for a fault that no output of a module shows."""
    for name in faults:
        if name in FAULTS and FAULTS[name].place in (Place.SYNC, Place.ANSWERS):
            raise UsageError(
                f"--inject {name}: no module output shows it", "leave --bisect out: the walk's checks see it"
            )


def _sample(bench: LiveBench, asked: Asked, recorded: RolloutBatch | None, faults: Sequence[str]) -> Sample:
    """The sequence that is compared. By then the engine holds the trainer's weights, and the faults are planted."""
    _plant(bench, [name for name in faults if name in EXPORT_FAULTS])
    batch = _batch(bench, asked, recorded)
    _plant(bench, [name for name in faults if name not in EXPORT_FAULTS])
    row = _row(bench, asked, batch)
    sample = batch.sample(row)
    length = max_model_len(bench.config, read_model_config(bench.config.model.path))
    if ENGINE in (asked.one, asked.other) and len(sample.token_ids) >= length:
        bench.say(f"{sample.name} fills the context of {length}: compared without its last token")
        keep = slice(0, length - 1)
        arrays = (sample.token_ids[keep], sample.loss_mask[keep], sample.rollout_log_probs[keep])
        token_ids, loss_mask, log_probs = arrays
        sample = replace(sample, token_ids=token_ids, loss_mask=loss_mask, rollout_log_probs=log_probs)
    bench.say(f"compared: {sample.name}, {len(sample.token_ids)} tokens")
    return sample


def _recorded(loaded: Loaded, asked: Asked) -> RolloutBatch:
    """The recorded rollout, before anything starts. UsageError where it does not have the sample, or other tokens."""
    assert asked.template is not None
    path = record_files(asked.template, asked.ids, "--from-record")[0].path
    batch = read(path, tokenizer_digest=tokenizer_digest(load_tokenizer(loaded.config.model.path)))
    _require_sample(asked.sample, batch)
    return batch


def _batch(bench: LiveBench, asked: Asked, recorded: RolloutBatch | None) -> RolloutBatch:
    if recorded is None:
        return bench.batch
    if ENGINE in (asked.one, asked.other):
        bench.synced  # noqa: B018 - the engine gets the trainer's weights
    return recorded


def _plant(bench: LiveBench, faults: Sequence[str]) -> None:
    for name in faults:
        place = FAULTS[name].place
        if place in (Place.TRAINER, Place.EXPORT):
            said = bench.trainer.plant(name)
        elif place == Place.ENGINE:
            said = bench.engine.plant(name)
        else:
            continue  # planted before anything was read
        bench.observer.progress.warn(f"PLANTED FAULT {name}: {said}")


def _require_sample(name: str | None, batch: RolloutBatch) -> int:
    """The row of ``GROUP/INDEX``, 0 for None. UsageError where it is none of the rollout's."""
    names = [f"{group}/{index}" for group, index in zip(batch.group_ids_N, batch.indices_N, strict=True)]
    if name is not None and name not in names:
        raise UsageError(f"--sample {name}: is not in the rollout", f"there are {', '.join(names[:20])}")
    return 0 if name is None else names.index(name)


def _row(bench: LiveBench, asked: Asked, batch: RolloutBatch) -> int:
    if asked.sample is not None:
        return _require_sample(asked.sample, batch)
    if {asked.one, asked.other} != {TRAINER, ENGINE}:
        return 0
    try:
        log_probs_T = bench.trainer.log_probs(batch)
    except VimeError as error:  # such as NaN, which is what one looks for
        bench.say(f"the first sample is taken: {error.message.splitlines()[0]}")
        return 0
    return worst_sample(np.abs(log_probs_T - batch.rollout_log_probs_T) * batch.loss_mask_T, batch.offsets)


# ---------------------------------------------------------------- the comparison


def _compared(bench: LiveBench, asked: Asked, token_ids: np.ndarray) -> Bisection:
    one, other = _side(bench, asked.one), _side(bench, asked.other)
    tolerance = tolerance_of(bench.config.model.dtype, bench.spec.num_layers)
    with bench.observer.phase(f"comparing {one.name} with {other.name}"):
        return bisect(one, other, token_ids, bench.spec.num_layers, bench.spec.is_moe, tolerance)


def _side(bench: LiveBench, name: str) -> Side:
    if name == TRAINER:
        return Side(name, bench.trainer.outputs, bench.trainer.manifest)
    if name == ENGINE:
        return Side(name, bench.engine.outputs, partial(bench.engine.manifest, "engine-held"))
    return Side(name, HfOutputs(bench.config.model.path).outputs, lambda: bench.checkpoint)


def result_of(found: Bisection, sample: Sample, tokenizer: Any, dtype: str) -> CheckResult:
    """The finding as that of a check, with the curve over the layers as a plot."""
    curve = plots.line(
        f"{found.sides[0]} against {found.sides[1]}: the difference from layer to layer",
        {"relative error": [d.error for d in found.layers]},
        "point",
        "relative error of the worst token",
        at=[d.point.removeprefix("layers.") for d in found.layers],
        limit=found.tolerance,
        limit_text="tolerance",
    )
    limit = f"relative error {found.tolerance:.2g} of the worst token: rounding of {dtype}, with room"
    verdict = Verdict.PASS if found.first is None else Verdict.FAIL
    evidence = tuple(_evidence(found, sample, tokenizer))
    numbers = {**found.numbers(), "sample": sample.name, "plots": [curve.as_dict()]}
    sharper = "" if dtype == "float32" else "model.dtype=float32 sees a thousand times smaller differences"
    next_step = found.next_step or sharper
    return CheckResult(
        CHECK.name, verdict, found.sentence, limit, evidence, found.cause, next_step, numbers=plain(numbers)
    )


def _evidence(found: Bisection, sample: Sample, tokenizer: Any) -> list[str]:
    lines = [f"{sample.name}, {len(sample.token_ids)} tokens, {found.num_forwards} forwards of each side"]
    if found.first is not None:
        token = int(sample.token_ids[found.first.token])
        text = tokenizer.decode([token])
        lines.append(
            f"worst at token {found.first.token}, {text!r} (id {token}); {found.first.num_tokens} tokens above"
        )
    if found.before is not None:
        lines.append(f"before it {found.before.point} agrees: {found.before.error:.2g}")
    told = {True: "equal on both sides", False: "NOT EQUAL", None: "not compared"}
    lines += [f"weight {weight.name}: {told[weight.is_equal]}" for weight in found.weights]
    lines += [f"only one side can give {', '.join(found.missing[:4])}"] if found.missing else []
    return lines


def _kept(made: Bisected, folder: RunFolder, asked: Asked) -> Bisected:
    """Write report and page into the run folder."""
    from vime.report.align import align_page

    files = {"report": str(asked.html or folder.page), "as JSON": str(folder.report)}
    record = Path(folder.records.format(rollout_id=0))
    files |= {"rollout": str(record)} if record.exists() else {}
    made = replace(made, files=files)
    write_text(folder.report, json.dumps(made.as_dict(), indent=1) + "\n")
    page = align_page(AlignReport((made.result,), made.environment), (CHECK,))
    for file in dict.fromkeys((folder.page, asked.html or folder.page)):
        write_text(file, page)
    return made
