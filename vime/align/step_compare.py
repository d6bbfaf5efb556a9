"""Two runs that trained on the same rollout, compared quantity by quantity, in the order in which they arise.

Weights trained from -> log-probs -> advantages -> loss -> grad norm -> gradients -> lr -> weights: the first that is
over its limit tells where a fault came in; all that follow are its consequences. Axes as in ``vime.types``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vime.align.step_limits import FLOOR, Limits
from vime.align.tensors import TensorGap, ratio
from vime.record.training import TrainingRecord, TrainingStep
from vime.types import RolloutBatch, Verdict

ORDER = (
    "weights before",
    "log_probs",
    "ref_log_probs",
    "advantages",
    "loss",
    "grad_norm",
    "gradients",
    "lr",
    "weights",
)
"""The quantities of a step in the order in which they arise."""
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one rollout. ``where``: the first place over the limit, else the worst; ``evidence``: more;
    ``tensors``: of the gradients, every parameter with who holds it, the worst first.
    """

    rollout_id: int
    quantity: str
    verdict: Verdict
    measured: str = ""
    limit: str = ""
    where: str = ""
    evidence: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    tensors: tuple[tuple[TensorGap, str], ...] = ()


@dataclass(frozen=True)
class Pair:
    """What a reference and a candidate did with ``batch``. ``decode``: the text of a token id, where one is at hand."""

    batch: RolloutBatch
    reference: TrainingRecord
    candidate: TrainingRecord
    limits: Limits
    decode: Callable[[int], str] | None = None

    @property
    def steps(self) -> list[tuple[TrainingStep, TrainingStep]]:
        return list(zip(self.reference.steps, self.candidate.steps, strict=True))

    def sample(self, row: int) -> str:
        rank = int(self.candidate.dp_ranks_N[row]) if row < len(self.candidate.dp_ranks_N) else -1
        name = f"sample {self.batch.group_ids_N[row]}/{self.batch.indices_N[row]}"
        return name if rank < 0 else f"{name} (dp rank {rank})"

    def token(self, at: int) -> str:
        row = int(np.searchsorted(self.batch.offsets, at, side="right") - 1)
        token_id = int(self.batch.token_ids_T[at])
        text = "" if self.decode is None else f" {self.decode(token_id)!r}"
        return f"{self.sample(row)}, position {at - int(self.batch.offsets[row])}, token {token_id}{text}"


def compare_records(pair: Pair) -> list[Row]:
    """Every quantity that training records hold, in order: all of ``ORDER`` but weights and gradients.

    A step that both skipped has no loss and no gradient: there is nothing of it to compare.
    """
    rows = [
        token_row(pair, "log_probs", pair.limits.log_probs),
        token_row(pair, "ref_log_probs", pair.limits.ref_log_probs),
        token_row(pair, "advantages", 0.0),
    ]
    ours, theirs = len(pair.reference.steps), len(pair.candidate.steps)
    if ours != theirs:
        return [*rows, Row(pair.batch.rollout_id, "loss", Verdict.FAIL, f"{ours} -> {theirs} optimizer steps")]
    for i, (a, b) in enumerate(pair.steps):
        if a.is_skipped != b.is_skipped:
            what = "the reference" if a.is_skipped else "the candidate"
            return [*rows, Row(pair.batch.rollout_id, "loss", Verdict.FAIL, f"{what} alone skipped step {i}")]
    return [
        *rows,
        loss_row(pair),
        number_row(pair, "grad_norm", pair.limits.grad_norm),
        number_row(pair, "lr", 0.0),
    ]


