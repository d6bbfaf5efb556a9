"""Does the prefix cache hold what the present weights compute? After a sync it must be empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import Band, largest
from vime.align.generation import PLAIN, gap_to_scores, gap_until_they_part
from vime.align.walk import Check
from vime.types import CheckResult, Prompt, Sample, Verdict

NAME = "prefix_cache"
RESPONSE_LEN = 8
SEED = 7
CAUSE = "stale prefix cache: keys and values of the old weights answer for the new ones"
STEP = "reset the prefix cache at every sync, or give each weight version a cache_salt; enable_prefix_caching = false"


def run(bench: Bench) -> CheckResult:
    """Cached and computed prompts agree bitwise on a CPU, in both types."""
    bench.batch  # noqa: B018 - the run's own rollout comes first, with its own cache
    about = bench.engine.describe()
    if not about["prefix_caching"]:
        return CheckResult(NAME, Verdict.SKIP, cause="the prefix cache is off (vllm.enable_prefix_caching = false)")
    prompt = _long_prompt(bench, about)
    if isinstance(prompt, str):
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=prompt)
    bench.engine.reset_prefix_cache()
    computed, _ = _ask(bench, prompt)
    cached, num_found = _ask(bench, prompt)
    scored = bench.engine.score([computed.token_ids])
    if not num_found:
        cause = f"the same prompt of {len(prompt.token_ids)} tokens twice: nothing was found in the prefix cache"
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=cause)
    bench.sync()
    fresh, num_stale = _ask(bench, prompt)
    bench.engine.reset_prefix_cache()
    rescored = bench.engine.score([computed.token_ids])
    gaps = {
        "computed against cached": gap_until_they_part(computed, cached),
        "before against after a sync of the same weights": gap_until_they_part(computed, fresh),
        "scored with a full against an empty cache": largest(scored, rescored),
        "sampled from the cache against scored anew": gap_to_scores(bench, [cached, fresh]),  # also where they part
    }
    return _verdict(bench, len(prompt.token_ids), (num_found, num_stale), gaps)


def _verdict(bench: Bench, num_tokens: int, hits: tuple[int, int], gaps: Mapping[str, float]) -> CheckResult:
    num_found, num_stale = hits
    band = Band.of_bench(bench, 1.0)
    measured = (
        f"{num_found} of {num_tokens} prompt tokens cached, {num_stale} after a sync; "
        f"cached against computed {gaps['computed against cached']:.2g}"
    )
    limit = f"0 after a sync; {band.reason}"
    evidence = tuple(f"{name}: max {size:.2g}" for name, size in gaps.items())
    numbers = {"num_cached": num_found, "num_stale": num_stale, **gaps}
    if num_stale:
        found = f"{num_stale} prompt tokens were answered from the cache of before the sync"
        return CheckResult(NAME, Verdict.FAIL, measured, limit, (found, *evidence), CAUSE, STEP, numbers=numbers)
    worst = max(gaps, key=lambda name: gaps[name])
    if not gaps[worst] <= band.fail_max:
        cause = f"the prefix cache changes log-probs: {worst} differ"
        return CheckResult(
            NAME, Verdict.FAIL, measured, limit, evidence, cause, "vllm.enable_prefix_caching = false", numbers=numbers
        )
    if gaps[worst] <= band.pass_max:
        return CheckResult(NAME, Verdict.PASS, measured, limit, evidence, numbers=numbers)
    return CheckResult(
        NAME, Verdict.WARN, measured, limit, evidence, f"rounding, or a cache that changes log-probs: {worst} differ",
        "model.dtype = float32 tells rounding from a fault; vllm.enable_prefix_caching = false", numbers=numbers,
    )  # fmt: skip


def _long_prompt(bench: Bench, about: Mapping[str, Any]) -> Prompt | str:
    """Two blocks of the cache and one token more, from the prompts of the rollout; a text where there is no room."""
    block, room = int(about["block_size"]), int(about["max_model_len"]) - RESPONSE_LEN
    wanted = 2 * block + 1
    if wanted > room:
        return f"two blocks of the cache are {2 * block} tokens, the context has room for a prompt of {room}"
    batch = bench.batch
    prompts = [
        batch.token_ids_T[start : start + length]
        for start, length in zip(batch.offsets[:-1], batch.prompt_lens_N, strict=True)
    ]
    return Prompt(0, np.resize(np.concatenate(prompts), wanted).astype(np.int32), "")


def _ask(bench: Bench, prompt: Prompt) -> tuple[Sample, int]:
    """One sample of the prompt, and how many of its tokens were found in the cache."""
    _, before = bench.engine.prefix_cache()
    ((sample,),) = bench.engine.generate([prompt], [[SEED]], {**PLAIN, "max_response_len": RESPONSE_LEN})
    return sample, bench.engine.prefix_cache()[1] - before


CHECK = Check(
    NAME,
    "8e",
    "the engine: prompts cached as computed, no cache across a sync",
    "a sync empties the prefix cache; cached and computed prompts have the same log-probs",
    run,
    is_live=True,
    explained_by=("weights", "buffers", "batch", "names"),
)
