"""The nouns of vime. Read this file first, then ``protocols`` and ``loop``.

Axes: T tokens of all samples one after the other (ragged), N samples, B samples of one micro-batch, L tokens of one
sample, P tokens of a prompt. Per-token data aligns with ``token_ids``: the log-prob at index t is that of token t given
the tokens before it; index 0 of a sample has none and holds 0.0. Log-probs are in nats. numpy only, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np


class Status(StrEnum):
    """How the generation of a sample ended."""

    COMPLETED = "completed"  # the model produced a stop id
    TRUNCATED = "truncated"  # length limit reached
    ABORTED = "aborted"  # stopped from outside; never trained on
    FAILED = "failed"  # the engine or the reward gave no answer; never trained on

    @property
    def is_trainable(self) -> bool:
        return self in (Status.COMPLETED, Status.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenised. ``group_id`` is unique in the run; ``token_ids`` is int32 [P]."""

    group_id: int
    token_ids: np.ndarray
    text: str
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Sample:
    """One answer to one prompt, as the engine sampled it.

    token_ids          int32 [L], prompt and response
    prompt_len         number of leading prompt tokens
    loss_mask          bool [L], True where the policy sampled the token
    rollout_log_probs  float32 [L], log-prob under the distribution sampled from (after temperature); 0.0 off mask
    reward             None until scored
    seed               seed sent to the engine for this sample
    weight_version_*   smallest and largest version of the weights that produced the response tokens
    """

    group_id: int
    index: int
    token_ids: np.ndarray
    prompt_len: int
    loss_mask: np.ndarray
    rollout_log_probs: np.ndarray
    text: str = ""
    prompt_text: str = ""
    label: str | None = None
    reward: float | None = None
    status: Status = Status.COMPLETED
    seed: int = 0
    weight_version_min: int = 0
    weight_version_max: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_ids = np.ascontiguousarray(self.token_ids, dtype=np.int32)
        self.loss_mask = np.ascontiguousarray(self.loss_mask, dtype=bool)
        self.rollout_log_probs = np.ascontiguousarray(self.rollout_log_probs, dtype=np.float32)
        self.status = Status(self.status)
        lengths = {
            "token_ids": len(self.token_ids),
            "loss_mask": len(self.loss_mask),
            "rollout_log_probs": len(self.rollout_log_probs),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{self.name}: unequal lengths {lengths}")
        if not 0 < self.prompt_len <= len(self.token_ids):
            raise ValueError(f"{self.name}: prompt_len {self.prompt_len} outside 1..{len(self.token_ids)}")
        if self.loss_mask[: self.prompt_len].any():
            raise ValueError(f"{self.name}: loss_mask is True inside the prompt")
        if self.status.is_trainable and not np.isfinite(self.rollout_log_probs).all():
            at = int(np.flatnonzero(~np.isfinite(self.rollout_log_probs))[0])
            raise ValueError(f"{self.name}: rollout_log_probs[{at}] is {self.rollout_log_probs[at]}")

    @property
    def name(self) -> str:
        """How messages call this sample."""
        return f"sample {self.group_id}/{self.index}"

    @property
    def response_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class RolloutHeader:
    """What must be known to trust, or repeat, a rollout. Every field is plain data (it is written as is)."""

    schema_version: int = 2
    vime_version: str = ""
    config_digest: str = ""
    model: dict[str, str] = field(default_factory=dict)  # path, family, config/tokenizer/chat_template digests
    weight_version: int = 0
    manifest_digest: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)  # effective options, every one of them
    sampling_origin: dict[str, str] = field(default_factory=dict)
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    library_versions: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # by status and by cause of dropping


