"""What a watched run leaves behind for a comparison: training records, gradients and weights, below one folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vime.cluster.trainer import RayTrainer
from vime.config.schema import Config
from vime.loop import Parts
from vime.record.template import template_path, training_template
from vime.record.training import TrainingRecord, read_training, write_training
from vime.runs.trace import Trace, TracedTrainer, TracedTransport
from vime.types import StepStats, WeightManifest


@dataclass(frozen=True)
class Trail:
    """``keeps_tensors``: gradients and weights are on disk; otherwise there are only the digests of the weights."""

    folder: Path
    keeps_tensors: bool

    def weights(self, version: int) -> Path:
        """After ``version`` rollouts."""
        return self.folder / f"weights_{version}"

    def gradients(self, rollout_id: int, step: int) -> Path:
        return self.folder / f"gradients_{rollout_id}_{step}"

    def put(self, record: TrainingRecord) -> None:
        write_training(self._record(record.rollout_id), record)

    def record(self, rollout_id: int) -> TrainingRecord | None:
        path = self._record(rollout_id)
        return read_training(path) if path.is_file() else None

    def _record(self, rollout_id: int) -> Path:
        return self.folder / f"data_{rollout_id}.train.pt"


@dataclass(frozen=True)
class RecordedTrail:
    """The training records beside the records of a run: no tensors."""

    template: str

    def record(self, rollout_id: int) -> TrainingRecord | None:
        path = template_path(training_template(self.template), rollout_id)
        return read_training(path) if path.is_file() else None


@dataclass
class FolderTransport:
    """Carries the weights into a folder instead of engines, or only digests them."""

    trainer: RayTrainer
    trail: Trail

    def sync(self, version: int) -> WeightManifest:
        folder = self.trail.weights(version) if self.trail.keeps_tensors else None
        return self.trainer.write_tensors("weights", folder, version)


def watched(parts: Parts, config: Config, trail: Trail) -> Parts:
    """The parts of a replay, which leave ``trail`` behind."""
    trainer = parts.trainer
    assert isinstance(trainer, RayTrainer), "only a replay is watched: it has a trainer of its own, and no engines"
    trail.folder.mkdir(parents=True)
    trace = Trace(config, trainer.sample_losses, trail.put)
    if trail.keeps_tensors and not config.parallel.distributed_optimizer:
        trace.after_step = _gradient_writer(trainer, trail)
    transport = TracedTransport(FolderTransport(trainer, trail), trace)
    return replace(parts, trainer=TracedTrainer(trainer, trace), transport=transport)


def _gradient_writer(trainer: RayTrainer, trail: Trail) -> Callable[[int, int, StepStats], None]:
    def write(rollout_id: int, step: int, stats: StepStats) -> None:
        if not stats.is_skipped:  # such a step has no gradient, or one that was refused
            trainer.write_tensors("gradients", trail.gradients(rollout_id, step), rollout_id)

    return write
