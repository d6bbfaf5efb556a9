"""A bench of hand-made facts, for the checks of weights, buffers and log-probs: one thing wrong at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from fakes import sample

from vime.align.bench import AS_THE_RUN, LoadedParameter
from vime.config.schema import Config
from vime.errors import VimeError
from vime.models import ModelSpec
from vime.types import RolloutBatch, Sample, TensorEntry, WeightManifest

SPEC = ModelSpec(
    family="qwen3", num_layers=4, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=1,
    head_dim=4, vocab_size=32, max_position_embeddings=64, rms_norm_eps=1e-6, is_tied=False, has_qkv_bias=False,
    has_qk_norm=True, rope={"rope_type": "default", "rope_theta": 1e4}, dtype="float32",
)  # fmt: skip


def config(**sections) -> Config:
    return Config.model_validate({"model": {"path": "none"}, "data": {"prompts": ["none.jsonl"]}} | sections)


def manifest(origin: str, changes: dict[str, TensorEntry | None] | None = None, spec=SPEC) -> WeightManifest:
    """One digest per name; ``changes``: other entries, or None for a tensor that is not there."""
    tensors: dict[str, TensorEntry | None] = {
        name: TensorEntry(name, shape, "float32", f"digest of {name}") for name, shape in spec.tensors().items()
    }
    tensors |= changes or {}
    return WeightManifest(0, origin, {name: entry for name, entry in tensors.items() if entry is not None})


def parameters(**changes) -> list[LoadedParameter]:
    """Two ranks with three parameters each; ``changes``: of the second parameter of rank 1."""
    names = ["embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc2.weight", "output_layer.weight"]
    found = [
        LoadedParameter(n, rank, f"{n}/{rank}", f"{n}/{rank}", f"initial {n}/{rank}", (f"hf {n}",))
        for rank in (0, 1)
        for n in names
    ]
    found[4] = replace(found[4], **changes)
    return found


class Words:
    """A tokenizer of one word per id."""

    def decode(self, ids, skip_special_tokens=False) -> str:
        return " ".join("<bos>" if i == 1 else f"w{i}" for i in np.atleast_1d(ids).tolist())


@dataclass
class FakeTrainer:
    found: list[LoadedParameter] = field(default_factory=parameters)
    exported: WeightManifest = field(default_factory=lambda: manifest("trainer"))
    attention: str = "torch SDPA"

    def accounting(self):
        return {"policy": ["none: 3 of 3 tensors loaded, 0 missing, 0 unexpected"]}

    def loaded(self):
        return self.found

    def manifest(self):
        return self.exported

    def describe(self):
        return {"attention": self.attention}

    def log_probs(self, batch, of="policy", how=None):
        return np.zeros(batch.num_tokens, np.float32)


@dataclass
class FakeEngine:
    """``lose``: level -> buffers that do not survive a sleep at it. ``wakes``: False, it refuses where one is lost.

    generates_asleep   it answers between a level-2 sleep and the next sync
    """

    sides: dict[str, tuple[WeightManifest, WeightManifest | None]] = field(default_factory=dict)
    held: WeightManifest = field(default_factory=lambda: manifest("engine-held"))
    lose: dict[int, list[str]] = field(default_factory=dict)
    wakes: bool = True
    generates_asleep: bool = False
    lost: list[str] = field(default_factory=list)
    level: int = 0
    has_weights: bool = True
    scored: float = 0.0  # log-prob of every token

    def manifests(self):
        return self.sides

    def manifest(self, view: str):
        return self.held

    def changed_buffers(self):
        return {"engine 0": [self.lost]}

    def sleep(self, level: int) -> None:
        self.level, self.has_weights = level, level == 1
        self.lost = self.lose.get(level, [])

    def wake(self) -> None:
        if self.lost and not self.wakes:
            raise VimeError(f"engine 0: buffers were lost or changed on rank 0: {', '.join(self.lost)}")

    def describe(self):
        return {"max_model_len": 16}

    def score(self, sequences, at_once=None):
        if not self.has_weights and not self.generates_asleep:
            raise VimeError("engine 0 holds no complete weights: it slept at level 2")
        return [np.full(len(ids), self.scored, np.float32) for ids in sequences]


@dataclass
class FakeBench:
    """``refusal``: what a sync raises. ``policy`` and ``ref``: log-probs of every sampled token, by its place."""

    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    engine: FakeEngine = field(default_factory=FakeEngine)
    config: Config = field(default_factory=config)
    spec: ModelSpec = SPEC
    checkpoint: WeightManifest = field(default_factory=lambda: manifest("checkpoint"))
    refusal: VimeError | None = None
    samples: list[Sample] = field(default_factory=lambda: [sample(i, prompt_len=3) for i in range(3)])
    policy: Callable[[int], float] = lambda at: -0.5
    ref: Callable[[int], float] | None = lambda at: -0.5
    is_live: bool = True
    check: str = ""
    folder: Path = Path("/nonexistent")
    tokenizer: Words = field(default_factory=Words)
    num_syncs: int = 0

    def sync(self) -> WeightManifest:
        if self.refusal is not None:
            raise self.refusal
        self.num_syncs += 1
        self.engine.has_weights = True
        return self.trainer.exported

    @property
    def synced(self) -> WeightManifest:
        return self.sync()

    @property
    def batch(self) -> RolloutBatch:
        return RolloutBatch.from_samples(0, self.samples)

    @property
    def log_probs_T(self) -> np.ndarray:
        return self._filled(self.policy)

    @property
    def ref_log_probs_T(self) -> np.ndarray | None:
        return None if self.ref is None else self._filled(self.ref)

    def _filled(self, value: Callable[[int], float]) -> np.ndarray:
        mask_T = self.batch.loss_mask_T
        return np.array([value(at) if mask_T[at] else 0.0 for at in range(len(mask_T))], np.float32)


def synced(**sides) -> FakeBench:
    """A bench whose sync is done: ``received`` and ``held`` of engine 0, as sent where not given."""
    bench = FakeBench()
    sent = bench.trainer.exported
    bench.engine.sides = {"engine 0": (sides.get("received", sent), sides.get("held", sent))}
    return bench


__all__ = ["AS_THE_RUN", "SPEC", "FakeBench", "FakeEngine", "FakeTrainer", "config", "manifest", "parameters", "synced"]
