"""Checks of what only a GPU has. Without one each is a SKIP with the reason; none of them was run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vime import device
from vime.align.bench import Bench
from vime.align.gap import Band, Gap
from vime.align.generation import PLAIN
from vime.align.walk import Check
from vime.types import CheckResult, Prompt, Sample, Verdict
from vime.weights.manifest import compare

BATCH_SIZES = (1, 2, 3, 5)
"""Requests at once: 3 and 5 are replayed in a CUDA graph of another size, and padded."""
FREED = 0.5
"""Share of an engine's device memory that a level-2 sleep must free."""
FP8_MEAN = 0.1
"""Mean |engine - trainer|, nats, with 8-bit weights on one side."""


def on_gpu(name: str, instead: str, run: Callable[[Bench], CheckResult]) -> Callable[[Bench], CheckResult]:
    """``run`` where there is a GPU; else SKIP, with what is checked instead."""

    def guarded(bench: Bench) -> CheckResult:
        if device.kind() == "cpu":
            return CheckResult(name, Verdict.SKIP, cause=f"no GPU here: {instead}")
        return run(bench)

    return guarded


# ---------------------------------------------------------------- vLLM's sleep mode


def _sleep_levels(bench: Bench) -> CheckResult:
    """Memory really freed by vLLM's allocator; weights bitwise as before, after level 2 by a sync."""
    name, engine = "sleep_levels", bench.engine
    sent = bench.sync()  # steps were taken since the first sync
    wrong, lines = [], []
    for level in (1, 2):
        before = _device_bytes(bench)
        engine.sleep(level)
        asleep = _device_bytes(bench)
        engine.wake()
        if level == 2:
            sent = bench.sync()
        freed = 1.0 - asleep / before if before else 0.0
        found = compare(sent, engine.manifest("engine-held"))
        lines.append(f"level {level}: {freed:.0%} of {before / 1e9:.2f} GB freed; {len(found)} tensors differ after it")
        wrong += [f"level {level}: {found[0]}"] if found else []
        wrong += [f"level 2 frees only {freed:.0%}"] if level == 2 and freed < FREED else []
    limit = f"weights bitwise as before; level 2 frees at least {FREED:.0%}"
    if not wrong:
        return CheckResult(name, Verdict.PASS, "; ".join(lines), limit)
    return CheckResult(
        name, Verdict.FAIL, "; ".join(wrong), limit, tuple(lines), "vLLM's sleep mode keeps or loses memory",
        "vllm.enable_sleep_mode = true; cluster.colocate = false keeps the engines awake",
    )  # fmt: skip


def _device_bytes(bench: Bench) -> int:
    """Of all engines, what they hold on their devices."""
    return sum(kinds.get("reserved", 0) for kinds in bench.engine.memory().values())


# ---------------------------------------------------------------- transformer-engine


def _transformer_engine(bench: Bench) -> CheckResult:
    """The backend in effect, not the one that was asked for, and the same forward twice, bit by bit."""
    name = "transformer_engine"
    attention = str(bench.trainer.describe().get("attention", ""))
    asked = bench.config.megatron.transformer.get("attention_backend", "auto")
    batch = bench.batch
    twice = [bench.trainer.log_probs(batch) for _ in range(2)]  # both now: steps were taken since the first pass
    gap = Gap.of(batch, twice[0], twice[1], names=("first", "second"))
    measured = f"{attention} (asked: {asked}); the same forward twice: max {gap.max:.2g}"
    evidence = gap.worst_tokens(bench.tokenizer) if gap.max else ()
    flash = "megatron.transformer.attention_backend=flash; NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
    if gap.max:
        cause = "a kernel of transformer-engine that is not deterministic"
        return CheckResult(name, Verdict.FAIL, measured, "bitwise", evidence, cause, flash)
    if bench.config.parallel.cp > 1 and "flash" not in attention:
        cause = "under context parallelism the fused attention of some versions of transformer-engine is not stable"
        return CheckResult(name, Verdict.WARN, measured, "flash under parallel.cp > 1", evidence, cause, flash)
    return CheckResult(name, Verdict.PASS, measured, "bitwise")


# ---------------------------------------------------------------- CUDA graphs


