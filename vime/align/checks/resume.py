"""A resume: trainer and engine have the checkpoint's weights, and the reference is the one it was (cases A16, T21)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vime.align.bench import Bench, Resumed
from vime.align.checks.second import differing, wide
from vime.align.gap import Band, Gap
from vime.align.walk import Check
from vime.types import CheckResult, RolloutBatch, Verdict

NAME = "resume"
Finding = tuple[str, tuple[str, ...], str, str]
"""(measured, evidence, cause, next step)"""
EXPLANATIONS = (
    ("loaded", "names", "determinism", "reference", "on_policy", "gradients"),
    ("loaded", "determinism", "reference"),
    ("loaded", "names", "weights", "buffers", "second"),
)
"""What may explain that the trainer, the reference or the engine is not as it was saved: fewer than what may explain
log-probs that differ. Of several, what may explain them all.
"""


def run(bench: Bench) -> CheckResult:
    found = bench.resumed()
    band = Band.of_bench(bench)
    gap = Gap.of(found.batch, found.batch.rollout_log_probs_T, found.log_probs_T)
    parts = [list(part(found)) for part in (_wrong_trainer, _wrong_reference, _wrong_engine)]
    wrong = [finding for part in parts for finding in part]
    certain = [set(names) for part, names in zip(parts, EXPLANATIONS, strict=True) if part]
    verdict = band.verdict(gap)
    if verdict == Verdict.FAIL:
        wrong.append(
            (
                f"engine - trainer {gap}", gap.worst_tokens(bench.tokenizer), "the first generation after the resume "
                "does not come from the resumed weights (case A16)",
                "vime align-check RUN.toml --only weights: is the sync itself right?",
            )
        )  # fmt: skip
    limit = f"weights, log-probs of trainer and reference: bitwise; engine: {band.reason}"
    numbers = {"engine": gap.numbers()}
    if wrong:
        measured = "; ".join(text for text, _, _, _ in wrong)
        evidence = tuple(line for _, lines, _, _ in wrong for line in lines)
        return CheckResult(
            NAME, Verdict.FAIL, measured, limit, evidence, wrong[0][2], wrong[0][3], numbers=numbers,
            explained_by=tuple(sorted(set.intersection(*certain))) if certain else None,
        )  # fmt: skip
    said, untested = _said(found)
    if untested:
        return CheckResult(NAME, Verdict.NOT_TESTED, said, limit, cause=untested, numbers=numbers)
    measured = f"{said}; engine - trainer {gap}"
    return CheckResult(NAME, verdict, measured, limit, _evidence(found), *wide(verdict), numbers=numbers)


def _said(found: Resumed) -> tuple[str, str]:
    """(what holds, why it says nothing)"""
    total = len(found.saved.tensors)
    moved = len(differing(found.saved, found.moved))
    untested = "" if moved else "no weight changed between saving and loading: loading had nothing to do"
    if not found.batch.loss_mask_T.any():
        untested = "no sampled token in the rollout after the resume"
    held = "what the engine holds not tested (rollout.engine_tp > 1)" if found.held is None else f"engine {total}"
    return f"{moved} tensors had moved on, of {total} the trainer has back {total}, {held}", untested


def _evidence(found: Resumed) -> tuple[str, ...]:
    reference = "there is no reference model" if found.ref_T is None else "the reference answers as before, bit for bit"
    return (f"before the sync the engine refused: {found.refusal}", reference)


def _wrong_trainer(found: Resumed) -> Iterator[Finding]:
    if names := differing(found.saved, found.loaded):
        yield (
            f"{len(names)} of {len(found.saved.tensors)} tensors of the trainer are not what was saved",
            tuple(names[:3]), "the checkpoint was written or read in part", "look at the files of the checkpoint",
        )  # fmt: skip
    elif lines := _differing(found.scored, found.policy_T, found.policy_after_T):
        yield (
            f"log-probs of the policy differ at {len(lines)} tokens though its weights are equal", tuple(lines[:3]),
            "something beside the weights is not restored: buffers, a cast, or a gather of parameters that is late",
            "megatron.ddp.overlap_param_gather = false; the check determinism",
        )  # fmt: skip
    if dict(found.state) != dict(found.state_after):
        yield (
            "the state of the run is not what was saved", (f"{dict(found.state)} -> {dict(found.state_after)}",),
            "the state file is not that of this checkpoint", "look at state.json of the checkpoint",
        )  # fmt: skip


def _wrong_reference(found: Resumed) -> Iterator[Finding]:
    if found.ref_T is None or found.ref_after_T is None:
        return
    if lines := _differing(found.scored, found.ref_T, found.ref_after_T):
        yield (
            f"loading moved the reference: its log-probs differ at {len(lines)} of {len(found.ref_T)} tokens",
            tuple(lines[:3]), "the reference is taken from the resumed policy, so that kl starts at 0 again (case T21)",
            "the reference must come from model.ref_path, or model.path, and never from a checkpoint of the run",
        )  # fmt: skip


def _wrong_engine(found: Resumed) -> Iterator[Finding]:
    if not found.refusal:
        yield (
            "the engine generated before it had the resumed weights", (), "nothing compares the version of its weights "
            "with the trainer's (cases A16, W21)", "sync before the first rollout",
        )  # fmt: skip
    if found.held is not None and (names := differing(found.loaded, found.held)):
        yield (
            f"{len(names)} of {len(found.loaded.tensors)} tensors of the engine are not the checkpoint's",
            tuple(f"{found.held.origin}: {name}" for name in names[:3]),
            "the sync after the load sent other weights, or none", "weights.verify = full refuses it",
        )  # fmt: skip


def _differing(batch: RolloutBatch, before_T: np.ndarray, after_T: np.ndarray) -> list[str]:
    """A line for each token whose log-prob is another."""
    wrong = np.flatnonzero(before_T != after_T)
    return [f"{batch.place_of(int(at))}: {before_T[at]:.6g} -> {after_T[at]:.6g}" for at in wrong]


CHECK = Check(
    name=NAME,
    step="12",
    title="the first generation after a resume uses the resumed weights",
    guide="second step: is it loaded rightly?",
    run=run,
    is_live=True,
    explained_by=(
        "loaded",
        "weights",
        "buffers",
        "determinism",
        "reference",
        "engine",
        "sampling",
        "tokens",
        "decode",
        "packing",
        "on_policy",
        "second",
        "names",
        "routing",
        "batch",
        "order",
        "gradients",
    ),
)
