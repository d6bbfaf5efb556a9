"""How large are the log-probs? The guide's bands, with its causes, and the first prompt as the model sees it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import name_of
from vime.align.plots import histogram
from vime.align.walk import Check
from vime.types import CheckResult, RolloutBatch, Verdict

NAME = "size"
LARGE = 1.0
"""Mean |log_prob|, nats, above which the guide suspects the training configuration."""
TEMPLATE = 0.8
"""The same for an instruct model, above which it suspects the chat template or the distribution of the data."""
WORSE_THAN_GUESSING = 0.5
"""So far above log V: the tokens were sampled from another model than the one that scores them."""
SMALL = 10**9
"""Parameters below which a model is unsure by itself, and the guide's bands, of large ones, do not hold."""
VAGUE = 0.4
"""For a small model, mean |log_prob| / log V. SmolLM2-135M, temperature 1: <= 0.26; a tiny trained model 0.25; random
weights >= 0.81."""
IDS_SHOWN = 48
PLOT = "size of the log-probs of sampled tokens"


def run(bench: Bench) -> CheckResult:
    """FAIL only for what no model gives its own samples: not finite, or less likely than guessing. Bands are WARN."""
    batch = bench.batch
    if not batch.loss_mask_T.any():
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no trained token in this rollout")
    size_K = np.abs(bench.log_probs_T[batch.loss_mask_T].astype(np.float64))
    engine_K = np.abs(batch.rollout_log_probs_T[batch.loss_mask_T].astype(np.float64))
    mean, guess = float(size_K.mean()), math.log(bench.spec.vocab_size)
    measured = f"mean |log_prob| {mean:.3g}, worst {size_K.max():.3g} over {len(size_K)} tokens"
    evidence = (*_first_prompt(bench, batch), *_worst_sample(bench, batch))
    verdict, cause, next_step = _judged(bench, mean, float(engine_K.mean()), guess)
    numbers: dict[str, Any] = {
        "mean": mean,
        "worst": float(size_K.max()),
        "engine_mean": float(engine_K.mean()),
        "log_vocab": guess,
        "plots": [histogram(PLOT, {"trainer": size_K, "engine": engine_K}, "|log_prob|, nats", limit=LARGE).as_dict()],
    }
    return CheckResult(NAME, verdict, measured, _limit(bench), evidence, cause, next_step, numbers=numbers)


def _judged(bench: Bench, mean: float, engine_mean: float, guess: float) -> tuple[Verdict, str, str]:
    if not math.isfinite(mean) or mean > guess + WORSE_THAN_GUESSING:
        return (
            Verdict.FAIL,
            f"the trainer finds the tokens less likely than a guess among all (log V = {guess:.3g}): its weights, its "
            "tokens or its temperature are not those that were sampled from",
            "the checks loaded, names, weights and sampling say which; then the parallel settings",
        )
    agree = "engine and trainer agree on it, so it is the model or the data"
    if abs(mean - engine_mean) > 0.1 * mean:
        agree = f"the engine gives {engine_mean:.3g} for the same tokens, so it is the trainer"
    if mean > _largest(bench):
        near = f", near that of a guess among all tokens ({guess:.3g})" if mean > 0.7 * guess else ""
        return (
            Verdict.WARN,
            f"larger than a trained model is on its own answers{near}; {agree}",
            "very large: the training configuration or the weights; else an untrained, small or pretrained model: try "
            "the instruct version of it, and a lower rollout.sampling.temperature",
        )
    if bench.config.data.apply_chat_template and bench.spec.num_parameters >= SMALL and mean > TEMPLATE:
        return (
            Verdict.WARN,
            f"a little larger than after supervised fine-tuning; {agree}",
            "does the first prompt (see evidence) have the chat template that the model was trained with? are the "
            "prompts like those of its cold start?",
        )
    return Verdict.PASS, "", ""


def _largest(bench: Bench) -> float:
    is_small = bench.spec.num_parameters < SMALL
    return max(LARGE, VAGUE * math.log(bench.spec.vocab_size)) if is_small else LARGE


def _limit(bench: Bench) -> str:
    if bench.spec.num_parameters < SMALL:
        why = f"{VAGUE:g} of a guess; the guide's {TEMPLATE:g} and {LARGE:g} are for larger models"
        return f"mean |log_prob| <= {_largest(bench):.2g} ({why})"
    return f"mean |log_prob| <= {TEMPLATE:g} for an instruct model, <= {LARGE:g} for any (the guide's bands)"


def _first_prompt(bench: Bench, batch: RolloutBatch) -> tuple[str, str]:
    """As the model sees it: special tokens spelled out, and the ids."""
    ids = batch.token_ids_T[: int(batch.prompt_lens_N[0])].tolist()
    shown = ", ".join(map(str, ids[:IDS_SHOWN])) + (f", ... ({len(ids)} in all)" if len(ids) > IDS_SHOWN else "")
    text = bench.tokenizer.decode(ids, skip_special_tokens=False)
    return f"first prompt, as the model sees it: {text!r}", f"its token ids: {shown}"


def _worst_sample(bench: Bench, batch: RolloutBatch) -> tuple[str, ...]:
    """The sample with the largest mean: few bad ones are not lost in the mean of all."""
    found: list[tuple[float, int]] = []
    for row in range(len(batch)):
        own = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        values = np.abs(bench.log_probs_T[own][batch.loss_mask_T[own]])
        if len(values):
            found.append((float(values.mean()), row))
    mean, row = max(found)
    return (f"largest mean: {name_of(batch, row)}, {mean:.3g}: {batch.rows[row].get('text', '')[:200]!r}",)


CHECK = Check(
    NAME,
    "7",
    "the log-probs are small",
    "first step, 2: is their value small? > 1: training configuration; 0.8 on an instruct model: chat template",
    run,
    explained_by=("loaded", "names", "weights", "buffers", "coherence", "sampling", "tokens"),
)