@dataclass(slots=True, repr=False)
class RolloutBatch:
    """All samples of one rollout, columnar and ragged: what travels between processes (zero-copy through Ray).

    offsets            int64 [N+1]; sample i owns token indices offsets[i]:offsets[i+1]
    token_ids_T        int32 [T];   loss_mask_T bool [T];   rollout_log_probs_T float32 [T]
    prompt_lens_N      int32 [N];   group_ids_N int64 [N];  indices_N int32 [N]
    rewards_N          float64 [N], NaN where there is none
    rows               one plain dict per sample: status, text, prompt_text, label, seed, weight_version_*, metadata
    """

    rollout_id: int
    offsets: np.ndarray
    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    rollout_log_probs_T: np.ndarray
    prompt_lens_N: np.ndarray
    group_ids_N: np.ndarray
    indices_N: np.ndarray
    rewards_N: np.ndarray
    rows: list[dict[str, Any]]
    header: RolloutHeader = field(default_factory=RolloutHeader)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        """Without the contents: asyncio forms the repr of what ``asyncio.run`` returns, whether it is shown or not."""
        return f"RolloutBatch(rollout_id={self.rollout_id}, {len(self)} samples, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths_N(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def response_lens_N(self) -> np.ndarray:
        return self.lengths_N - self.prompt_lens_N

    @classmethod
    def from_samples(
        cls, rollout_id: int, samples: Sequence[Sample], header: RolloutHeader | None = None
    ) -> RolloutBatch:
        lengths = [len(s.token_ids) for s in samples]
        return cls(
            rollout_id=rollout_id,
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            token_ids_T=_join([s.token_ids for s in samples], np.int32),
            loss_mask_T=_join([s.loss_mask for s in samples], bool),
            rollout_log_probs_T=_join([s.rollout_log_probs for s in samples], np.float32),
            prompt_lens_N=np.array([s.prompt_len for s in samples], dtype=np.int32),
            group_ids_N=np.array([s.group_id for s in samples], dtype=np.int64),
            indices_N=np.array([s.index for s in samples], dtype=np.int32),
            rewards_N=np.array([np.nan if s.reward is None else s.reward for s in samples], dtype=np.float64),
            rows=[_row(s) for s in samples],
            header=header or RolloutHeader(),
        )

    def sample(self, i: int) -> Sample:
        a, b = int(self.offsets[i]), int(self.offsets[i + 1])
        reward = float(self.rewards_N[i])
        return Sample(
            group_id=int(self.group_ids_N[i]),
            index=int(self.indices_N[i]),
            token_ids=self.token_ids_T[a:b],
            prompt_len=int(self.prompt_lens_N[i]),
            loss_mask=self.loss_mask_T[a:b],
            rollout_log_probs=self.rollout_log_probs_T[a:b],
            reward=None if np.isnan(reward) else reward,
            **self.rows[i],
        )

    def place_of(self, at: int) -> str:
        """How messages call token ``at`` of the batch: its sample, and its position there."""
        row = int(np.searchsorted(self.offsets, at, side="right") - 1)
        return f"sample {self.group_ids_N[row]}/{self.indices_N[row]} position {at - int(self.offsets[row])}"

    def samples(self) -> Iterator[Sample]:
        return (self.sample(i) for i in range(len(self)))

    def select(self, which: Iterable[int]) -> RolloutBatch:
        """The samples ``which``, in that order, as a batch of their own."""
        return RolloutBatch.from_samples(self.rollout_id, [self.sample(i) for i in which], self.header)

    def with_header(self, **changes: Any) -> RolloutBatch:
        return replace(self, header=replace(self.header, **changes))


