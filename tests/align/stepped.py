"""A bench whose steps are made by hand: two weights, two samples, one number wrong at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from fakes import sample
from safetensors.torch import save_file

from vime.align.bench import Learned, OneProcess, Resumed
from vime.align.rounds import step_data
from vime.config.schema import Config
from vime.record.training import TrainingHeader, TrainingRecord, TrainingStep
from vime.types import RolloutBatch, StepStats, TensorEntry, WeightManifest

NAMES = ("model.embed_tokens.weight", "model.norm.weight")
DENSE = SimpleNamespace(num_layers=4, num_experts=0)
TOKENIZER = SimpleNamespace(decode=lambda ids, **_: "".join(f"<{i}>" for i in ids))
REFUSAL = "engine 0 holds no complete weights"
MB = 1 << 20


def config_of(dtype: str = "float32", **sections) -> Config:
    base = {
        "model": {"path": "/model", "dtype": dtype},
        "data": {"prompts": ["a.jsonl"]},
        "rollout": {"rollout_batch_size": 2, "num_samples_per_prompt": 2},
        "parallel": {"dp": 2},
    }
    return Config.model_validate({**base, **sections})


def manifest(version: int, *values: str, dtype: str = "float32") -> WeightManifest:
    """Weights with these digests."""
    entries = {n: TensorEntry(n, (2, 2), dtype, v) for n, v in zip(NAMES, values or ("a0", "b0"), strict=True)}
    return WeightManifest(version, "trainer", entries)


def rollout(rollout_id: int, version: int, gap: float = 1e-7) -> tuple[RolloutBatch, np.ndarray]:
    """Four samples of five sampled tokens, and what the trainer says of them."""
    samples = [
        sample(g, i, response=(5, 6, 7, 8, 3 + i), log_probs=np.array([-1, -2, -1, -0.5, -1]) - gap, reward=0.0)
        for g in (0, 1)
        for i in (0, 1)
    ]
    for one in samples:
        one.weight_version_min = one.weight_version_max = version
    batch = RolloutBatch.from_samples(rollout_id, samples)
    own_T = np.where(batch.loss_mask_T, batch.rollout_log_probs_T + np.float32(gap), 0.0)
    return batch, own_T.astype(np.float32)


def record_of(data, log_probs_T, losses=None, grad_norm: float = 2.0) -> TrainingRecord:
    shares = np.array([0.4, -0.1, -0.4, 0.1]) if losses is None else np.array(losses)
    ranks = np.array([0, 1, 0, 1], np.int32)
    steps = [TrainingStep(float(shares.sum()), grad_norm, 1e-6, 20)]
    return TrainingRecord(
        0, TrainingHeader(), data.offsets, log_probs_T, log_probs_T, data.advantages_T, shares, ranks, steps
    )


def gradients(folder: Path, scale: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    tensors = {NAMES[0]: torch.tensor([[1.0, 2.0], [3.0, 4.0]]), NAMES[1]: scale * torch.ones(2, 2)}
    save_file(tensors, folder / "00000.safetensors")
    return folder


METRICS = {"train/ppo_kl_abs": 0.0, "train/kl_loss": 0.0, "train/ppo_kl": 0.0}


def learned(config: Config, folder: Path, rollout_id: int, version: int, **changes) -> Learned:
    """A clean step from ``version`` on."""
    batch, own_T = rollout(rollout_id, version, changes.pop("gap", 1e-7))
    data = step_data(config, batch, own_T, own_T)
    held = {process: {"rss": 400 * MB} for process in ("trainer rank 0", "trainer rank 1", "engine 0")}
    clean = {
        "batch": batch,
        "log_probs_T": own_T,
        "ref_log_probs_T": own_T,
        "data": data,
        "stats": StepStats(0.0, 2.0, 1e-6, 20, 0.1, dict(METRICS)),
        "gradients": gradients(folder / f"gradients_{rollout_id}"),
        "before": manifest(version, f"a{version}", f"b{version}"),
        "after": manifest(version + 1, f"a{version + 1}", f"b{version + 1}"),
        "memory": dict.fromkeys(("sync", "generate", "log_probs", "train"), held),
        "again_T": own_T,
        "record": record_of(data, own_T),
        "held": manifest(version, f"a{version}", f"b{version}"),
        "cached": (40, 0),
    }
    return Learned(**{**clean, **changes})


@dataclass
class StepTrainer:
    """Keeps books; ``leak`` and ``noise``: what a step adds to the memory of rank 1, in bytes."""

    version: int = 1
    leak: int = 0
    noise: tuple[int, ...] = (0,)
    grad_norm: float = 0.0
    moves: bool = False
    skips: bool = True
    steps: list = field(default_factory=list)
    held: dict = field(default_factory=lambda: {"trainer rank 0": 400 * MB, "trainer rank 1": 400 * MB})

    def log_probs(self, batch, of="policy", how=None):
        return np.where(batch.loss_mask_T, batch.rollout_log_probs_T, 0.0).astype(np.float32)

    def manifest(self):
        return manifest(self.version, f"a{self.version}", f"b{self.version}")

    def step(self, data):
        self.steps.append(data)
        self.held["trainer rank 1"] += self.leak
        is_skipped = self.skips and not np.any(data.advantages_T)
        self.version += int(self.moves or not is_skipped)
        return StepStats(0.0, self.grad_norm, 1e-6, 20, 0.1, is_skipped=is_skipped, skip_reason="no signal")

    def memory(self):
        jump = self.noise[len(self.steps) % len(self.noise)]
        return {process: {"rss": held + jump} for process, held in self.held.items()}


@dataclass
class StepEngine:
    def generate(self, prompts, seeds, sampling=None):
        return [
            [sample(p.group_id, i, reward=None) for i, _ in enumerate(s)] for p, s in zip(prompts, seeds, strict=True)
        ]

    def memory(self):
        return {"engine 0": {"rss": 1400 * MB}}


@dataclass
class Stepped:
    """``vime.align.bench.Bench`` as far as the checks of steps ask for it. Clean until something is replaced."""

    folder: Path
    config: Config
    spec: object = field(default_factory=lambda: DENSE)
    tokenizer: object = field(default_factory=lambda: TOKENIZER)
    is_live: bool = True
    said: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = learned(self.config, self.folder, 0, 0)
        self.second = learned(self.config, self.folder, 1, 1)
        self.trainer, self.engine = StepTrainer(), StepEngine()
        other = gradients(self.folder / "one_process")
        self.other = OneProcess("one process", self.first.before, self.first.record, other)
        batch, own_T = rollout(2, 2)
        at, on = manifest(2, "a2", "b2"), manifest(3, "a3", "b3")
        self.found = Resumed(
            self.folder, at, on, at, REFUSAL, at, batch, own_T, batch, own_T, own_T, own_T, own_T, {"n": 1}, {"n": 1}
        )

    def change_first(self, **changes) -> None:
        self.first = replace(self.first, **changes)

    def change_second(self, **changes) -> None:
        self.second = replace(self.second, **changes)

    def reference_gradients(self) -> OneProcess:
        return self.other

    def resumed(self) -> Resumed:
        return self.found

    def sync(self) -> WeightManifest:
        return self.trainer.manifest()

    def say(self, text: str) -> None:
        self.said.append(text)


def stepped(folder: Path, dtype: str = "float32", **sections) -> Stepped:
    return Stepped(folder, config_of(dtype, **sections))
