"""Evaluation: every set of prompts through the same engines and reward, with its own sampling.

The plain set of ``eval.prompts`` is called "eval"; those of ``[eval.sets.NAME]`` have names of their own.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vime.config import schema
from vime.config.schema import Config
from vime.errors import VimeError
from vime.protocols import Reward, RolloutEngine
from vime.rollout.groups import GroupRunner, OnProgress
from vime.rollout.live import HINTS, filled, is_to_be_seen, load_generate
from vime.rollout.seeds import EVALUATION, seed_for
from vime.rollout.statistics import dropped_groups
from vime.types import Prompt, RolloutBatch, RolloutHeader

PLAIN = "eval"
"""The set of ``eval.prompts``."""
SAMPLING = ("temperature", "top_p", "top_k", "max_response_len")
"""Options of a set that replace those of ``rollout.sampling``."""


def eval_data(config: Config, name: str = PLAIN) -> schema.Data:
    """The ``data`` section for the prompts of one set: same columns, in file order."""
    return config.data.model_copy(update={"prompts": config.evaluation_sets[name].prompts, "shuffle": False})


def evaluate(
    config: Config,
    prompts: Mapping[str, Sequence[Prompt]],
    engines: Sequence[RolloutEngine],
    reward: Reward,
    version: int,
    *,
    header: RolloutHeader | None = None,
    on_progress: OnProgress | None = None,
    import_paths: Sequence[str] = (),
) -> dict[str, RolloutBatch]:
    """All answers of each set with weights ``version``, one set after the other. ``rollout_id`` is ``version``.

    ``prompts``: by the name of the set. Seeds do not change between evaluations. Groups that get no answer are counted
    by cause in ``header.counts`` and not replaced. VimeError if none is left in a set, or as in
    ``LiveRollouts.produce``.
    """
    runner = GroupRunner(config, engines, reward, load_generate(config, import_paths), on_progress)
    header = header or RolloutHeader()
    return {name: _evaluate(config, name, asked, runner, version, header) for name, asked in prompts.items()}


def _evaluate(
    config: Config, name: str, prompts: Sequence[Prompt], runner: GroupRunner, version: int, header: RolloutHeader
) -> RolloutBatch:
    wanted = config.evaluation_sets[name]
    sampling: dict[str, Any] = {option: getattr(wanted, option) for option in SAMPLING}
    indices = range(wanted.num_samples_per_prompt or 1)
    seeds = [[seed_for(config.run.seed, EVALUATION, prompt.group_id, index) for index in indices] for prompt in prompts]
    outcomes = asyncio.run(runner.run(prompts, seeds, sampling, config.rollout.timeout_seconds))
    causes_of = [None if is_to_be_seen(o, config) else o.dropped for o in outcomes]
    dropped = Counter(cause for cause in causes_of if cause is not None)
    samples = [s for o, cause in zip(outcomes, causes_of, strict=True) if cause is None for s in o.samples]
    if not samples:
        causes = ", ".join(f"{cause} {n}" for cause, n in dropped.most_common())
        text = f"evaluation{of_set(name)}: none of {len(prompts)} prompts got an answer; left out: {causes}"
        raise VimeError(text, next((HINTS[cause] for cause, _ in dropped.most_common(1)), None))
    origins = header.sampling_origin | _origins(config, name)
    header = replace(header, sampling=header.sampling | sampling, sampling_origin=origins)
    return RolloutBatch.from_samples(version, samples, filled(header, samples, dropped, config))


def _origins(config: Config, name: str) -> dict[str, str]:
    own = config.eval.sets.get(name)
    table = {option: f"eval.sets.{name}" for option in SAMPLING if getattr(own, option, None) is not None}
    return {"temperature": "eval.temperature"} | {option: f"{where}.{option}" for option, where in table.items()}


def of_set(name: str) -> str:
    """How messages tell the named sets from the plain one."""
    return "" if name == PLAIN else f" of {name}"


def eval_metrics(name: str, found: Mapping[str, float]) -> dict[str, float]:
    """``eval_statistics`` as metrics: ``eval/METRIC`` of the plain set, ``eval/NAME/METRIC`` of the others."""
    prefix = "eval/" if name == PLAIN else f"eval/{name}/"
    return {prefix + metric: value for metric, value in found.items()}


def eval_statistics(batch: RolloutBatch, pass_reward: float = 1.0) -> dict[str, float]:
    """Numbers of one set.

    reward: mean over scored samples; best_reward: mean over prompts of the best sample; pass_at_K: see ``pass_at_k``,
    mean over prompts; response_len: tokens; truncated_ratio; num_samples, num_prompts; dropped/CAUSE: prompts left out.
    Means over nothing (no sample has a reward) are NaN.
    """
    rewards_N = batch.rewards_N
    groups = [rewards_N[batch.group_ids_N == group_id] for group_id in np.unique(batch.group_ids_N)]
    best = [float(np.nanmax(rewards)) for rewards in groups if not np.isnan(rewards).all()]
    found: dict[str, float] = {
        "reward": _mean(rewards_N[~np.isnan(rewards_N)]),
        "best_reward": _mean(best),
        "response_len": float(batch.response_lens_N.mean()),
        "truncated_ratio": float(np.mean([row["status"] == "truncated" for row in batch.rows])),
        "num_samples": len(batch),
        "num_prompts": len(groups),
    }
    passed = [(len(rewards), int((rewards >= pass_reward).sum())) for rewards in groups]
    for k in powers_of_two(min(n for n, _ in passed)):
        found[f"pass_at_{k}"] = _mean([pass_at_k(n, c, k) for n, c in passed])
    return found | {f"dropped/{cause}": n for cause, n in dropped_groups(batch).items()}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of ``k`` samples passes, estimated without bias from ``n`` samples of which ``c`` pass.

    1 - C(n-c, k) / C(n, k), the share of the choices of k of the n samples that hold one that passes (Chen et al. 2021,
    "Evaluating large language models trained on code", eq. 1), as a product of ratios: no large number occurs.
    ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k of n = {n}, c = {c}, k = {k}: must be 0 <= c <= n and 1 <= k <= n")
    if k == 1:
        return c / n
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to ``limit``."""
    return [1 << i for i in range(limit.bit_length())]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan
