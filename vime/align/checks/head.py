"""The last steps on both sides: types of weights, head, logits and log-softmax. They must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import few_rows, joined
from vime.align.oracle import Oracle
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "head"
SAMPLES = 4
FACTS = {"dtype": "weights", "head_dtype": "head", "logits_dtype": "logits", "log_softmax_dtype": "log-softmax"}


def run(bench: Bench) -> CheckResult:
    """One-sided is worse than none (case A08): both sides then round differently at every token."""
    trainer, engine = bench.trainer.describe(), bench.engine.describe()
    measured = f"engine: {_said(engine)}; trainer: {_said(trainer)}"
    differing = [name for name in FACTS if trainer[name] != engine[name]]
    numbers = {"engine": {n: engine[n] for n in FACTS}, "trainer": {n: trainer[n] for n in FACTS}}
    if not differing:
        return CheckResult(NAME, Verdict.PASS, measured, "the same type at every step on both sides", numbers=numbers)
    names = ", ".join(FACTS[name] for name in differing)
    effect = _effect(bench)
    return CheckResult(
        NAME, Verdict.FAIL, measured, "the same type at every step on both sides",
        (f"different: {names}", effect),
        f"{names}: {engine[differing[0]]} in the engine, {trainer[differing[0]]} in the trainer",
        "vllm.hf_overrides = {head_dtype = 'model'}, or the same type in the trainer; model.dtype for both sides",
        numbers=numbers,
    )  # fmt: skip


def _said(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{text} {about[name]}" for name, text in FACTS.items())


def _effect(bench: Bench) -> str:
    """How much a head in bfloat16 changes log-probs, from the hidden states of the Hugging Face model in float32."""
    batch = bench.batch
    oracle = Oracle(bench.config.model.path, SAMPLES, {"temperature": bench.config.rollout.sampling.temperature})
    sizes = []
    for row in few_rows(batch, SAMPLES):
        found = oracle.head_effect(batch, row)
        if isinstance(found, str):
            return f"effect not measured: {found}"
        sizes.append(np.abs(found))
    size = joined(sizes)
    if not len(size):
        return "effect not measured: no sampled token"
    return f"effect of a bfloat16 head alone: max {size.max():.2g}, mean {size.mean():.2g} nats over {len(size)} tokens"


CHECK = Check(
    NAME,
    "8i",
    "both compute the head in one precision",
    "weights, head, logits and log-softmax have the same type in engine and trainer",
    run,
    is_live=True,
)
