"""Evaluation: the same prompts through the same engines and reward, with the sampling of ``[eval]``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from vime.config import schema
from vime.config.schema import Config
from vime.errors import VimeError
from vime.protocols import Reward, RolloutEngine
from vime.rollout.groups import GroupRunner, OnProgress
from vime.rollout.live import filled, load_generate
from vime.rollout.seeds import EVALUATION, seed_for
from vime.types import Prompt, RolloutBatch, RolloutHeader


def eval_data(config: Config) -> schema.Data:
    """The ``data`` section for the evaluation prompts: same columns, in file order."""
    return config.data.model_copy(update={"prompts": config.eval.prompts, "shuffle": False})


def evaluate(
    config: Config,
    prompts: Sequence[Prompt],
    engines: Sequence[RolloutEngine],
    reward: Reward,
    version: int,
    *,
    header: RolloutHeader | None = None,
    on_progress: OnProgress | None = None,
    import_paths: Sequence[str] = (),
) -> RolloutBatch:
    """All answers with weights ``version``; seeds do not change between evaluations. ``rollout_id`` is ``version``.

    Groups that get no answer are counted by cause in ``header.counts`` and not replaced. VimeError if none is left, or
    as in ``LiveRollouts.produce``.
    """
    runner = GroupRunner(config, engines, reward, load_generate(config, import_paths), on_progress)
    seed, n = config.run.seed, config.eval.num_samples_per_prompt
    seeds = [[seed_for(seed, EVALUATION, prompt.group_id, index) for index in range(n)] for prompt in prompts]
    sampling = {"temperature": config.eval.temperature}
    outcomes = asyncio.run(runner.run(prompts, seeds, sampling, config.rollout.timeout_seconds))
    dropped = Counter(o.dropped for o in outcomes if o.dropped is not None)
    samples = [sample for o in outcomes if o.dropped is None for sample in o.samples]
    if not samples:
        raise VimeError(f"evaluation: no prompt got an answer; left out: {dict(dropped)}")
    return RolloutBatch.from_samples(version, samples, filled(header or RolloutHeader(), samples, dropped, config))


def eval_statistics(batch: RolloutBatch) -> dict[str, float]:
    """eval/reward: mean over samples; eval/best_reward: mean over prompts of the best sample; lengths; shares."""
    group_ids = np.unique(batch.group_ids_N)
    best = [batch.rewards_N[batch.group_ids_N == group_id].max() for group_id in group_ids]
    return {
        "eval/reward": float(batch.rewards_N.mean()),
        "eval/best_reward": float(np.mean(best)),
        "eval/response_len": float(batch.response_lens_N.mean()),
        "eval/truncated_ratio": float(np.mean([row["status"] == "truncated" for row in batch.rows])),
        "eval/num_samples": len(batch),
        "eval/num_prompts": len(group_ids),
    }