def _cuda_graphs(bench: Bench) -> CheckResult:
    """Decoding replays CUDA graphs, padded to the sizes that were captured; scoring runs without decode graphs."""
    name = "cuda_graphs"
    if bench.config.vllm.get("enforce_eager"):
        return CheckResult(name, Verdict.SKIP, cause="vllm.enforce_eager = true: there are no graphs")
    bench.sync()  # a colocated step leaves the engines without weights
    band = Band.of_bench(bench, 1.0)
    prompts = [_prompt(bench, row) for row in range(len(bench.batch))]
    worst: dict[int, float] = {}
    for size in BATCH_SIZES:
        chosen = [prompts[i % len(prompts)] for i in range(size)]
        answers = bench.engine.generate(chosen, [[seed] for seed in range(size)], PLAIN)
        worst[size] = float(np.max([_distance(bench, group[0]) for group in answers]))
    measured = ", ".join(f"{size} at once: max {value:.2g}" for size, value in worst.items())
    numbers: dict[str, Any] = {"max_by_batch_size": {str(size): value for size, value in worst.items()}}
    largest = float(np.max(list(worst.values())))  # nan where one is
    if largest <= band.pass_max:
        return CheckResult(name, Verdict.PASS, measured, band.reason, numbers=numbers)
    return CheckResult(
        name, Verdict.WARN if largest <= band.fail_max else Verdict.FAIL, measured, band.reason, (),
        "decoding with CUDA graphs computes otherwise than without; padded sizes alone: the padding of the replay",
        "vllm.enforce_eager=true, or another vllm.compilation_config.cudagraph_mode", numbers=numbers,
    )  # fmt: skip


def _prompt(bench: Bench, row: int) -> Prompt:
    batch = bench.batch
    start = int(batch.offsets[row])
    ids = batch.token_ids_T[start : start + int(batch.prompt_lens_N[row])]
    return Prompt(int(batch.group_ids_N[row]), np.array(ids), str(batch.rows[row].get("prompt_text", "")))


def _distance(bench: Bench, sample: Sample) -> float:
    """Largest |difference| between the log-probs of decoding and those of one forward over the whole sequence."""
    (scored,) = bench.engine.score([sample.token_ids], at_once=1)
    return float(np.abs(scored - sample.rollout_log_probs)[sample.loss_mask].max(initial=0.0))


# ---------------------------------------------------------------- fp8


def _fp8(bench: Bench) -> CheckResult:
    """8-bit weights or activations on one side or both: their distance, against a band of its own."""
    name = "fp8"
    engine = bench.config.vllm.get("quantization") or bench.config.vllm.get("kv_cache_dtype")
    trainer = bench.config.megatron.transformer.get("fp8")
    if not engine and not trainer:
        return CheckResult(name, Verdict.SKIP, cause="neither trainer nor engine uses fp8")
    gap = Gap.of(bench.batch, bench.batch.rollout_log_probs_T, bench.log_probs_T)
    measured = f"engine {engine or 'not'}, trainer {trainer or 'not'}: {gap}"
    limit = f"mean |engine - trainer| <= {FP8_MEAN:g} (8-bit)"
    if gap.mean <= FP8_MEAN:
        return CheckResult(name, Verdict.PASS, measured, limit, numbers=gap.numbers())
    return CheckResult(
        name, Verdict.WARN if np.isfinite(gap.mean) else Verdict.FAIL, measured, limit,
        gap.worst_tokens(bench.tokenizer),
        "fp8 on one side rounds as the other does not" if bool(engine) != bool(trainer) else "fp8 scales differ",
        "fp8 on both sides or on none; importance sampling corrects for what is left", numbers=gap.numbers(),
    )  # fmt: skip


CHECKS = (
    Check(
        "sleep_levels",
        "13a",
        "vLLM's sleep mode frees the device and keeps what it must",
        "second step: does the colocated second step load, without out-of-memory?",
        on_gpu("sleep_levels", "vLLM's sleep mode frees device memory alone; buffers checks its twin", _sleep_levels),
        is_live=True,
        explained_by=("weights", "buffers"),
    ),
    Check(
        "transformer_engine",
        "13b",
        "the attention backend in effect, and its determinism",
        "first step, 2: attention-backend flash, against non-deterministic kernels of transformer-engine",
        on_gpu("transformer_engine", "transformer-engine is for GPUs; determinism is checked", _transformer_engine),
        explained_by=("determinism",),
    ),
    Check(
        "cuda_graphs",
        "13c",
        "decoding with CUDA graphs equals computing without",
        "illegal memory access: switch CUDA graphs off; it is often in the padding of their replay",
        on_gpu("cuda_graphs", "there are no CUDA graphs; decode compares decoding with one forward", _cuda_graphs),
        is_live=True,
        explained_by=("weights", "buffers", "decode"),
    ),
    Check(
        "fp8",
        "13d",
        "fp8 on either side",
        "first step, 2: the size of the difference between training and rollout",
        on_gpu("fp8", "fp8 kernels are for GPUs", _fp8),
        explained_by=("engine",),
    ),
)
