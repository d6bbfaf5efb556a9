"""Do trainer and engine send a token to the same experts, and does it explain their difference? (case A12)"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vime.align import plots
from vime.align.bench import Bench, Routing
from vime.align.gap import Compared, compared, name_of
from vime.align.routing import before, differs, first_places, touched
from vime.align.walk import Check
from vime.types import CheckResult, RolloutBatch, Verdict

NAME = "routing"


def tie_of(dtype: str, layer: int) -> float:
    """Logits of two experts this near may change places by rounding.

    float32 sums are off by some 1e-6 of them. bfloat16 keeps 8 bits, and the residual stream before a router gathers
    the rounding of every layer below it.
    """
    return 0.15 + 0.05 * layer if dtype == "bfloat16" else 1e-4


REPLAY = (
    "routing replay, the engine's experts used again in training, is needed for the same numbers and is not in vime; "
    "model.dtype = float32 for the run does without, megatron.transformer.moe_router_dtype = 'fp32' makes it rarer"
)


@dataclass(frozen=True)
class Experts:
    """Where the experts of the two sides differ. Axes: T tokens, M layers with experts."""

    batch: RolloutBatch
    trainer: Routing
    engine: Routing
    compared: Compared

    @cached_property
    def differs_TM(self) -> np.ndarray:
        return differs(self.trainer.experts_TMK, self.engine.experts_TMK)

    @cached_property
    def first_TM(self) -> np.ndarray:
        """Places that no other place explains: those in the lowest layer of a sample where any differ."""
        return first_places(self.differs_TM, self.batch.offsets)

    @cached_property
    def margin(self) -> float:
        """The largest margin by which either side preferred other experts at such a place; nan where none is told."""
        margins = [r.margins_TM[self.first_TM] for r in (self.trainer, self.engine) if r.margins_TM is not None]
        return float(np.nanmax(np.abs(np.concatenate(margins)))) if margins else float("nan")

    def is_beyond_rounding(self, dtype: str) -> bool:
        """Whether either side preferred other experts at such a place by more than a tie, or by what is no number."""
        ties_M = np.array([tie_of(dtype, layer) for layer in self.trainer.layers])
        margins = [r.margins_TM for r in (self.trainer, self.engine) if r.margins_TM is not None]
        return any(bool((~(np.abs(own_TM) <= ties_M) & self.first_TM).any()) for own_TM in margins)

    @cached_property
    def is_touched_T(self) -> np.ndarray:
        """Sampled tokens whose log-prob comes after an expert that differs, in their own row or through attention."""
        return touched(self.differs_TM, self.batch.offsets) & self.compared.gap.is_compared_T

    @cached_property
    def is_own_T(self) -> np.ndarray:
        """Sampled tokens whose predictor itself went to other experts."""
        return before(np.asarray(self.differs_TM.any(1)), self.batch.offsets) & self.compared.gap.is_compared_T

    @property
    def num_tokens(self) -> int:
        return int(self.differs_TM.any(1).sum())

    def gap_of(self, chosen_T: np.ndarray) -> tuple[float, float]:
        """(max, mean) |engine - trainer| of these tokens, nats; 0 where there are none."""
        size = np.abs(self.compared.gap.difference_T[chosen_T & self.compared.gap.is_compared_T])
        return (float(size.max()), float(size.mean())) if size.size else (0.0, 0.0)

    def numbers(self) -> dict[str, object]:
        shares = {str(layer): float(self.differs_TM[:, m].mean()) for m, layer in enumerate(self.trainer.layers)}
        curve = plots.bars("tokens that went to other experts, by layer", shares, "layer", "share of tokens")
        return {
            "num_places": int(self.differs_TM.sum()),
            "share_of_places": float(self.differs_TM.mean()),
            "share_of_tokens": float(self.differs_TM.any(1).mean()),
            "margin": self.margin if self.first_TM.any() else 0.0,
            "gap_touched": list(self.gap_of(self.is_touched_T)),
            "gap_own": list(self.gap_of(self.is_own_T)),
            "gap_others": list(self.gap_of(~self.is_touched_T)),
            "plots": [curve.as_dict()],
        }


def run(bench: Bench) -> CheckResult:
    """The share of (token, layer) with other experts, beside the log-prob difference of the tokens after them."""
    if not bench.spec.is_moe:
        return CheckResult(NAME, Verdict.SKIP, cause="a dense model routes no token")
    terms = compared(bench)
    if isinstance(terms, str):
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=terms)
    trainer, engine = bench.trainer.routing(bench.batch), bench.engine.routing(bench.batch)
    if trainer.layers != engine.layers:
        return CheckResult(
            NAME, Verdict.FAIL, f"layers with experts: trainer {trainer.layers}, engine {engine.layers}",
            cause="the sides do not build the same model", next_step="vime align-check RUN.toml --only names",
        )  # fmt: skip
    return judged(Experts(bench.batch, trainer, engine, terms), bench.config.model.dtype)


def judged(found: Experts, dtype: str) -> CheckResult:
    """No difference passes; one beyond a tie fails; ties pass where the log-probs agree, else they are a warning."""
    places, limit = int(found.differs_TM.sum()), _limit(found.trainer.layers, dtype)
    if not places:
        measured = f"{found.differs_TM.size} (token, layer) went to the same experts"
        return CheckResult(NAME, Verdict.PASS, measured, limit, numbers=found.numbers())
    measured = (
        f"{places} of {found.differs_TM.size} (token, layer), {found.differs_TM.mean():.2%}, and {found.num_tokens} of "
        f"{found.batch.num_tokens} tokens went to other experts; margin up to {found.margin:.2g}"
    )
    verdict, cause, next_step = _reading(found, found.is_beyond_rounding(dtype))
    return CheckResult(NAME, verdict, measured, limit, _evidence(found), cause, next_step, numbers=found.numbers())


def _limit(layers: tuple[int, ...], dtype: str) -> str:
    ties = sorted({tie_of(dtype, layer) for layer in layers})
    return f"ties: logits within {' to '.join(f'{tie:g}' for tie in (ties[0], ties[-1])[: len(ties)])} ({dtype})"


def _reading(found: Experts, is_beyond: bool) -> tuple[Verdict, str, str]:
    """(verdict, cause, next step)."""
    if is_beyond:
        return (
            Verdict.FAIL,
            "the routers disagree by more than rounding: a bias or weight that one side has not, or another scoring",
            "vime align-check RUN.toml --only weights,names for mlp.gate; then --bisect, for the router's logits",
        )
    band = found.compared.band
    if found.gap_of(~found.is_touched_T)[0] > band.fail_max:
        return Verdict.WARN, "near ties change places, which does not explain the tokens before any of them", REPLAY
    if found.gap_of(found.is_touched_T)[0] <= band.pass_max:
        return Verdict.PASS, "near ties change places, and the log-probs agree all the same", ""
    return Verdict.WARN, "near ties change places, and that explains the difference of the log-probs", REPLAY


def _evidence(found: Experts) -> tuple[str, ...]:
    texts = [
        ("whose predictor went to other experts", found.is_own_T),
        ("at or after such a token", found.is_touched_T),
    ]
    lines = []
    for text, chosen_T in (*texts, ("before any of them", ~found.is_touched_T)):
        largest, mean = found.gap_of(chosen_T)
        count = int((chosen_T & found.compared.gap.is_compared_T).sum())
        lines.append(f"{count} sampled tokens {text}: |engine - trainer| max {largest:.2g}, mean {mean:.2g}")
    for t, m in np.argwhere(found.first_TM)[:3]:
        row = int(np.searchsorted(found.batch.offsets, t, side="right") - 1)
        where = f"{name_of(found.batch, row)} token {t - found.batch.offsets[row]}, layer {found.trainer.layers[m]}"
        ours, theirs = (r.experts_TMK[t, m].tolist() for r in (found.trainer, found.engine))
        lines.append(f"{where}: trainer {ours}, engine {theirs}{_margins(found, t, m)}")
    return tuple(lines)


def _margins(found: Experts, t: int, m: int) -> str:
    told = [r.margins_TM[t, m] for r in (found.trainer, found.engine) if r.margins_TM is not None]
    return f", margins {', '.join(f'{margin:.2g}' for margin in told)}" if told else ""


CHECK = Check(
    NAME,
    "8j",
    "both send every token to the same experts",
    "a mixture of experts: the engine and the trainer send each token to the same ones",
    run,
    is_live=True,
    explained_by=("loaded", "names", "weights", "buffers", "determinism", "packing"),
)
