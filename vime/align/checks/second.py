"""The second step: the engine has the updated weights, all of them, and computes with nothing older."""

from __future__ import annotations

from dataclasses import dataclass

from vime.align.bench import Bench, Learned
from vime.align.gap import Band, Gap, rise
from vime.align.walk import Check
from vime.types import CheckResult, Verdict, WeightManifest

NAME = "second"
SHOWN = 3
OF_THE_WEIGHTS = ("loaded", "names", "weights", "buffers")
"""What may explain tensors or versions that are wrong: nothing that makes log-probs differ alone."""


def run(bench: Bench) -> CheckResult:
    first, second = bench.first, bench.second
    if not second.batch.loss_mask_T.any():
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no sampled token in the second rollout")
    gaps = [Gap.of(each.batch, each.batch.rollout_log_probs_T, each.log_probs_T) for each in (first, second)]
    band = Band.of_bench(bench)
    stale = Stale.of(first, second)
    unmoved, note = _unmoved(first)
    numbers = {
        "first": gaps[0].numbers(), "second": gaps[1].numbers(), "cached tokens": second.cached[1],
        "plots": [gaps[1].plot("Engine against trainer after the first update", band.pass_max, bench.tokenizer)],
    }  # fmt: skip
    facts = (_versions(second), *stale.lines, note, _trend(gaps), _cached(second))
    evidence = tuple(line for line in facts if line)
    verdict = band.verdict(gaps[1])
    if stale.wrong or not _is_version_right(first, second) or unmoved or verdict == Verdict.FAIL:
        worst = gaps[1].worst_tokens(bench.tokenizer) if verdict != Verdict.PASS else ()
        measured, cause, next_step = _failed(first, second, stale, unmoved, gaps[1])
        is_certain = stale.wrong or not _is_version_right(first, second) or unmoved
        return CheckResult(
            NAME, Verdict.FAIL, measured, band.reason, (*evidence, *worst), cause, next_step, numbers=numbers,
            explained_by=OF_THE_WEIGHTS if is_certain else None,
        )  # fmt: skip
    measured = f"v{second.before.version}: {stale.equal}; engine - trainer {gaps[1]}"
    if rising := rise(gaps[0], gaps[1], band):
        return CheckResult(
            NAME, Verdict.WARN, f"{measured}; {rising}", band.reason, evidence, "the gap grows with the updates though "
            "it is within its limit: something stays behind them a little (case A06)",
            "vllm.enable_prefix_caching = false; watch train/train_rollout_logprob_abs_diff over more rollouts",
            numbers=numbers,
        )  # fmt: skip
    if not first.stats.is_skipped or differing(first.before, first.after):
        return CheckResult(NAME, verdict, measured, band.reason, evidence, *wide(verdict), numbers=numbers)
    cause = f"no update lies between the two rollouts: {first.refused or first.stats.skip_reason}"
    return CheckResult(NAME, Verdict.NOT_TESTED, measured, band.reason, evidence, cause, numbers=numbers)


def wide(verdict: Verdict) -> tuple[str, str]:
    """(cause, next step) of a gap that is wide though the weights are equal."""
    if verdict == Verdict.PASS:
        return "", ""
    return (
        "rounding of bfloat16, as far as can be told: the weights are equal on both sides",
        "model.dtype = float32 tells rounding from everything else",
    )


@dataclass(frozen=True, slots=True)
class Stale:
    """What the engine held while it generated, against the trainer's weights then and before the update.

    wrong      tensors that are not the trainer's; old: those of them that are as before the update
    is_known   False: no worker holds whole tensors; who: which engine, in words
    unread     tensors that it cannot read back
    """

    total: int
    wrong: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    is_known: bool = True
    who: str = "engine holds"
    unread: int = 0

    @classmethod
    def of(cls, first: Learned, second: Learned) -> Stale:
        held, total = second.held, len(second.before.tensors)
        if held is None:
            return cls(total, is_known=False)
        wrong = tuple(differing(second.before, held))
        old = tuple(n for n in wrong if _digest(held, n) == _digest(first.before, n))
        return cls(total, wrong, old, who=held.origin, unread=len(_unread(held)))

    @property
    def equal(self) -> str:
        if not self.is_known:
            return "what the engine holds is not tested (rollout.engine_tp > 1)"
        equal = self.total - len(self.wrong) - self.unread
        unread = f" ({self.unread} cannot be read back)" if self.unread else ""
        return f"engine holds {equal} of {self.total} of the trainer's tensors{unread}"

    @property
    def lines(self) -> tuple[str, ...]:
        if not self.wrong:
            return (self.equal,)
        which = f", {len(self.old)} of them as before the update" if self.old else ""
        tensors = f"{len(self.wrong)} tensors that are not the trainer's{which}: {', '.join(self.wrong[:SHOWN])}"
        return (f"{self.who} {tensors}",)


