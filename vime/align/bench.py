"""What a check of ``vime align-check`` may ask: the live trainer, the live engine, and what they did so far.

The checks see these protocols only; ``vime.runs.bench`` fulfils them with real processes. A bench is lazy: what the
first check asks for is done once and kept, so that ``--only`` does no more than it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vime.config.schema import Config
from vime.errors import VimeError
from vime.models import ModelSpec
from vime.record.training import TrainingRecord
from vime.train.packing import token_index
from vime.types import Prompt, RolloutBatch, Sample, StepStats, TrainData, WeightManifest


@dataclass(frozen=True, slots=True)
class Forward:
    """How a forward pass of the trainer differs from the run's own. None: as the run.

    temperature                  divides the logits
    max_tokens_per_micro_batch   packs hold at most so many tokens; 1: every sample alone
    """

    temperature: float | None = None
    max_tokens_per_micro_batch: int | None = None


AS_THE_RUN = Forward()


@dataclass(frozen=True, slots=True)
class LoadedParameter:
    """One parameter on one rank after loading. ``expected``: digest of what the checkpoint has for it, worked out from
    the files anew; ``digest``: of what the parameter holds; ``initial``: of what it held before loading.
    """

    name: str  # global Megatron name
    rank: int
    digest: str
    expected: str
    initial: str
    sources: tuple[str, ...] = ()  # Hugging Face names
    of: str = "policy"  # or ref


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Experts that each token went to. layers: global ids [M]; experts_TMK int16, sorted along K.

    margins_TM   float32, how far the logit of the last expert chosen is above that of the next: near 0 it is a tie
    """

    layers: tuple[int, ...]
    experts_TMK: np.ndarray
    margins_TM: np.ndarray | None = None


def joined_routing(batch: RolloutBatch, parts: Sequence[tuple[np.ndarray, Routing]]) -> Routing:
    """One routing of the whole batch from those of (rows of the batch, some layers), whoever answered for them."""
    layers = sorted({layer for _, routing in parts for layer in routing.layers})
    width = parts[0][1].experts_TMK.shape[2]
    experts_TMK = np.full((batch.num_tokens, len(layers), width), -1, np.int16)
    margins_TM = np.full((batch.num_tokens, len(layers)), np.nan, np.float32)
    for rows, routing in parts:
        where_M = np.array([layers.index(layer) for layer in routing.layers], np.int64)
        place = np.ix_(token_index(batch.offsets, rows), where_M)
        experts_TMK[place] = routing.experts_TMK
        if routing.margins_TM is not None:
            margins_TM[place] = routing.margins_TM
    return Routing(tuple(layers), experts_TMK, margins_TM)