def token_row(pair: Pair, quantity: str, limit: float) -> Row:
    """Per-token values over the trained tokens; over every token where the limit is bitwise."""
    name = f"{quantity}_T"
    a, b = getattr(pair.reference, name), getattr(pair.candidate, name)
    rollout_id = pair.batch.rollout_id
    if not len(a) or not len(b):
        without = "neither has" if len(a) == len(b) else "only one has"
        return Row(rollout_id, quantity, Verdict.SKIP, where=f"{without} a reference model")
    used_T = np.flatnonzero(pair.batch.loss_mask_T) if limit else np.arange(len(a))
    if not len(used_T):
        return Row(rollout_id, quantity, Verdict.SKIP, where="no trained token")
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = np.abs(a[used_T].astype(np.float64) - b[used_T].astype(np.float64))
    gap[~np.isfinite(gap)] = np.inf
    numbers = {
        "max": float(gap.max()),
        "p99": float(np.quantile(gap, 0.99, method="higher")),
        "mean": float(gap.mean()),
    }
    over = np.flatnonzero(gap > limit)
    at = used_T[over[0] if len(over) else gap.argmax()]
    where = f"{pair.token(int(at))}: {a[at]:.6g} -> {b[at]:.6g}" if numbers["max"] else ""
    worst = tuple(
        f"{pair.token(int(used_T[i]))}: {a[used_T[i]]:.6g} -> {b[used_T[i]]:.6g}"
        for i in np.argsort(-gap)[:SHOWN]
        if gap[i]
    )
    measured = f"max {numbers['max']:.2g}, p99 {numbers['p99']:.2g}, mean {numbers['mean']:.2g}"
    if not numbers["max"]:
        measured = f"equal, {len(used_T)} tokens"
    if len(over):
        measured += f"; {len(over)} of {len(used_T)} tokens over"
    return Row(
        rollout_id, quantity, _verdict(over), measured, _limit(limit), where, worst, numbers | {"over": len(over)}
    )


