"""The HTML page of the samples of some rollouts: statistics, a table to filter and sort, every token with its log-prob.

T response tokens of all samples one after the other, N samples. Prompt tokens are left out; the prompt's text is in.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vime.files import whole_file
from vime.record.bands import BANDS, MASKED
from vime.record.export import Selected, finite
from vime.record.fields import Fields
from vime.record.names import STATUSES
from vime.record.tokens import TokenTexts, token_texts
from vime.report.page import page
from vime.rollout.statistics import statistics
from vime.types import RolloutBatch, RolloutHeader

NOT_SAMPLED, NOT_FINITE, LOWEST = 65535, 65534, 65000
"""Log-probs are in steps of -0.001 nats: 1250 is -1.25; two numbers stand for what is none, and there is a lowest."""
EXACT = 2**53  # from there on a script rounds whole numbers

COLUMNS = (
    "rollout_id",
    "group_id",
    "index",
    "reward",
    "prompt_len",
    "response_len",
    "mean_log_prob",
    "label",
    "seed",
    "weight_version",
    "text",
)
"""Fields that are written as they are; status, prompt and metadata are written in another form."""


def write_html(path: Path, selected: Selected, title: str = "") -> int:
    """Write the page; returns the number of samples. Log-probs are rounded to 0.001 nats."""
    content = _Content()
    for batch, wanted in selected:
        content.add(batch, np.asarray(wanted, dtype=np.int64))
    with whole_file(path) as file:
        file.write(page(f"{title} - samples" if title else "samples", "samples", content.data(title)).encode())
    return content.num_samples


class _Content:
    """What is on the page, gathered one rollout after the other."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._rollouts: list[dict[str, Any]] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, "status", "prompt", "metadata")}
        self._prompts: dict[str, int] = {}
        self._tokens: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self._vocabulary: dict[tuple[str, int], int] = {}
        self._texts: list[str] = []
        self._tokenizers: dict[str, TokenTexts] = {}

    def add(self, batch: RolloutBatch, wanted: np.ndarray) -> None:
        """Take in the samples ``wanted`` of one rollout."""
        fields = Fields(batch)
        rows = wanted.tolist()
        for name in COLUMNS:
            column = fields[name]
            written = _rounded if name == "mean_log_prob" else _seed if name == "seed" else finite
            self._columns[name] += [written(column[i]) for i in rows]
        self._columns["status"] += [STATUSES.index(fields["status"][i]) for i in rows]
        self._columns["prompt"] += [self._prompts.setdefault(fields["prompt"][i], len(self._prompts)) for i in rows]
        self._columns["metadata"] += [_as_json(fields["metadata"][i]) for i in rows]
        self._add_tokens(batch, wanted)
        self._rollouts.append(_about(batch))
        self.num_samples += len(rows)

    def _add_tokens(self, batch: RolloutBatch, wanted: np.ndarray) -> None:
        lengths = batch.response_lens_N[wanted]
        ends = np.cumsum(lengths)
        starts = batch.offsets[:-1][wanted] + batch.prompt_lens_N[wanted]
        index_T = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
        tokenizer, texts = self._tokenizer(batch.header)
        ids, where_T = np.unique(batch.token_ids_T[index_T], return_inverse=True)
        known = []
        for token_id, text in zip(ids.tolist(), texts.of(ids.tolist()), strict=True):
            key = (tokenizer, token_id)
            if key not in self._vocabulary:
                self._vocabulary[key] = len(self._texts)
                self._texts.append(text)
            known.append(self._vocabulary[key])
        self._tokens.append(np.array(known, dtype="<u4")[where_T])
        self._log_probs.append(_steps(batch.rollout_log_probs_T[index_T], batch.loss_mask_T[index_T]))

    def _tokenizer(self, header: RolloutHeader) -> tuple[str, TokenTexts]:
        name = f"{header.model.get('path')} {header.model.get('tokenizer_digest')}"
        if name not in self._tokenizers:
            self._tokenizers[name] = token_texts(header)
        return name, self._tokenizers[name]

    def data(self, title: str) -> dict[str, Any]:
        """Plain data; docs of the form stand in samples.js, its only reader."""
        problems = sorted({texts.problem for texts in self._tokenizers.values() if texts.problem})
        return {
            "title": title,
            "rollouts": self._rollouts,
            "statuses": list(STATUSES),
            "columns": self._columns,
            "prompts": list(self._prompts),
            "token_ids": [token_id for _, token_id in self._vocabulary],
            "token_texts": self._texts,
            "token_problem": "; ".join(problems),
            "tokens": _packed(self._tokens, "<u4"),
            "log_probs": _packed(self._log_probs, "<u2"),
            "codes": {"not_sampled": NOT_SAMPLED, "not_finite": NOT_FINITE, "lowest": LOWEST},
            "bands": [{"above": smallest, "name": name} for smallest, name in BANDS],
            "masked": MASKED,
        }


def _about(batch: RolloutBatch) -> dict[str, Any]:
    header = {name: value for name, value in asdict(batch.header).items() if value not in ("", {}, [])}
    return {
        "rollout_id": batch.rollout_id,
        "num_samples": len(batch),
        "header": finite(header),
        "statistics": finite({name.removeprefix("rollout/"): value for name, value in statistics(batch).items()}),
    }


def _steps(log_probs_T: np.ndarray, mask_T: np.ndarray) -> np.ndarray:
    is_finite = np.isfinite(log_probs_T)
    steps = np.clip(np.rint(np.where(is_finite, -log_probs_T.astype(np.float64), 0.0) * 1000), 0, LOWEST)
    return np.where(mask_T, np.where(is_finite, steps, NOT_FINITE), NOT_SAMPLED).astype("<u2")


def _packed(parts: list[np.ndarray], dtype: str) -> str:
    joined = np.concatenate(parts) if parts else np.empty(0, dtype)
    return base64.b64encode(joined.astype(dtype).tobytes()).decode("ascii")


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _seed(value: int) -> int | str:
    return value if abs(value) < EXACT else str(value)


def _as_json(metadata: dict[str, Any]) -> str:
    return json.dumps(finite(metadata), ensure_ascii=False) if metadata else ""