def _join(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def _row(s: Sample) -> dict[str, Any]:
    return {
        "status": str(s.status),
        "text": s.text,
        "prompt_text": s.prompt_text,
        "label": s.label,
        "seed": s.seed,
        "weight_version_min": s.weight_version_min,
        "weight_version_max": s.weight_version_max,
        "metadata": s.metadata,
    }


@dataclass(slots=True)
class TrainData:
    """What one optimizer step trains on: samples of a rollout with everything the loss needs, ragged like RolloutBatch.

    loss_weight_T   float32 [T]: 0.0 off mask; 1 for token-mean, 1/len for sequence-mean, ...
    normalizer      one number for the whole step, whatever the layout: loss = sum(loss_weight_T * loss_T) / normalizer
    sample_ids      names for messages, "group/index"
    """

    offsets: np.ndarray
    token_ids_T: np.ndarray
    loss_weight_T: np.ndarray
    advantages_T: np.ndarray
    rollout_log_probs_T: np.ndarray
    old_log_probs_T: np.ndarray
    ref_log_probs_T: np.ndarray | None
    normalizer: float
    sample_ids: list[str]

    @property
    def lengths_N(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(slots=True)
class TrainBatch:
    """One packed micro-batch of one data-parallel rank: B sequences one after the other, no padding between them.

    tokens_T int64 [T]; cu_seqlens int32 [B+1]; the rest float32 [T], aligned with tokens_T. An empty ``sample_ids``
    marks a filler micro-batch (valid tokens, all weights 0) that keeps the number of forwards equal between ranks.
    """

    tokens_T: np.ndarray
    cu_seqlens: np.ndarray
    loss_weight_T: np.ndarray
    advantages_T: np.ndarray
    rollout_log_probs_T: np.ndarray
    old_log_probs_T: np.ndarray
    ref_log_probs_T: np.ndarray | None
    rows: np.ndarray  # int64 [B]: positions of the sequences in the TrainData
    sample_ids: list[str]


@dataclass(slots=True)
class StepStats:
    """What one optimizer step did. ``is_skipped`` with ``skip_reason``: weights and optimizer are bitwise unchanged."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    is_skipped: bool = False
    skip_reason: str = ""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a manifest, by Hugging Face name. ``digest``: blake3 of its contiguous little-endian bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    digest: str = ""
    l2: float = 0.0
    source_name: str = ""
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """What one weight sync compared, and what that cost: ``seconds`` of the sync's ``sync_seconds``.

    num_equal: tensors of which every engine answered the trainer's digest, of num_compared out of num_tensors.
    """

    version: int
    level: str
    num_tensors: int
    num_compared: int
    num_equal: int
    seconds: float
    sync_seconds: float

    @property
    def share(self) -> float:
        """0..1 of the time of the sync."""
        return self.seconds / self.sync_seconds if self.sync_seconds else 0.0


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """The names, shapes, dtypes and digests of one set of weights. origin: checkpoint, trainer, engine-received, ...

    A tensor without a digest was not digested. seconds: spent on digests; verification: of the sync that carried them.
    """

    version: int
    origin: str
    tensors: dict[str, TensorEntry]
    family: str = ""
    layout: str = ""
    seconds: float = 0.0
    verification: Verification | None = None

    @property
    def num_bytes(self) -> int:
        size = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
        return sum(size[t.dtype] * int(np.prod(t.shape)) for t in self.tensors.values())


class Verdict(StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"  # does not apply, with the reason
    NOT_TESTED = "NOT TESTED"  # nothing independent to compare


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One verdict: the measured number, its limit with the reason, the evidence, the likely cause, the next step.

    follows   the failed check that explains this failure: a consequence, no finding of its own
    explained_by   the checks that may explain it, where what was found leaves fewer than ``Check.explained_by``
    numbers   plain data behind ``measured``, for JSON and plots
    """

    name: str
    verdict: Verdict
    measured: str = ""
    limit: str = ""
    evidence: tuple[str, ...] = ()
    cause: str = ""
    next_step: str = ""
    follows: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    explained_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class AlignReport:
    """What ``vime align-check`` found. ``seconds``: by the name of the check; ``environment``: facts and versions."""

    checks: tuple[CheckResult, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[CheckResult, ...]:
        """The failures that no other failure explains."""
        return tuple(c for c in self.checks if c.verdict == Verdict.FAIL and not c.follows)
