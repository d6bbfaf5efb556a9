"""One fake per protocol, for unit tests of our own code. Everything they do is scripted and deterministic.

FakeTrainer and FakeTransport only keep books (what was asked, in which order); they compute nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vime.types import Prompt, RolloutBatch, Sample, Status, StepStats, TrainData, WeightManifest

Script = Callable[[Prompt, int, int], Sample]
"""(prompt, index, seed) -> sample; may raise."""


def prompt(group_id: int, length: int = 2, label: str | None = "1") -> Prompt:
    """``length`` tokens, each equal to the group id."""
    return Prompt(group_id, np.full(length, group_id, dtype=np.int32), f"prompt {group_id}", label)


def sample(
    group_id: int = 0,
    index: int = 0,
    *,
    prompt_len: int = 2,
    response: Sequence[int] = (5, 6),
    log_probs: Sequence[float] | None = None,
    **changes: Any,
) -> Sample:
    """A sample whose prompt tokens equal its group id; log-probs are -0.5 each unless given."""
    tokens = [group_id] * prompt_len + list(response)
    values = [-0.5] * len(response) if log_probs is None else list(log_probs)
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=np.array(tokens),
        prompt_len=prompt_len,
        loss_mask=np.array([False] * prompt_len + [True] * len(response)),
        rollout_log_probs=np.array([0.0] * prompt_len + values),
        **changes,
    )


def answer(prompt: Prompt, index: int, seed: int) -> Sample:
    """The default script: the answer is the seed's last digits, as token ids and as text."""
    response = [int(d) for d in str(seed)[-4:]]
    return sample(prompt.group_id, index, prompt_len=len(prompt.token_ids), response=response, text=str(seed))


@dataclass
class FakeEngine:
    """RolloutEngine that answers by ``script``; group g answers after ``delays[g]`` seconds."""

    script: Script = answer
    delays: Mapping[int, float] = field(default_factory=dict)
    requests: list[tuple[int, list[int], dict[str, Any]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    is_paused: bool = False

    async def generate(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        self.requests.append((prompt.group_id, list(seeds), dict(sampling or {})))
        try:
            await asyncio.sleep(self.delays.get(prompt.group_id, 0.0))
        except asyncio.CancelledError:
            self.cancelled.append(prompt.group_id)
            raise
        return [self.script(prompt, index, seed) for index, seed in enumerate(seeds)]

    async def pause(self) -> None:
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False

    async def abort(self) -> int:
        return 0


@dataclass
class FakeDataSource:
    """DataSource that counts: prompt g has the label g % 10 and ``lengths.get(g, 2)`` tokens."""

    lengths: Mapping[int, int] = field(default_factory=dict)
    next_group_id: int = 0

    def take(self, n: int) -> list[Prompt]:
        ids = range(self.next_group_id, self.next_group_id + n)
        self.next_group_id += n
        return [prompt(i, self.lengths.get(i, 2), str(i % 10)) for i in ids]

    def state_dict(self) -> dict[str, Any]:
        return {"next_group_id": self.next_group_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_group_id = state["next_group_id"]


@dataclass
class FakeReward:
    """Reward by ``function`` of a sample; its index in the group unless given."""

    function: Callable[[Sample], float | None] = lambda sample: float(sample.index)
    scored: list[int] = field(default_factory=list)
    is_closed: bool = False

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        self.scored += [s.group_id for s in samples[:1]]
        return [self.function(s) if s.status.is_trainable else None for s in samples]

    def score(self, groups: Sequence[Sequence[Sample]]) -> list[list[float | None]]:
        async def score_all() -> list[list[float | None]]:
            return [await self.score_group(group) for group in groups]

        return asyncio.run(score_all())

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeTrainer:
    """Trainer whose policy and reference agree with the engine: log-probs are those of the rollout."""

    steps: list[TrainData] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    saved: dict[str, dict[str, Any]] = field(default_factory=dict)

    def log_probs(self, batch: RolloutBatch, of: str = "policy") -> np.ndarray:
        self.calls.append(f"log_probs {of}")
        return batch.rollout_log_probs_T.copy()

    def step(self, data: TrainData) -> StepStats:
        self.calls.append("step")
        self.steps.append(data)
        return StepStats(loss=0.0, grad_norm=1.0, lr=1e-6, num_tokens=len(data.token_ids_T), seconds=0.0)

    def save(self, path: str, state: dict[str, Any]) -> None:
        self.calls.append("save")
        self.saved[path] = state

    def load(self, path: str) -> dict[str, Any]:
        return self.saved[path]

    def export(self, path: str) -> None:
        self.calls.append("export")


@dataclass
class FakeTransport:
    """WeightTransport that remembers the versions it carried."""

    versions: list[int] = field(default_factory=list)

    def sync(self, version: int) -> WeightManifest:
        self.versions.append(version)
        return WeightManifest(version, "engine-held", {})


def aborted(prompt: Prompt, index: int, seed: int) -> Sample:
    """A script whose sample 2 of each group is aborted."""
    status = Status.ABORTED if index == 2 else Status.COMPLETED
    return sample(prompt.group_id, index, prompt_len=len(prompt.token_ids), status=status)
