"""The seams of vime: what the loop needs from its parts, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vime.types import Prompt, RolloutBatch, Sample, StepStats, TrainData, WeightManifest


class DataSource(Protocol):
    """Prompts in a reproducible order, epoch after epoch."""

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; wraps into the next epoch. ``group_id`` counts on for the whole run."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises VimeError if the state belongs to another dataset (fingerprint)."""


class Reward(Protocol):
    """Scores groups; a group is all samples of one prompt."""

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        """One score per sample of one group, in order, while others generate; None as in ``score``."""

    def score(self, groups: Sequence[Sequence[Sample]]) -> list[list[float | None]]:
        """One score per sample, in order; None where no verdict could be had (never trained on)."""

    def close(self) -> None: ...


class RolloutEngine(Protocol):
    """One inference engine. Token ids in, token ids and log-probs out; nothing is tokenised here."""

    async def generate(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        """One sample per seed, in order (``index`` 0, 1, ...). ``sampling`` replaces single fields of rollout.sampling.

        Raises PromptTooLong for this prompt alone.
        """

    async def pause(self) -> None:
        """Stop scheduling and drop every cached key and value; running requests are kept and go on after resume."""

    async def resume(self) -> None: ...

    async def abort(self) -> int:
        """Abort every running request; their samples return with status aborted. Returns how many."""


class Rollouts(Protocol):
    """Where rollouts come from: engines, or a record."""

    def produce(self, rollout_id: int) -> RolloutBatch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trainer(Protocol):
    """The learner, whatever its layout. All arrays are whole-batch and ragged; placement is the trainer's business."""

    def log_probs(self, batch: RolloutBatch, of: str = "policy") -> np.ndarray:
        """float32 [T] of the sampled tokens (temperature applied), 0.0 at each first token. ``of``: policy or ref."""

    def step(self, data: TrainData) -> StepStats: ...

    def save(self, path: str, state: dict[str, Any]) -> None: ...

    def load(self, path: str) -> dict[str, Any]: ...

    def export(self, path: str) -> None:
        """Write a Hugging Face folder."""


class WeightTransport(Protocol):
    """Carries the trainer's weights into every engine, as a transaction."""

    def sync(self, version: int) -> WeightManifest:
        """Engines generate with ``version`` on return. If names, shapes or dtypes differ: raises, no engine touched."""
