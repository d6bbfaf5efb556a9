"""Examine every rollout of a run: measure it, ask the oracle, look at prompts and engines, say what was found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vime.align.coherence import (
    Case,
    Level,
    PromptEvidence,
    Symptom,
    check_of,
    level_of,
    needs_engine_state,
    symptoms,
)
from vime.align.engine_state import Engines, EngineState, engine_state
from vime.align.markers import ChatMarkers
from vime.align.oracle import NEUTRAL, Oracle, OracleScores
from vime.config.schema import Config
from vime.models import load_spec
from vime.rollout.coherence import REPLACEMENT, Vocabulary, measure
from vime.types import CheckResult, RolloutBatch, Verdict

NUM_WORST = 3
NUM_PROMPTS = 4  # whose markers the oracle scores
UNITS = {
    "log_prob": "mean, nats",
    "uniformity": "log_prob / -log V: 1 draws any token",
    "nonfinite_share": "of samples",
    "one_token_share": "of samples: one token again and again",
    "repetition": "times that zlib shrinks the texts",
    "invalid_share": "of ids: none of the tokenizer's",
    "undecodable_share": "of characters",
    "mixed_scripts_share": "of samples: scripts that no prompt has",
    "truncated_share": "of samples",
    "oracle_log_prob": "mean under the Hugging Face model, nats",
    "oracle_samples": "samples that it scored",
    "oracle_stops": "stop ids that it expects per sample",
    "oracle_gap": "mean |engine - Hugging Face|, nats",
    "oracle_gap_max": "largest, nats",
    "marker_log_prob": "end of turn in the prompts, nats",
}
"""Signal -> what it is, for people."""


@dataclass(frozen=True, slots=True, eq=False)
class Examination:
    """What was found about one rollout. ``worst``: its least plausible samples, one line each."""

    rollout_id: int
    level: Level
    check: CheckResult
    case: Case
    symptoms: tuple[Symptom, ...]
    worst: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The public word; NOT TESTED where the rollout had nothing to judge."""
        return str(self.check.verdict if self.check.verdict == Verdict.NOT_TESTED else self.level)

    def __str__(self) -> str:
        """A block of lines: verdict, signals, worst samples, cause and next step."""
        if self.check.verdict == Verdict.NOT_TESTED:
            return f"coherence of rollout {self.rollout_id}: {self.verdict}: {self.check.cause}"
        lines = [f"coherence of rollout {self.rollout_id}: {self.verdict}"]
        lines += [f"  {symptom.text}" for symptom in self.symptoms]
        numbers = self.case.numbers()
        lines += [f"  {name:<20} {value:>9.4g}  {UNITS[name]}" for name, value in numbers.items() if value != 0.0]
        if zero := [name for name, value in numbers.items() if value == 0.0]:
            lines.append(f"  all 0: {', '.join(zero)}")
        if isinstance(self.case.oracle, str):
            lines.append(f"  {'oracle':<20} NOT TESTED: {self.case.oracle}")
        lines += ["  worst samples:", *(f"    {line}" for line in self.worst)]
        if self.level != Level.PASS:
            lines += [f"  {line}" for line in self.check.evidence]
            lines += [f"  likely: {self.check.cause}", f"  try: {self.check.next_step}"]
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """The verdict on one line, for one that repeats."""
        return f"coherence of rollout {self.rollout_id}: {self.verdict}, {self.check.measured or self.check.cause}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "rollout_id": self.rollout_id,
            "verdict": self.verdict,
            "symptoms": [symptom.text for symptom in self.symptoms],
            "signals": self.case.numbers(),
            "oracle": self.case.oracle if isinstance(self.case.oracle, str) else "tested",
            "worst": list(self.worst),
            "evidence": list(self.check.evidence),
            "cause": self.check.cause,
            "next_step": self.check.next_step,
        }