class TrainerSide(Protocol):
    """All ranks of one trainer; every call is a collective."""

    def accounting(self) -> Mapping[str, Sequence[str]]:
        """By model (policy, reference), what loading said about each tensor of the folder, in lines."""

    def loaded(self) -> list[LoadedParameter]:
        """Every parameter of policy and reference on every rank, against the files of its folder. Before any step."""

    def manifest(self) -> WeightManifest:
        """Digests and norms of the exported weights under their Hugging Face names."""

    def log_probs(self, batch: RolloutBatch, of: str = "policy", how: Forward = AS_THE_RUN) -> np.ndarray:
        """float32 [T] of the sampled tokens, nats, 0.0 at each first token. ``of``: policy or ref."""

    def outputs(self, token_ids: np.ndarray, points: Sequence[str], of: str = "policy") -> Mapping[str, np.ndarray]:
        """float32 [L, width] of the named points (``vime.align.points``) in one forward of one sequence."""

    def routing(self, batch: RolloutBatch) -> Routing:
        """UsageError for a model without experts."""

    def step(self, data: TrainData) -> StepStats: ...

    def sample_losses(self) -> Mapping[str, tuple[float, int, int]]:
        """Of the last step, sample -> (its share of the loss, trained tokens, data-parallel rank that trained it)."""

    def write_tensors(self, of: str, folder: Path | None, version: int) -> WeightManifest:
        """Digests of the ``weights``, or of the ``gradients`` of the last step; ``folder``: written there too."""

    def memory(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes by process and kind, see ``device.memory``."""

    def save(self, path: str, state: dict[str, Any]) -> None: ...

    def load(self, path: str) -> dict[str, Any]: ...

    def describe(self) -> Mapping[str, Any]:
        """What is really running: layers, attention backend, dtypes, layout."""

    def plant(self, fault: str) -> str:
        """Plant a fault of ``vime.align.faults``; returns in words what was changed."""

    def heal(self) -> None:
        """Undo what was planted: weights, optimizer and reference as they were before."""


class EngineSide(Protocol):
    """The engines; where one answers for all it is the first. Answers do not return before all are there."""

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Mapping[str, Any] | None = None
    ) -> list[list[Sample]]:
        """Samples of every prompt, one per seed; all requests at once."""

    def score(self, sequences: Sequence[np.ndarray], at_once: int | None = None) -> list[np.ndarray]:
        """float32 [L] log-probs of each sequence at temperature 1 by a fresh forward, ``at_once`` of them together."""

    def manifest(self, view: str) -> WeightManifest:
        """``engine-received`` (of the last sync) or ``engine-held``. UsageError where no worker holds whole tensors."""

    def held(self) -> Mapping[str, WeightManifest]:
        """By engine, what it holds at this moment. UsageError as for ``manifest``."""

    def manifests(self) -> Mapping[str, tuple[WeightManifest, WeightManifest | None]]:
        """Of the last sync, by engine: what it received and, where that was read back, what it held after it."""

    def changed_buffers(self) -> Mapping[str, list[list[str]]]:
        """By engine and rank, the buffers that are not what they were when the engine started."""

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...

    def prefix_cache(self) -> tuple[int, int]:
        """Prompt tokens so far, and how many of them were found in the prefix cache."""

    def reset_prefix_cache(self) -> None: ...

    def outputs(self, token_ids: np.ndarray, points: Sequence[str]) -> Mapping[str, np.ndarray]:
        """As ``TrainerSide.outputs``."""

    def routing(self, batch: RolloutBatch) -> Routing: ...

    def memory(self) -> Mapping[str, Mapping[str, int]]: ...

    def describe(self) -> Mapping[str, Any]:
        """Sampling options in effect with origins, log-prob mode, dtypes (weights, head), caching, versions."""

    def plant(self, fault: str) -> str: ...

    def heal(self) -> None:
        """Undo what was planted, but for weights, which the next sync carries."""


class Unavailable(VimeError):
    """A fact of the bench that failed for an earlier check; what rests on it is NOT TESTED."""


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """One optimizer step of the walk, with what went before and after.

    batch            the rollout, sampled by the engine with the trainer's weights before the step
    log_probs_T, ref_log_probs_T   before the step
    data             of the step; its advantages are made up, see ``rounds.step_data``
    gradients        folder of the gradients (Hugging Face names, safetensors); None where they cannot be read
    before, after    the trainer's weights
    memory           by phase of this round (sync, generate, log_probs, train), bytes by process and kind
    again_T          the policy's log-probs in another forward of their own, before the step
    record           the step as a training record: each sample's share of the loss, and who trained it
    refused          why the trainer refused the step; its weights are unchanged then, and there are no gradients
    held             what the first engine held while it generated, or the first that held other tensors than were sent;
                     None where no worker holds whole tensors
    cached           prompt tokens of the rollout, and how many of them were found in the prefix cache
    rescored         where the engine's log-probs were far from the trainer's: mean |engine - trainer| of the worst
                     samples as sampled, and as scored anew without the prefix cache, nats
    """

    batch: RolloutBatch
    log_probs_T: np.ndarray
    ref_log_probs_T: np.ndarray | None
    data: TrainData
    stats: StepStats
    gradients: Path | None
    before: WeightManifest
    after: WeightManifest
    memory: Mapping[str, Mapping[str, Mapping[str, int]]]
    again_T: np.ndarray | None = None
    record: TrainingRecord | None = None
    refused: str = ""
    held: WeightManifest | None = None
    cached: tuple[int, int] = (0, 0)
    rescored: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OneProcess:
    """The first step once more, of the same weights and data, by other processes. ``layout``: which, in words.

    before, record, gradients   as in ``Learned``
    """

    layout: str
    before: WeightManifest
    record: TrainingRecord
    gradients: Path | None


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """A checkpoint was saved, training went on, the checkpoint was loaded, the engines lost their weights and got new.

    saved, moved, loaded   the trainer's weights when it saved, before it loaded, and after it loaded
    refusal      what the engine said when it was asked to generate before the sync; "" where it generated
    held         as in ``Learned``, after the sync
    batch        the first rollout after the sync; log_probs_T: of the trainer
    scored       the batch of which the following are log-probs, before saving and after loading
    policy_T, policy_after_T, ref_T, ref_after_T
    state, state_after   the run's own state, as handed to save and as load returned it
    """

    checkpoint: Path
    saved: WeightManifest
    moved: WeightManifest
    loaded: WeightManifest
    refusal: str
    held: WeightManifest | None
    batch: RolloutBatch
    log_probs_T: np.ndarray
    scored: RolloutBatch
    policy_T: np.ndarray
    policy_after_T: np.ndarray
    ref_T: np.ndarray | None
    ref_after_T: np.ndarray | None
    state: Mapping[str, Any]
    state_after: Mapping[str, Any]


class Bench(Protocol):
    """Everything a check may use. Properties are computed once, in the order of the walk, and raise ``Unavailable``
    if an earlier check met their failure already.
    """

    folder: Path  # scratch, removed at the end
    is_live: bool  # False: --from-record, there is no engine and no rollout but the recorded one
    check: str  # the check that runs at this moment; the walk sets it

    @property
    def config(self) -> Config: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def trainer(self) -> TrainerSide: ...

    @property
    def engine(self) -> EngineSide: ...

    @property
    def checkpoint(self) -> WeightManifest:
        """The tensors of model.path in the trainer's dtype."""

    @property
    def synced(self) -> WeightManifest:
        """The first sync, trainer -> engines (version 0): the trainer's manifest."""

    def sync(self) -> WeightManifest:
        """The trainer's present weights into the engines once more; the trainer's manifest."""

    @property
    def batch(self) -> RolloutBatch:
        """A real rollout with the synced weights and the run's sampling options, or the recorded one."""

    @property
    def log_probs_T(self) -> np.ndarray:
        """The policy's, of ``batch``."""

    @property
    def ref_log_probs_T(self) -> np.ndarray | None: ...

    @property
    def first(self) -> Learned:
        """The first optimizer step, on ``batch``."""

    @property
    def second(self) -> Learned:
        """Sync, a second rollout, the second step."""

    def reference_gradients(self) -> OneProcess:
        """The first step in a layout of one process; where the run's is one already, packed otherwise."""

    def resumed(self) -> Resumed:
        """Save after the second step, go on, load again, sync. Trainer and engines have the checkpoint then."""

    def say(self, text: str) -> None: ...