def loss_row(pair: Pair) -> Row:
    """The loss of every step and each sample's share of it, relative to the sum of |shares| of the step."""
    limit, rollout_id = pair.limits.loss, pair.batch.rollout_id
    ours, theirs = pair.reference.sample_losses_N, pair.candidate.sample_losses_N
    scale_N = _scales(pair)
    share = _relative(ours, theirs, scale_N)
    trained = [i for i, (a, _) in enumerate(pair.steps) if not a.is_skipped]
    if not trained:
        return _no_step(pair, "loss")
    a, b = (np.array([pair.steps[i][side].loss for i in trained]) for side in (0, 1))
    whole = _relative(a, b, scale_N[:: len(ours) // len(pair.steps)][trained])
    numbers = {"max relative": float(whole.max()), "max relative of a sample": float(share.max())}
    over = np.flatnonzero(share > limit)
    failed = bool(len(over)) or bool((whole > limit).any())
    step = int(whole.argmax())
    measured = f"{a[step]:.6g} -> {b[step]:.6g}, relative {whole[step]:.2g}"
    if len(over):
        measured += f"; {len(over)} of {len(ours)} samples over"
    first = int(over[0]) if len(over) else int(share.argmax())
    where = f"{pair.sample(first)}: share {ours[first]:.6g} -> {theirs[first]:.6g}" if share.max() else ""
    evidence = tuple(_by_rank(pair, share > limit)) if len(over) else ()
    verdict = Verdict.FAIL if failed else Verdict.PASS
    return Row(rollout_id, "loss", verdict, measured, _limit(limit, "relative"), where, evidence, numbers)


def _scales(pair: Pair) -> np.ndarray:
    """Sum of |share| over the samples of each sample's step: losses of a step cancel, their sizes do not."""
    shares, num_steps = np.abs(pair.reference.sample_losses_N), max(len(pair.steps), 1)
    return np.repeat(shares.reshape(num_steps, -1).sum(1), len(shares) // num_steps)


def _relative(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = np.abs(a - b)
    whole = np.maximum(scale, np.abs(a))
    found = np.divide(gap, whole, out=np.where(gap > 0, np.inf, 0.0), where=whole > 0)
    return np.where(np.isfinite(gap), found, np.inf)


def _by_rank(pair: Pair, is_over_N: np.ndarray) -> Iterable[str]:
    """Per data-parallel rank: how many of its samples are over, and by which factor their losses differ."""
    ranks = pair.candidate.dp_ranks_N
    for rank in sorted(set(ranks.tolist())):
        mine = ranks == rank
        over = mine & is_over_N
        factors = [ratio(float(b), float(a)) for a, b in zip(*_shares(pair, over), strict=True)]
        factor = f", loss x {np.median(factors):.6g}" if factors else ""
        yield f"dp rank {rank}: {int(over.sum())} of {int(mine.sum())} samples over{factor}"


def _shares(pair: Pair, which_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return pair.reference.sample_losses_N[which_N], pair.candidate.sample_losses_N[which_N]


def number_row(pair: Pair, quantity: str, limit: float) -> Row:
    """``grad_norm`` or ``lr`` of every step, relative."""
    used = [i for i, (a, _) in enumerate(pair.steps) if quantity == "lr" or not a.is_skipped]
    if not used:
        return _no_step(pair, quantity)
    a, b = (np.array([getattr(pair.steps[i][side], quantity) for i in used]) for side in (0, 1))
    relative = _relative(a, b, np.abs(a))
    over = np.flatnonzero(relative > limit)
    at = int(over[0]) if len(over) else int(relative.argmax())
    measured = f"{a[at]:.6g} -> {b[at]:.6g}, relative {relative[at]:.2g}"
    where = f"step {used[at]}" if len(pair.steps) > 1 else ""
    numbers = {"max relative": float(relative.max())}
    return Row(pair.batch.rollout_id, quantity, _verdict(over), measured, _limit(limit, "relative"), where, (), numbers)


def _no_step(pair: Pair, quantity: str) -> Row:
    """Two runs that both skipped every step did the same; without any step nothing was done."""
    verdict = Verdict.SKIP if pair.steps else Verdict.NOT_TESTED
    return Row(pair.batch.rollout_id, quantity, verdict, where="every step was skipped" if pair.steps else "no step")


Holders = Callable[[str], str]
"""Name of a tensor -> which ranks hold it."""


def weights_before_row(rollout_id: int, gaps: Sequence[TensorGap], holders: Holders, known: Sequence[str] = ()) -> Row:
    """Weights as loaded: equal in every layout, nothing was computed yet. ``known``: what explains a difference."""
    if not gaps:
        return _no_tensors(rollout_id, "weights before")
    wrong = [gap for gap in gaps if gap.distance]
    measured = f"{len(gaps) - len(wrong)} of {len(gaps)} tensors equal"
    where = f"{wrong[0].name} ({holders(wrong[0].name)})" if wrong else ""
    lines = (*known, *(f"{gap.name}: {gap.problem or f'relative L2 {gap.relative_l2:.2g}'}" for gap in wrong[:SHOWN]))
    if known:
        where += f": {known[0].partition(': ')[2]}"
    numbers = {"different": len(wrong)}
    return Row(rollout_id, "weights before", _verdict(wrong), measured, "bitwise", where, lines, numbers)


def gradient_row(rollout_id: int, gaps: Sequence[TensorGap], limits: Limits, holders: Holders, note: str = "") -> Row:
    """Every gradient tensor, by relative L2. ``note``: of which step, clipped or not."""
    if not gaps:
        return _no_tensors(rollout_id, "gradients")
    whole = float(np.sqrt(sum(gap.norm**2 for gap in gaps)))
    sizes = {gap.name: ratio(gap.distance, max(gap.norm, FLOOR * whole)) for gap in gaps}
    ordered = sorted(gaps, key=lambda gap: (-sizes[gap.name], gap.name))
    over = [gap for gap in ordered if sizes[gap.name] > limits.gradients]
    worst = ordered[0]
    cosine = min(gap.cosine for gap in gaps)
    measured = f"relative L2 {sizes[worst.name]:.2g}, cosine {cosine:.9g}"
    measured += f"; {len(over)} of {len(gaps)} tensors over" if over else f" over {len(gaps)} tensors"
    if not worst.distance:
        measured = f"equal, {len(gaps)} tensors"
    lines = tuple(
        f"{gap.name} ({holders(gap.name)}): "
        + (
            gap.problem
            or f"relative L2 {gap.relative_l2:.2g}, cosine {gap.cosine:.6g}, max |difference| {gap.max_abs:.2g}"
        )
        for gap in ordered[:SHOWN]
        if gap.distance
    )
    where = f"{worst.name} ({holders(worst.name)}){note}" if worst.distance else note.strip("; ")
    numbers = {"max relative L2": sizes[worst.name], "min cosine": cosine, "over": len(over), "tensors": len(gaps)}
    limit = _limit(limits.gradients, "relative L2")
    tensors = tuple((gap, holders(gap.name)) for gap in ordered)
    return Row(rollout_id, "gradients", _verdict(over), measured, limit, where, lines, numbers, tensors)


def weight_row(rollout_id: int, gaps: Sequence[TensorGap], limits: Limits, holders: Holders) -> Row:
    """The updated weights: how far apart, against how far the step moved them."""
    if not gaps:
        return _no_tensors(rollout_id, "weights")
    sizes = {gap.name: ratio(gap.distance, max(gap.change, limits.resolution * gap.norm)) for gap in gaps}
    ordered = sorted(gaps, key=lambda gap: (-sizes[gap.name], gap.name))
    over = [gap for gap in ordered if sizes[gap.name] > limits.weights]
    worst, largest = ordered[0], max(gaps, key=lambda gap: gap.max_abs)
    measured = (
        f"{sizes[worst.name]:.2g} of the step, relative L2 {max(gap.relative_l2 for gap in gaps):.2g}, "
        f"max |difference| {largest.max_abs:.2g}"
    )
    if over:
        measured += f"; {len(over)} of {len(gaps)} tensors over"
    elif not worst.distance:
        measured = f"equal, {len(gaps)} tensors"
    lines = tuple(
        f"{gap.name} ({holders(gap.name)}): "
        + (gap.problem or f"{sizes[gap.name]:.2g} of its step, relative L2 {gap.relative_l2:.2g}")
        for gap in ordered[:SHOWN]
        if gap.distance
    )
    where = f"{worst.name} ({holders(worst.name)})" if worst.distance else ""
    numbers = {"max share of the step": sizes[worst.name], "max": largest.max_abs, "over": len(over)}
    limit = _limit(limits.weights, "of the step")
    return Row(rollout_id, "weights", _verdict(over), measured, limit, where, lines, numbers)


def digest_row(
    rollout_id: int, quantity: str, ours: Mapping[str, str], theirs: Mapping[str, str], holders: Holders
) -> Row:
    """Digests by name of tensor: equal or not is all that can be said."""
    names = list(dict.fromkeys([*ours, *theirs]))
    if not names:
        return _no_tensors(rollout_id, quantity)
    wrong = [name for name in names if ours.get(name) != theirs.get(name)]
    measured = f"{len(names) - len(wrong)} of {len(names)} digests equal"
    lines = tuple(f"{name} ({holders(name)})" for name in wrong[:SHOWN])
    where = lines[0] if lines else ""
    return Row(rollout_id, quantity, _verdict(wrong), measured, "bitwise", where, lines, {"different": len(wrong)})


def _no_tensors(rollout_id: int, quantity: str) -> Row:
    return Row(rollout_id, quantity, Verdict.NOT_TESTED, where="there are none")


def first_mismatch(rows: Iterable[Row]) -> Row | None:
    """The first failed quantity of the first rollout that has one."""
    failed = [row for row in rows if row.verdict == Verdict.FAIL]
    return min(failed, key=lambda row: (row.rollout_id, ORDER.index(row.quantity)), default=None)


CAUSES = {
    "weights before": "the checkpoint is not loaded alike: a shard at another's place, or another model.path",
    "log_probs": "the forward pass differs: weights of the policy, tokens, positions, packing, or temperature",
    "ref_log_probs": "the forward pass of the reference differs: its weights, or what log_probs is affected by too",
    "advantages": "the rewards, or how they become advantages (algo.*)",
    "loss": "weights and normaliser of the loss, or which samples each data-parallel rank trains on",
    "grad_norm": "the backward pass, or how gradients are summed over ranks",
    "gradients": "the backward pass, or how gradients are summed over ranks",
    "lr": "the schedule: train.lr*, train.num_warmup_steps, run.num_rollouts",
    "weights": "the optimizer: its settings, its state, or the clipping",
}
"""Quantity -> what to look at where it is the first over its limit."""


def _verdict(over: Sequence[object] | np.ndarray) -> Verdict:
    return Verdict.FAIL if len(over) else Verdict.PASS


def _limit(limit: float, of: str = "") -> str:
    return f"{limit:.2g} {of}".strip() if limit else "bitwise"
