"""The same tokens under the checkpoint's own Hugging Face model: a judge that shares no code with the engine.

transformers in float32 on the CPU. Where it agrees with the engine, the engine is right, whatever the text looks like.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vime.align.processed import Position
from vime.errors import VimeError
from vime.types import RolloutBatch
from vime.weights.checkpoint import read_specs

if TYPE_CHECKING:
    import torch

LOGITS_BYTES = 256 << 20  # of one forward; bounds how many samples go together
FLOPS_PER_CORE = 2e12  # of one rollout: half a minute to a minute on a core of today
NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_response_len": 0,
}
"""Sampling options that change the distribution, with the value at which they do not."""


@dataclass(frozen=True, slots=True, eq=False)
class OracleScores:
    """What the oracle says of some samples; R: their sampled tokens with a finite log-prob of the engine, at least one.

    rows          positions of the samples in the batch
    engine_R, log_probs_R   log-probs under engine and oracle, nats, after temperature
    stop_probs_R  probability that the oracle gives to a stop id in the place of the token, at temperature 1
    is_comparable the engine sampled from softmax(logits / temperature), as the oracle computes it
    """

    rows: tuple[int, ...]
    engine_R: np.ndarray
    log_probs_R: np.ndarray
    stop_probs_R: np.ndarray
    is_comparable: bool = True

    @property
    def mean_gap(self) -> float:
        """Mean |engine - oracle|, nats."""
        return float(np.abs(self.engine_R - self.log_probs_R).mean())

    @property
    def max_gap(self) -> float:
        """Largest |engine - oracle|, nats."""
        return float(np.abs(self.engine_R - self.log_probs_R).max())

    @property
    def log_prob(self) -> float:
        """Mean log-prob of the sampled tokens under the oracle, nats."""
        return float(self.log_probs_R.mean())

    @property
    def expected_stops(self) -> float:
        """Stop ids that the oracle expects per sample, at temperature 1. Near 0: it has learned none."""
        return float(self.stop_probs_R.sum() / len(self.rows))


class Oracle:
    """Scores samples of a rollout. The model is loaded at the first use and kept.

    ``reason`` says why it cannot (transformers or torch absent, too little memory); None where it can.
    """

    def __init__(self, path: str, num_samples: int, sampling: Mapping[str, Any], stop_ids: Sequence[int] = ()) -> None:
        self.path = path
        self.num_samples = num_samples
        self.temperature = float(sampling["temperature"]) or 1.0  # greedy: the engine reports those of temperature 1
        self.stop_ids = list(stop_ids)
        self.is_comparable = all(sampling.get(name, value) == value for name, value in NEUTRAL.items())
        self._specs = read_specs(path)
        self._model: Any = None

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(spec.shape)) for spec in self._specs)

    def score(self, batch: RolloutBatch, worst_first: np.ndarray) -> OracleScores | str:
        """The scores of at most ``num_samples`` samples: half of them the worst, the rest spread evenly.

        A text instead where there is nothing to compare, with the reason.
        """
        if reason := self._reason(batch):
            return reason
        rows = self._within_budget(batch, choose(worst_first, self.num_samples))
        if not rows:
            return f"no sample is short enough to be scored on this machine's {os.cpu_count()} cores in a minute"
        if self._model is None:
            self._model = load_model(self.path)
        parts = [self._forward(batch, some) for some in self._groups(batch, rows)]
        engine_R, log_probs_R, stops_R = (np.concatenate([part[i] for part in parts]) for i in range(3))
        if not len(engine_R):
            return f"the {len(rows)} samples that it was given have no sampled token of the vocabulary with a log-prob"
        return OracleScores(tuple(rows), engine_R, log_probs_R, stops_R, self.is_comparable)

    def marker_log_probs(self, prompts: Sequence[np.ndarray], markers: Sequence[int]) -> np.ndarray:
        """Log-probs, nats at temperature 1, of the ``markers`` wherever they stand in ``prompts`` (int [P] each).

        Only after ``score`` gave scores, for it loads the model. The first token of a prompt has no log-prob.
        """
        import torch

        found = [np.zeros(0)]
        for ids in prompts:
            at = 1 + np.flatnonzero(np.isin(ids[1:], markers))
            if len(at) and len(ids) <= FLOPS_PER_CORE / (2 * self.num_parameters):
                row = torch.from_numpy(ids.astype(np.int64))
                with torch.inference_mode():
                    logits = self._model(input_ids=row[None], logits_to_keep=torch.from_numpy(at - 1)).logits[0]
                found.append(torch.log_softmax(logits, -1).gather(1, row[at][:, None])[:, 0].double().numpy())
        return np.concatenate(found)

    def position(self, batch: RolloutBatch, row: int) -> Position | str:
        """The logits of the sampled tokens of one sample; a text where there are none, with the reason."""
        import torch

        if reason := self._reason_of(batch, row):
            return reason
        ids_L, at_R = self._sampled(batch, row)
        with torch.inference_mode():
            logits_RV = self._model(input_ids=ids_L[None], logits_to_keep=at_R - 1).logits[0]
        return Position(logits_RV, ids_L.numpy(), int(batch.prompt_lens_N[row]), at_R.numpy())

    def head_effect(self, batch: RolloutBatch, row: int) -> np.ndarray | str:
        """float64 [R], nats: what a head and logits in bfloat16 change, all else in float32; a text as ``position``."""
        import torch

        if reason := self._reason_of(batch, row):
            return reason
        ids_L, at_R = self._sampled(batch, row)
        head = self._model.get_output_embeddings()
        with torch.inference_mode():
            hidden_RH = self._model.base_model(input_ids=ids_L[None]).last_hidden_state[0, at_R - 1]
            rounded_RH, rounded_VH = (x.bfloat16().float() for x in (hidden_RH, head.weight))
            found = [head(hidden_RH), (rounded_RH @ rounded_VH.T).bfloat16().float()]
            scores = [torch.log_softmax(x / self.temperature, -1).gather(1, ids_L[at_R][:, None])[:, 0] for x in found]
        return (scores[1] - scores[0]).double().numpy()

    def _reason_of(self, batch: RolloutBatch, row: int) -> str | None:
        """Why one sample cannot be scored; None, and the model is loaded, where it can."""
        if reason := self._reason(batch):
            return reason
        if not self._within_budget(batch, [row]):
            return f"{batch.lengths_N[row]} tokens are too long to be scored on this machine's cores in a minute"
        if self._model is None:
            self._model = load_model(self.path)
        return None

    def _sampled(self, batch: RolloutBatch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [L], positions [R] of the sampled tokens) of one sample."""
        import torch

        here = _slice(batch, row)
        at = np.flatnonzero(batch.loss_mask_T[here])
        return torch.from_numpy(batch.token_ids_T[here].astype(np.int64)), torch.from_numpy(at)

    def _reason(self, batch: RolloutBatch) -> str | None:
        version = max((row["weight_version_max"] for row in batch.rows), default=0)
        if version > 0:
            return f"the rollout was sampled with weights v{version}, the checkpoint holds v0"
        if self.num_samples == 0:
            return "debug.oracle_samples = 0"
        if not (batch.loss_mask_T & np.isfinite(batch.rollout_log_probs_T)).any():
            return "no sampled token has a finite log-prob"
        if self._model is None:
            return no_room(4 * self.num_parameters) or _absent()
        return None

    def _within_budget(self, batch: RolloutBatch, rows: Sequence[int]) -> list[int]:
        """The first rows whose forwards the machine can do in about a minute."""
        tokens = FLOPS_PER_CORE * (os.cpu_count() or 1) / (2 * self.num_parameters)
        return [row for row, total in zip(rows, np.cumsum(batch.lengths_N[list(rows)]), strict=True) if total <= tokens]

    def _groups(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        """Rows that go through the model together, by length, so that padding is small and the logits fit."""
        width = int(self._model.config.vocab_size)
        groups: list[list[int]] = []
        for row in sorted(rows, key=lambda r: int(batch.lengths_N[r])):
            size = 4 * width * int(batch.lengths_N[row])
            if groups and size * (len(groups[-1]) + 1) <= LOGITS_BYTES:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _forward(self, batch: RolloutBatch, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(engine_R, log_probs_R, stop_probs_R) of the rows' sampled tokens that have a finite log-prob."""
        import torch

        lengths = batch.lengths_N[list(rows)]
        ids_BL = torch.zeros((len(rows), int(lengths.max())), dtype=torch.long)
        for b, row in enumerate(rows):
            ids_BL[b, : lengths[b]] = torch.from_numpy(batch.token_ids_T[_slice(batch, row)].astype(np.int64))
        attention_BL = torch.arange(ids_BL.shape[1]) < torch.from_numpy(lengths)[:, None]
        first = int(min(batch.prompt_lens_N[row] for row in rows)) - 1  # logits before it judge no sampled token
        with torch.inference_mode():
            logits = self._model(
                input_ids=ids_BL.clamp(0, self._model.config.vocab_size - 1),
                attention_mask=attention_BL.long(),
                logits_to_keep=ids_BL.shape[1] - first,
            ).logits
        parts = [self._read(batch, row, logits[b], first) for b, row in enumerate(rows)]
        return tuple(np.concatenate([part[i] for part in parts]) for i in range(3))  # type: ignore[return-value]

    def _read(
        self, batch: RolloutBatch, row: int, logits: torch.Tensor, first: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of one sample; ``logits`` [L - first, V], the first of which predicts position ``first`` + 1."""
        import torch

        here = _slice(batch, row)
        engine = batch.rollout_log_probs_T[here]
        at = np.flatnonzero(batch.loss_mask_T[here] & np.isfinite(engine))
        ids = torch.from_numpy(batch.token_ids_T[here][at].astype(np.int64))
        known = (ids >= 0) & (ids < logits.shape[1])
        at, ids = at[known.numpy()], ids[known]
        logits_RV = logits[torch.from_numpy(at) - 1 - first]
        log_probs_R = torch.log_softmax(logits_RV / self.temperature, -1).gather(1, ids[:, None])[:, 0]
        stops_R = torch.softmax(logits_RV, -1)[:, self.stop_ids].sum(-1)
        return engine[at].astype(np.float64), log_probs_R.double().numpy(), stops_R.double().numpy()


def choose(worst_first: np.ndarray, count: int) -> list[int]:
    """``count`` rows: the worst half, then others spread evenly over the rest of the order; each at most once."""
    count = min(count, len(worst_first))
    worst, rest = worst_first[: -(-count // 2)], worst_first[-(-count // 2) :]
    spread = rest[np.linspace(0, len(rest) - 1, count - len(worst)).astype(int)] if count > len(worst) else rest[:0]
    return [int(row) for row in (*worst, *spread)]


def _slice(batch: RolloutBatch, row: int) -> slice:
    return slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))


def load_model(path: str) -> Any:
    """The checkpoint as transformers loads it. VimeError if it leaves a tensor out."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    is_bar_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    finally:
        if is_bar_shown:
            logging.enable_progress_bar()
    if info["missing_keys"]:
        raise VimeError(f"{path}: transformers finds no {', '.join(sorted(info['missing_keys'])[:3])}")
    return model.eval()


def no_room(num_bytes: int) -> str | None:
    """Why a model of so many bytes is not loaded here; None where it fits."""
    free = free_memory()
    if 2 * num_bytes <= free:
        return None
    return f"the model takes {num_bytes / 1e9:.1f} GB in float32, over half of the {free / 1e9:.1f} GB that are free"


def free_memory() -> int:
    """Bytes of main memory that can be had without swapping."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def _absent() -> str | None:
    from importlib.util import find_spec

    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None