class Examiner:
    """Examines the rollouts of one run.

    tokenizer  that of model.path, with the folder's own chat template
    engines    asked for weights and buffers where that can tell more; None: they belong to somebody else
    log_probs_mode  vLLM's: processed_logprobs, raw_logprobs (before temperature and other options), or logits
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        *,
        engines: Engines | None = None,
        stop_ids: tuple[int, ...] = (),
        log_probs_mode: str = "processed_logprobs",
    ) -> None:
        spec = load_spec(config.model.path)
        self.config = config
        self.engines = engines
        self.stop_ids = stop_ids
        self.num_layers = spec.num_layers
        self.sampling = config.rollout.sampling.model_dump()
        self.log_probs_mode = log_probs_mode
        if log_probs_mode == "raw_logprobs":
            self.sampling |= NEUTRAL | {"temperature": 1.0}
        self.vocabulary = _vocabulary(tokenizer, spec.vocab_size)
        self._tokenizer = tokenizer

    @property
    def is_training(self) -> bool:
        """Then only what is cheap is measured."""
        return not self.config.debug.rollout_only

    @cached_property
    def markers(self) -> ChatMarkers:
        return ChatMarkers.of(self._tokenizer, None if self.is_training else self.config.model.path)

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.config.model.path, self.config.debug.oracle_samples, self.sampling, self.stop_ids)

    def __call__(self, batch: RolloutBatch) -> Examination:
        signals = measure(batch, self.vocabulary)
        worst_first = signals.worst_first()
        oracle = self._asked(batch, worst_first)
        case = Case(
            signals,
            float(self.sampling["temperature"]),
            self.config.rollout.sampling.max_response_len,
            "bfloat16" if self.engines is None else self.config.model.dtype,  # a server's dtype is its own
            self.num_layers,
            oracle,
            self._prompts(batch, oracle),
        )
        found = symptoms(case)
        level = level_of(found)
        check = check_of(case, found, self._engine_state(case, level), self.is_training)
        worst = tuple(_line(batch, int(row), signals.log_prob_N) for row in worst_first[:NUM_WORST])
        return Examination(batch.rollout_id, level, check, case, tuple(found), worst)

    def _asked(self, batch: RolloutBatch, worst_first: np.ndarray) -> OracleScores | str:
        if self.is_training:
            return "only vime rollout asks it"
        if self.log_probs_mode not in ("processed_logprobs", "raw_logprobs"):
            return f"the engines report {self.log_probs_mode}, not log-probs"
        return self.oracle.score(batch, worst_first)

    def _prompts(self, batch: RolloutBatch, oracle: OracleScores | str) -> PromptEvidence:
        if not len(batch):
            return PromptEvidence()
        rendered = self.config.data.apply_chat_template and self.config.rollout.generate is None
        texts = list({row["prompt_text"] for row in batch.rows})
        markers = self.markers
        return PromptEvidence(
            tuple(markers.foreign_in(texts)),
            tuple(markers.absent_from(texts)) if rendered else (),
            markers.untrained if rendered else (),
            self._marker_log_prob(batch, oracle) if rendered else None,
        )

    def _marker_log_prob(self, batch: RolloutBatch, oracle: OracleScores | str) -> float | None:
        ends = sorted(set(self.markers.own.values()) & set(self.stop_ids))
        if isinstance(oracle, str) or not ends:
            return None
        prompts = {batch.rows[row]["prompt_text"]: row for row in oracle.rows}
        starts = [(int(batch.offsets[row]), int(batch.prompt_lens_N[row])) for row in list(prompts.values())]
        found = self.oracle.marker_log_probs([batch.token_ids_T[a : a + n] for a, n in starts[:NUM_PROMPTS]], ends)
        return float(found.mean()) if len(found) else None

    def _engine_state(self, case: Case, level: Level) -> EngineState | None:
        if self.is_training or not needs_engine_state(case, level):
            return None
        if self.engines is None:
            return EngineState(unknown="the engines belong to somebody else")
        return engine_state(self.engines, self.config.model.path)


def _vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    is_token_V = np.zeros(size, dtype=bool)
    ids = np.fromiter(tokenizer.get_vocab().values(), dtype=np.int64)
    is_token_V[ids[ids < size]] = True
    return Vocabulary(is_token_V)


def _line(batch: RolloutBatch, row: int, log_prob_N: np.ndarray) -> str:
    """A sample on one line: where it says nothing, its first ids."""
    text = batch.rows[row]["text"]
    if not text.strip():
        a, n = int(batch.offsets[row]), int(batch.prompt_lens_N[row])
        text = "ids " + " ".join(map(str, batch.token_ids_T[a + n : int(batch.offsets[row + 1])][:16]))
    name = f"sample {batch.group_ids_N[row]}/{batch.indices_N[row]}"
    shown = " ".join(text[:1000].split())
    shown = shown if len(shown) <= 100 else shown[:97] + "..."
    shown = "".join(c if c.isprintable() else chr(REPLACEMENT) for c in shown)  # no answer moves the cursor
    return f"{name} {batch.rows[row]['status']}, log-prob {log_prob_N[row]:.2f}: {shown}"
