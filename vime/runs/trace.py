"""What the trainer does with each rollout, seen at the seams: two wrappers that watch and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vime.config.load import value_of
from vime.config.names import settings
from vime.config.schema import Config
from vime.protocols import Trainer, WeightTransport
from vime.record.training import TrainingHeader, TrainingRecord, TrainingStep, rollout_digest
from vime.run_folder import versions
from vime.types import RolloutBatch, StepStats, TrainData, WeightManifest
from vime.weights.manifest import manifest_digest

LAYOUT = ("model.dtype", "train.max_tokens_per_micro_batch", "cluster.threads_per_trainer", "parallel.")
SETTINGS = ("algo.", "train.", "rollout.sampling.temperature", "megatron.")
IGNORED = ("train.step_timeout_seconds", "train.nan_policy")

SampleLosses = Callable[[], dict[str, tuple[float, int, int]]]
"""Of the last step, sample -> (share of the loss, trained tokens, data-parallel rank)."""


def layout_of(config: Config) -> dict[str, Any]:
    """Settings that say where and in which order the numbers are computed, but not which."""
    return {path: value_of(config, path) for path in settings() if path.startswith(LAYOUT)}


def settings_of(config: Config) -> dict[str, Any]:
    """Settings that the training step depends on, beside the layout."""
    named = (p for p in settings() if p.startswith(SETTINGS) and not p.startswith((*LAYOUT, *IGNORED)))
    return {path: value_of(config, path) for path in named}


@dataclass
class Trace:
    """Collects a ``TrainingRecord`` per rollout and hands it to ``done`` when the weights were carried on.

    after_step  called with (rollout id, number of the step in the rollout, its statistics)
    """

    config: Config
    sample_losses: SampleLosses
    done: Callable[[TrainingRecord], None]
    after_step: Callable[[int, int, StepStats], None] = lambda rollout_id, step, stats: None
    _open: TrainingRecord | None = None
    _advantages: list[np.ndarray] = field(default_factory=list)
    _losses: list[tuple[float, int, int]] = field(default_factory=list)
    _weights_before: str = ""
    _rollout_id: int = 0

    def begin(self, batch: RolloutBatch, log_probs_T: np.ndarray) -> None:
        header = TrainingHeader(
            layout=layout_of(self.config),
            settings=settings_of(self.config),
            library_versions=versions(),
            rollout_digest=rollout_digest(batch),
            weights_before=self._weights_before,
        )
        nothing = np.empty(0, np.float32)
        self._open = TrainingRecord(
            self._rollout_id, header, batch.offsets, log_probs_T, nothing, nothing, np.empty(0), np.empty(0, np.int32)
        )
        self._advantages, self._losses = [], []

    def referred(self, ref_log_probs_T: np.ndarray) -> None:
        assert self._open is not None
        self._open.ref_log_probs_T = ref_log_probs_T

    def stepped(self, data: TrainData, stats: StepStats) -> None:
        assert self._open is not None
        found = {} if stats.is_skipped else self.sample_losses()
        self._losses += [found.get(name, (0.0, 0, -1)) for name in data.sample_ids]
        self._advantages.append(data.advantages_T)
        step = TrainingStep(stats.loss, stats.grad_norm, stats.lr, stats.num_tokens, stats.is_skipped)
        self._open.steps.append(step)
        self.after_step(self._open.rollout_id, len(self._open.steps) - 1, stats)

    def synced(self, manifest: WeightManifest) -> None:
        self._weights_before = manifest_digest(manifest)
        self._rollout_id = manifest.version  # v rollouts are behind it; a record by a literal name has an id of its own
        record, self._open = self._open, None
        if record is None:  # the first sync comes before any training
            return
        record.advantages_T = np.concatenate(self._advantages)
        record.sample_losses_N = np.array([loss for loss, _, _ in self._losses], np.float64)
        record.dp_ranks_N = np.array([rank for _, _, rank in self._losses], np.int32)
        record.weights = {name: entry.digest for name, entry in manifest.tensors.items()}
        self.done(record)


@dataclass
class TracedTrainer:
    """A trainer that is watched."""

    inner: Trainer
    trace: Trace

    def log_probs(self, batch: RolloutBatch, of: str = "policy") -> np.ndarray:
        found = self.inner.log_probs(batch, of)
        if of == "policy":
            self.trace.begin(batch, found)
        else:
            self.trace.referred(found)
        return found

    def step(self, data: TrainData) -> StepStats:
        stats = self.inner.step(data)
        self.trace.stepped(data, stats)
        return stats

    def save(self, path: str, state: dict[str, Any]) -> None:
        self.inner.save(path, state)

    def load(self, path: str) -> dict[str, Any]:
        return self.inner.load(path)

    def export(self, path: str) -> None:
        self.inner.export(path)


@dataclass
class TracedTransport:
    """A transport whose manifests are seen."""

    inner: WeightTransport
    trace: Trace

    def sync(self, version: int) -> WeightManifest:
        manifest = self.inner.sync(version)
        self.trace.synced(manifest)
        return manifest
