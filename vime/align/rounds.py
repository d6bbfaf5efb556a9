"""What a round of ``vime align-check`` is made of: prompts asked again, rewards made up, parts of a step.

Axes as in ``vime.types``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from vime.align.bench import Bench
from vime.config.schema import Config
from vime.rollout.seeds import seed_for
from vime.train.packing import token_index
from vime.train.steps import train_steps
from vime.types import Prompt, RolloutBatch, TrainData

SHIFT = 0.5
"""Added to every advantage of a step: those of a group add up to 0, and where all its answers are equal, as those of a
model that is certain, their gradients cancel to rounding."""
MADE_UP = (
    f"advantages of the step: of rewards made up from a digest of each sample, and {SHIFT:g} more, so that each has a "
    "signal"
)
"""Said wherever numbers rest on ``step_data``."""


def step_data(
    config: Config, batch: RolloutBatch, log_probs_T: np.ndarray, ref_log_probs_T: np.ndarray | None
) -> TrainData:
    """The first step of the rollout, with a signal in every sample, whatever the run's own reward says."""
    data = train_steps(config, spread_rewards(batch), log_probs_T, ref_log_probs_T)[0]
    advantages_T = np.where(data.loss_weight_T != 0, data.advantages_T + np.float32(SHIFT), np.float32(0))
    return replace(data, advantages_T=advantages_T)


def spread_rewards(batch: RolloutBatch) -> RolloutBatch:
    """``batch`` with rewards in [0, 1) that differ inside every group.

    Each is a digest of group, index and tokens: the same in every layout and every time. (A small model answers alike,
    its rewards are then equal, its advantages 0, and no fault of a gradient can be seen.)
    """
    rewards_N = np.empty(len(batch))
    for row in range(len(batch)):
        tokens = batch.token_ids_T[batch.offsets[row] : batch.offsets[row + 1]]
        place = f"{batch.group_ids_N[row]}/{batch.indices_N[row]}".encode("ascii")
        digest = hashlib.blake2b(place + tokens.astype("<i4").tobytes(), digest_size=4).digest()
        rewards_N[row] = int.from_bytes(digest, "little") / 2**32
    return replace(batch, rewards_N=rewards_N)


def prompts_of(batch: RolloutBatch) -> list[Prompt]:
    """The prompts of a rollout, in its order."""
    found: dict[int, Prompt] = {}
    for sample in batch.samples():
        if sample.group_id not in found:
            ids = sample.token_ids[: sample.prompt_len]
            found[sample.group_id] = Prompt(sample.group_id, ids, sample.prompt_text, sample.label, sample.metadata)
    return list(found.values())


def generate(
    bench: Bench, batch: RolloutBatch, rollout_id: int, num_prompts: int | None = None, longest: int | None = None
) -> RolloutBatch:
    """The prompts of ``batch`` once more, with the seeds of rollout ``rollout_id``: what was cached for them is hit.

    One turn each, also where ``rollout.generate`` makes several. Rewards are 0. ``longest``: tokens of a response, if
    the run allows more.
    """
    prompts = prompts_of(batch)[:num_prompts]
    count = bench.config.rollout.num_samples_per_prompt
    seeds = [[seed_for(bench.config.run.seed, rollout_id, p.group_id, i) for i in range(count)] for p in prompts]
    own = bench.config.rollout.sampling
    limit = max(own.min_response_len, min(own.max_response_len, longest or own.max_response_len))
    changes = None if limit == own.max_response_len else {"max_response_len": limit}
    samples = [sample for group in bench.engine.generate(prompts, seeds, changes) for sample in group]
    for sample in samples:
        sample.reward = 0.0
    return RolloutBatch.from_samples(rollout_id, samples, batch.header)


def part_of(data: TrainData, num_samples: int) -> TrainData:
    """The first ``num_samples`` samples of a step as a step of their own; the normaliser shrinks with their tokens."""
    rows = np.arange(min(num_samples, len(data.sample_ids)))
    index = token_index(data.offsets, rows)
    columns = {
        name: getattr(data, name)[index]
        for name in ("token_ids_T", "loss_weight_T", "advantages_T", "rollout_log_probs_T", "old_log_probs_T")
    }
    share = float(columns["loss_weight_T"].sum()) / max(float(data.loss_weight_T.sum()), 1.0)
    return replace(
        data,
        offsets=data.offsets[: len(rows) + 1],
        ref_log_probs_T=None if data.ref_log_probs_T is None else data.ref_log_probs_T[index],
        normalizer=data.normalizer * share or 1.0,
        sample_ids=data.sample_ids[: len(rows)],
        **columns,
    )


def memory_of(bench: Bench) -> dict[str, Mapping[str, int]]:
    """Bytes by process and kind, of the trainer's ranks and of the engines where there are any."""
    return {**bench.trainer.memory(), **(bench.engine.memory() if bench.is_live else {})}
