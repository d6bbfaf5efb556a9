"""The RL loop over the protocols. Train, rollout-only and replay are this one loop with other parts.

rollout -> log-probs of policy and reference -> optimizer steps -> weights into the engines -> next rollout.
``rollout_id`` counts rollouts; weight version v is the policy after v rollouts have been trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vime.config.schema import Config
from vime.observe import Observer
from vime.protocols import Rollouts, Trainer, WeightTransport
from vime.train.steps import train_steps
from vime.types import RolloutBatch

Evaluate = Callable[[int], dict[str, RolloutBatch]]
Save = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True)
class Parts:
    """What the loop drives. No trainer: generation only. No transport: nothing to keep in step (replay)."""

    rollouts: Rollouts
    trainer: Trainer | None = None
    transport: WeightTransport | None = None
    evaluate: Evaluate | None = None
    save: Save | None = None


def run(config: Config, parts: Parts, observer: Observer, start: int = 0) -> None:
    """Rollouts ``start`` to ``run.num_rollouts``. Every engine holds the trainer's weights before it generates.

    Without a trainer the weights, and so every later evaluation, stay what they were: there is only the first.
    """
    sync(parts, observer, version=start)
    evaluate(parts, observer, start)
    for rollout_id in range(start, config.run.num_rollouts):
        with observer.rollout(rollout_id):
            with observer.phase("generate"):
                batch = parts.rollouts.produce(rollout_id)
            observer.produced(batch)
            if parts.trainer is not None:
                learn(config, parts, observer, batch)
                sync(parts, observer, version=rollout_id + 1)
        if parts.trainer is not None and is_due(rollout_id, config.eval.interval, config.run.num_rollouts):
            evaluate(parts, observer, rollout_id + 1)
        if parts.save is not None and is_due(rollout_id, config.checkpoint.save_interval, config.run.num_rollouts):
            with observer.phase("save"):
                state = {"next_rollout_id": rollout_id + 1, "rollouts": parts.rollouts.state_dict()}
                parts.save(rollout_id + 1, state)


def learn(config: Config, parts: Parts, observer: Observer, batch: RolloutBatch) -> None:
    """Two independent forwards, then ``num_steps_per_rollout`` optimizer steps."""
    assert parts.trainer is not None
    with observer.phase("log_probs"):
        old_log_probs_T = parts.trainer.log_probs(batch, "policy")
        ref_log_probs_T = parts.trainer.log_probs(batch, "ref") if config.uses_reference else None
    observer.scored(batch, old_log_probs_T, ref_log_probs_T)
    with observer.phase("train"):
        for data in train_steps(config, batch, old_log_probs_T, ref_log_probs_T):
            observer.stepped(parts.trainer.step(data))


def sync(parts: Parts, observer: Observer, version: int) -> None:
    if parts.transport is not None:
        with observer.phase("sync"):
            manifest = parts.transport.sync(version)
        observer.synced(manifest)


def evaluate(parts: Parts, observer: Observer, version: int) -> None:
    if parts.evaluate is not None:
        with observer.phase("eval"):
            batches = parts.evaluate(version)
        observer.evaluated(version, batches)


def is_due(rollout_id: int, interval: int, num_rollouts: int) -> bool:
    """After every ``interval`` rollouts and after the last; never for interval 0."""
    return interval > 0 and ((rollout_id + 1) % interval == 0 or rollout_id + 1 == num_rollouts)
