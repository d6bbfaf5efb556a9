"""What two runs left behind, compared rollout by rollout: reads the trails, leaves the comparing to ``vime.align``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from vime.align.folders import gaps_of, holders_of, numbers_of
from vime.align.step_compare import (
    Pair,
    Row,
    compare_records,
    digest_row,
    gradient_row,
    weight_row,
    weights_before_row,
)
from vime.align.step_limits import Limits, limits
from vime.align.tensors import exchanged_shards
from vime.config.schema import Config
from vime.data.tokenizer import load_tokenizer, tokenizer_digest
from vime.models import ModelSpec, load_spec
from vime.record.recorded import RecordedRollouts
from vime.record.training import TrainingHeader, TrainingRecord
from vime.runs.trail import RecordedTrail, Trail
from vime.types import RolloutBatch, Verdict
from vime.weights.shards import Shards

EVERYTHING = "everything"
"""In place of a quantity where nothing of a rollout can be compared."""
NUMERIC_LIBRARIES = ("torch", "megatron-core", "transformer-engine", "numpy")


@dataclass
class Judge:
    """Compares two trails. ``is_asked``: other settings than the reference's are a difference, not a reason to stop."""

    config: Config
    ids: range
    reference: Trail | RecordedTrail
    candidate: Trail
    is_asked: bool
    notes: list[str] = field(default_factory=list)
    _num_steps: int = 0

    @cached_property
    def spec(self) -> ModelSpec:
        return load_spec(self.config.model.path)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.config.model.path)

    @cached_property
    def holders(self) -> Callable[[str], str]:
        return holders_of(self.spec, self.config)

    def rows(self) -> list[Row]:
        """Every quantity of every rollout."""
        template = self.config.debug.load_rollout_data
        assert template is not None
        rollouts = RecordedRollouts(template, tokenizer_digest=tokenizer_digest(self.tokenizer))
        rows: list[Row] = []
        for rollout_id in self.ids:
            candidate = self.candidate.record(rollout_id)
            assert candidate is not None
            reference = self.reference.record(rollout_id)
            batch = replace(rollouts.produce(rollout_id), rollout_id=rollout_id)
            reason = self._obstacle(reference, candidate, rollout_id)
            if reason or reference is None:
                return [
                    *rows,
                    *(Row(i, EVERYTHING, Verdict.NOT_TESTED, where=reason) for i in self.ids if i >= rollout_id),
                ]
            rows += self._rollout(batch, reference, candidate)
            self._num_steps += len(candidate.steps)
        return rows

    def _obstacle(self, reference: TrainingRecord | None, candidate: TrainingRecord, rollout_id: int) -> str:
        """Why nothing of this rollout can be compared; empty if it can."""
        if reference is None:
            return "there is no training record beside the record (vime train writes it since it records rollouts)"
        if reference.header.rollout_digest != candidate.header.rollout_digest:
            return "the training record belongs to another rollout than the record beside it"
        before, is_recorded = reference.header.weights_before, isinstance(self.reference, RecordedTrail)
        num_before = reference.rollout_id if is_recorded and rollout_id == self.ids.start else 0
        if num_before and before and before != candidate.header.weights_before:
            return f"the recorded run had trained on {num_before} rollouts before, this replay starts from model.path"
        changed = differences(reference.header.settings, candidate.header.settings)
        if changed and not self.is_asked:
            return f"other settings than those of the recorded run: {', '.join(changed)}"
        return ""

    def _rollout(self, batch: RolloutBatch, reference: TrainingRecord, candidate: TrainingRecord) -> list[Row]:
        changed = changes(reference.header, candidate.header)
        is_same = not changed
        allowed = self._limits(0, is_same)
        last = self._limits(len(candidate.steps) - 1, is_same)
        self._note(f"differs: {', '.join(changed)}" if changed else "same layout, settings and libraries: bitwise")
        for each in (allowed, last):
            if each.reason:
                self._note(f"limits: {each.reason}")
        allowed = replace(allowed, loss=last.loss, grad_norm=last.grad_norm, weights=last.weights)
        pair = Pair(batch, reference, candidate, allowed, lambda token_id: self.tokenizer.decode([token_id]))
        rows = [self._weights_before(pair)] if batch.rollout_id == self.ids.start else []
        rows += compare_records(pair)
        return [*rows, *self._gradients(pair), self._weights(pair)]

    def _limits(self, step: int, is_same: bool) -> Limits:
        """Of a step of this rollout; all but the first come after an optimizer step."""
        return limits(self.config.model.dtype, self.spec.num_layers, self._num_steps + step, is_same)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _weights_before(self, pair: Pair) -> Row:
        start = self.ids.start
        if isinstance(self.reference, Trail):
            return self._tensors_before(self.reference)
        ours, theirs = pair.reference.header.weights_before, pair.candidate.header.weights_before
        if not ours:
            return Row(start, "weights before", Verdict.NOT_TESTED, where="the recorded run did not read its weights")
        if ours == theirs:
            return Row(start, "weights before", Verdict.PASS, "digest of all tensors equal", "bitwise")
        text = "--vs LAYOUT names the tensor"
        return Row(start, "weights before", Verdict.FAIL, "digest of all tensors differs", "bitwise", text)

    def _tensors_before(self, reference: Trail) -> Row:
        start, tp = self.ids.start, self.config.parallel.tp
        ours, theirs = Shards(reference.weights(start)), Shards(self.candidate.weights(start))
        gaps, lines = gaps_of(ours, theirs), []
        for name in (gap.name for gap in gaps if gap.distance and not gap.problem):
            dim = exchanged_shards(numbers_of(ours, name), numbers_of(theirs, name), tp)
            if dim is not None:
                lines.append(f"{name}: its {tp} shards are exchanged along dimension {dim}")
        return weights_before_row(start, gaps, self.holders, lines)

    def _gradients(self, pair: Pair) -> list[Row]:
        rollout_id = pair.batch.rollout_id
        if not isinstance(self.reference, Trail):
            reason = "a training record holds none; --vs LAYOUT compares them"
            return [Row(rollout_id, "gradients", Verdict.NOT_TESTED, where=reason)]
        rows = []
        # Another number of steps is a mismatch of the loss already.
        for number, (a, b) in enumerate(zip(pair.reference.steps, pair.candidate.steps, strict=False)):
            step = f"step {number}, " if len(pair.reference.steps) > 1 else ""
            if a.is_skipped or b.is_skipped:
                rows.append(Row(rollout_id, "gradients", Verdict.SKIP, where=f"{step}skipped: there is none"))
                continue
            ours, theirs = (t.gradients(rollout_id, number) for t in (self.reference, self.candidate))
            if not (ours.is_dir() and theirs.is_dir()):
                reason = "parallel.distributed_optimizer keeps only shards of the gradients"
                rows.append(Row(rollout_id, "gradients", Verdict.NOT_TESTED, where=reason))
                continue
            clip = self.config.train.clip_grad
            clipped = f"; {step}clipped to {clip:g}" if max(a.grad_norm, b.grad_norm) > clip else f"; {step}not clipped"
            allowed = self._limits(number, pair.limits.is_bitwise)
            gaps = gaps_of(Shards(ours), Shards(theirs))
            rows.append(gradient_row(rollout_id, gaps, allowed, self.holders, clipped))
        return rows

    def _weights(self, pair: Pair) -> Row:
        rollout_id = pair.batch.rollout_id
        if isinstance(self.reference, Trail):
            ours, theirs = (Shards(t.weights(rollout_id + 1)) for t in (self.reference, self.candidate))
            gaps = gaps_of(ours, theirs, Shards(self.reference.weights(rollout_id)))
            return weight_row(rollout_id, gaps, pair.limits, self.holders)
        if not pair.reference.weights:
            return Row(rollout_id, "weights", Verdict.NOT_TESTED, where="the recorded run did not read its weights")
        row = digest_row(rollout_id, "weights", pair.reference.weights, pair.candidate.weights, self.holders)
        if pair.limits.is_bitwise or row.verdict == Verdict.PASS:
            return row
        reason = "digests are equal or not, another layout rounds otherwise; --vs LAYOUT compares values"
        return Row(rollout_id, "weights", Verdict.NOT_TESTED, row.measured, where=reason)


def changes(reference: TrainingHeader, candidate: TrainingHeader) -> list[str]:
    """What may make numbers differ: layout, settings, libraries. Empty: bitwise equality can be asked for."""
    libraries = [{n: h.library_versions.get(n) for n in NUMERIC_LIBRARIES} for h in (reference, candidate)]
    return [
        *differences(reference.layout, candidate.layout),
        *differences(reference.settings, candidate.settings),
        *differences(*libraries),
    ]


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """``name old -> new`` of every value that differs; tuples and lists are alike, as files hold lists."""
    names = dict.fromkeys([*ours, *theirs])
    return [f"{n} {ours.get(n)} -> {theirs.get(n)}" for n in names if ours.get(n) != theirs.get(n)]