def differing(ours: WeightManifest, theirs: WeightManifest) -> list[str]:
    """Tensors of ours that theirs has otherwise, or not at all; not those that it could not read (no digest)."""
    unread = _unread(theirs)
    return [n for n in ours.tensors if n not in unread and _digest(ours, n) != _digest(theirs, n)]


def _unread(manifest: WeightManifest) -> set[str]:
    return {name for name, entry in manifest.tensors.items() if not entry.digest}


def _digest(manifest: WeightManifest, name: str) -> str:
    return manifest.tensors[name].digest if name in manifest.tensors else ""


def _is_version_right(first: Learned, second: Learned) -> bool:
    """Every sample comes from the weights of the second sync; where nothing was trained there is no later version."""
    found = {(row["weight_version_min"], row["weight_version_max"]) for row in second.batch.rows}
    version = second.before.version
    return found == {(version, version)} and (version > first.before.version or first.stats.is_skipped)


def _versions(second: Learned) -> str:
    found = sorted({v for row in second.batch.rows for v in (row["weight_version_min"], row["weight_version_max"])})
    shown = ", ".join(f"v{version}" for version in found)
    return f"second rollout sampled with {shown}, the trainer is at v{second.before.version}"


def _unmoved(first: Learned) -> tuple[bool, str]:
    """(no weight changed though the step was taken, which did and did not)"""
    if first.stats.is_skipped or first.stats.lr == 0.0:
        return False, "" if first.stats.is_skipped else "the learning rate of the first step is 0: no weight moves"
    same = [name for name in first.before.tensors if _digest(first.before, name) == _digest(first.after, name)]
    moved = len(first.before.tensors) - len(same)
    text = f"the first step changed {moved} of {len(first.before.tensors)} tensors"
    if same:
        text += f"; unchanged: {', '.join(same[:SHOWN])}" + (f" and {len(same) - SHOWN} more" if same[SHOWN:] else "")
    return not moved, text


def _trend(gaps: list[Gap]) -> str:
    return f"mean |engine - trainer|: first rollout {gaps[0].mean:.2g}, second {gaps[1].mean:.2g}"


def _cached(second: Learned) -> str:
    asked, cached = second.cached
    return f"prefix cache: {cached} of {asked} prompt tokens of the second rollout were found in it" if asked else ""


def _failed(first: Learned, second: Learned, stale: Stale, unmoved: bool, gap: Gap) -> tuple[str, str, str]:
    """(measured, cause, next step); digests first, for they are certain."""
    if unmoved:
        return (
            "no weight changed in the first step", "the optimizer did not write its step into the weights, or the "
            f"step is smaller than {_dtype(second)} resolves (lr {first.stats.lr:g})",
            "raise train.lr; look at the check gradients",
        )  # fmt: skip
    if stale.wrong:
        old = len(stale.old) == len(stale.wrong)
        return (
            f"engine holds {stale.total - len(stale.wrong)} of {stale.total} of the trainer's tensors after the sync; "
            f"engine - trainer {gap}",
            "stale engine: the sync said that it was done, and the engine holds the weights of before" if old
            else "the update was carried in part, or changed on its way",
            "weights.verify = full refuses such a sync; restart the engines",
        )  # fmt: skip
    if not _is_version_right(first, second):
        return (
            _versions(second), "the engine generated with another weight version than the trainer's (case W21)",
            "sync before every rollout; look at what wakes the engines",
        )  # fmt: skip
    return f"engine - trainer {gap}", *_of_the_gap(second)


def _dtype(second: Learned) -> str:
    return ", ".join(sorted({entry.dtype for entry in second.before.tensors.values()}))


def _of_the_gap(second: Learned) -> tuple[str, str]:
    """The weights are right, the log-probs are not: keys and values of the old weights, or the computation."""
    if second.rescored is None:
        return "the engine computes otherwise after the update", "restart the engines and compare"
    sampled, rescored = second.rescored
    numbers = f"mean gap {sampled:.2g} as sampled, {rescored:.2g} scored anew without the cache"
    if 3 * rescored < sampled and second.cached[1]:
        return (
            f"stale prefix cache: {second.cached[1]} prompt tokens were read from keys and values of the old weights; "
            f"{numbers} (case A15)",
            "reset the cache at every sync: vime does; or vllm.enable_prefix_caching = false",
        )
    return (
        f"the engine holds the trainer's weights and computes otherwise; {numbers}",
        "look at the check engine and its terms; at buffers that an update should renew; vllm.enforce_eager = true",
    )


CHECK = Check(
    name=NAME,
    step="11a",
    title="the second rollout comes from the updated weights",
    guide="second step: is it loaded rightly?",
    run=run,
    is_live=True,
    explained_by=(
        "loaded",
        "weights",
        "buffers",
        "engine",
        "sampling",
        "tokens",
        "decode",
        "prefix_cache",
        "packing",
        "names",
        "determinism",
        "routing",
        "batch",
        "order",
    ),
)
