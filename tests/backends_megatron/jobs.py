"""What the tests run on real trainer processes. Everything returned is numpy or plain data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vime.config.schema import Config
from vime.types import RolloutBatch, Sample, StepStats, TrainData

VOCAB = 128
LENGTHS = (5, 17, 40, 64, 3, 29, 12)
PROMPT_LEN = 2


def config(path: Any, **sections: dict[str, Any]) -> Config:
    train = {"max_tokens_per_micro_batch": 70, "lr": 1e-3, "step_timeout_seconds": 60.0, **sections.pop("train", {})}
    algo = {"kl_coef": 0.1, "eps_clip_low": 0.05, "eps_clip_high": 0.05, **sections.pop("algo", {})}
    model = {"path": str(path), **sections.pop("model", {})}
    return Config.model_validate(
        {"model": model, "data": {"prompts": ["none.jsonl"]}, "train": train, "algo": algo, **sections}
    )


def batch(lengths: tuple[int, ...] = LENGTHS, vocab: int = VOCAB) -> RolloutBatch:
    rng = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(lengths):
        mask = (np.arange(length) >= PROMPT_LEN) & (rng.random(length) < 0.8)
        ids = rng.integers(0, vocab, length)
        samples.append(Sample(i, 0, ids, PROMPT_LEN, mask, np.zeros(length)))
    return RolloutBatch.from_samples(0, samples)


def train_data(rollout: RolloutBatch, log_probs: np.ndarray, seed: int = 3, **changes: Any) -> TrainData:
    """Advantages at random; old and reference log-probs a little off, so that some tokens clip."""
    rng = np.random.default_rng(seed)
    shape = log_probs.shape
    old = (log_probs + 0.08 * rng.normal(size=shape)).astype(np.float32)
    ref = (log_probs + 0.2 * rng.normal(size=shape)).astype(np.float32)
    fields: dict[str, Any] = {
        "offsets": rollout.offsets,
        "token_ids_T": rollout.token_ids_T,
        "loss_weight_T": rollout.loss_mask_T.astype(np.float32),
        "advantages_T": rng.normal(size=shape).astype(np.float32),
        "rollout_log_probs_T": old,
        "old_log_probs_T": old,
        "ref_log_probs_T": ref,
        "normalizer": float(rollout.loss_mask_T.sum()),
        "sample_ids": [f"{g}/{i}" for g, i in zip(rollout.group_ids_N, rollout.indices_N, strict=True)],
    }
    return TrainData(**{**fields, **changes})


@contextmanager
def trainer(settings: Config, rank: int, world_size: int, port: int) -> Iterator[Any]:
    from vime.backends.megatron.rank import MegatronRank

    made = MegatronRank(settings, rank, world_size, "127.0.0.1", port)
    try:
        yield made
    finally:
        made.close()


def log_probs(made: Any, rollout: RolloutBatch, of: str = "policy") -> np.ndarray:
    """float32 [T] of the whole batch, on every rank."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, made.log_probs(rollout, of))
    out = np.full(rollout.num_tokens, np.nan, np.float32)
    for rows, flat in filter(None, parts):
        at = 0
        for row in rows:
            a, b = rollout.offsets[row], rollout.offsets[row + 1]
            assert np.isnan(out[a:b]).all(), "one row on two ranks"
            out[a:b] = flat[at : at + b - a]
            at += b - a
        assert at == len(flat)
    assert not np.isnan(out).any(), "a row on no rank"
    return out


def arrays(named: Any) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, tensor in named:
        assert name not in out, f"{name} twice"
        assert tensor.is_contiguous()
        out[name] = tensor.float().numpy()
    return out


@dataclass
class Outcome:
    """One layout: log-probs, exported weights, a step on advantage 0, and a real step."""

    policy: np.ndarray
    ref: np.ndarray
    before: dict[str, np.ndarray]
    at_rest: StepStats
    stats: StepStats
    after: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    describe: dict[str, Any] = field(default_factory=dict)
    specs: list[Any] = field(default_factory=list)


def layout(rank: int, world_size: int, port: int, settings: Config, vocab: int, hf: np.ndarray) -> Outcome:
    """``hf``: log-probs from transformers, from which the step's data is made alike in every layout."""
    rollout = batch(vocab=vocab)
    with trainer(settings, rank, world_size, port) as made:
        policy, ref = log_probs(made, rollout), log_probs(made, rollout, "ref")
        before = arrays(made.named_weights())
        zero = np.zeros_like(policy)
        still = train_data(rollout, policy, advantages_T=zero, old_log_probs_T=policy, ref_log_probs_T=policy)
        at_rest = made.step(still)
        stats = made.step(train_data(rollout, hf))
        sharded = settings.parallel.distributed_optimizer
        return Outcome(
            policy,
            ref,
            before,
            at_rest,
            stats,
            arrays(made.named_weights()),
            {} if sharded else arrays(made.named_gradients()),
            made.describe(),
            made.weight_specs(),
        )
