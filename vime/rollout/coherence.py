"""Is it human language? What can be measured on a rollout alone: cheap, and the same in training and debugging.

T tokens, N samples, as in ``vime.types``; R tokens that the policy sampled. Log-probs are in nats.
"""

from __future__ import annotations

import math
import unicodedata
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vime.types import RolloutBatch, Status

MIN_TEXT_BYTES = 100
"""Shorter texts do not shrink under zlib, whatever they repeat."""
MAX_TEXT_CHARS = 4_000
"""Of longer texts the end is looked at: there a text that fell into a loop is still in it."""
MIN_RUN = 12
"""So many times the same token in a row is no longer a line of dashes or a row of digits."""
REPLACEMENT = 0xFFFD
SCRIPTS = {
    **dict.fromkeys(("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO"), "HAN"),
    **{
        name: name
        for name in (
            "LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN", "HEBREW", "ARABIC", "SYRIAC", "ETHIOPIC", "HANGUL",
            "DEVANAGARI", "BENGALI", "GUJARATI", "GURMUKHI", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "ORIYA",
            "SINHALA", "THAI", "LAO", "TIBETAN", "MYANMAR", "KHMER", "MONGOLIAN", "CHEROKEE",
        )
    },
}  # fmt: skip
"""First word of a letter's Unicode name -> script. Letters of other names (mathematical, modifiers) are neutral."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """is_token_V  bool [V]: the tokenizer knows this id; V is the number of logits of the model."""

    is_token_V: np.ndarray

    @property
    def log_size(self) -> float:
        """log V, nats: minus the mean log-prob of a uniform model."""
        return math.log(max(2, len(self.is_token_V)))


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """What was measured, per sample [N] and over the rollout (properties). Samples without sampled tokens are neutral.

    is_finite_N      every log-prob is a number
    log_prob_N       mean log-prob of the sampled tokens that have a finite one; NaN without any
    num_tokens_N     tokens that the policy sampled
    run_N            most times that one id stands in a row
    compression_N    bytes of the text / bytes under zlib, 1 for texts too short to say
    num_invalid_N    sampled ids that the tokenizer does not know
    undecodable_N    share of characters that are U+FFFD, but for those at the end of a truncated text
    num_scripts_N    scripts of letters that no prompt of the rollout has
    is_truncated_N   ended at the length limit
    log_size         log V
    """

    is_finite_N: np.ndarray
    log_prob_N: np.ndarray
    num_tokens_N: np.ndarray
    run_N: np.ndarray
    compression_N: np.ndarray
    num_invalid_N: np.ndarray
    undecodable_N: np.ndarray
    num_scripts_N: np.ndarray
    is_truncated_N: np.ndarray
    log_size: float

    @property
    def nonfinite_share(self) -> float:
        """Share of samples with a log-prob that is not finite."""
        return _mean(~self.is_finite_N)

    @property
    def log_prob(self) -> float:
        """Mean log-prob of the sampled tokens, nats; NaN where none is finite."""
        known = np.isfinite(self.log_prob_N)
        weights = self.num_tokens_N[known]
        return float(np.average(self.log_prob_N[known], weights=weights)) if weights.sum() else float("nan")

    @property
    def uniformity(self) -> float:
        """Mean log-prob / -log V: 0 for a certain model, 1 for one that draws any token."""
        return self.log_prob / -self.log_size

    @property
    def one_token_share(self) -> float:
        """Share of samples of which at least half is one token, again and again."""
        return _mean((self.run_N >= MIN_RUN) & (2 * self.run_N >= self.num_tokens_N))

    @property
    def repetition(self) -> float:
        """Median compression ratio of the texts."""
        return float(np.median(self.compression_N)) if len(self.compression_N) else 1.0

    @property
    def invalid_share(self) -> float:
        """Share of sampled ids that the tokenizer does not know."""
        return float(self.num_invalid_N.sum() / max(1, self.num_tokens_N.sum()))

    @property
    def undecodable_share(self) -> float:
        """Mean share of characters that could not be decoded."""
        return _mean(self.undecodable_N)

    @property
    def mixed_scripts_share(self) -> float:
        """Share of samples that mix in two scripts or more that no prompt has."""
        return _mean(self.num_scripts_N >= 2)

    @property
    def truncated_share(self) -> float:
        """Share of samples that ended at the length limit."""
        return _mean(self.is_truncated_N)

    def worst_first(self) -> np.ndarray:
        """Positions of all samples, the least plausible first; ties in their order."""
        badness = (
            1000.0 * ~self.is_finite_N
            + 100.0 * (self.num_invalid_N > 0)
            + 10.0 * ((self.run_N >= MIN_RUN) & (2 * self.run_N >= self.num_tokens_N))
            + self.compression_N
            + 100.0 * self.undecodable_N
            + self.num_scripts_N
            - np.nan_to_num(self.log_prob_N)
        )
        return np.argsort(-badness, kind="stable")

    def as_dict(self) -> dict[str, float]:
        """Name -> number, for people and scripts."""
        names = (
            "log_prob", "uniformity", "nonfinite_share", "one_token_share", "repetition", "invalid_share",
            "undecodable_share", "mixed_scripts_share", "truncated_share",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def measure(batch: RolloutBatch, vocabulary: Vocabulary) -> Signals:
    """The signals of a rollout. Python loops over samples only, never over tokens or characters."""
    sampled_R = np.flatnonzero(batch.loss_mask_T)
    sample_R = np.repeat(np.arange(len(batch)), batch.lengths_N)[sampled_R]
    ids_R, log_probs_R = batch.token_ids_T[sampled_R], batch.rollout_log_probs_T[sampled_R].astype(np.float64)
    finite_R = np.isfinite(log_probs_R)
    num_tokens_N, num_finite_N = _count(sample_R, len(batch)), _count(sample_R[finite_R], len(batch))
    sums_N = np.bincount(sample_R[finite_R], log_probs_R[finite_R], minlength=len(batch))
    statuses = [row["status"] for row in batch.rows]
    is_truncated_N = np.array([status == Status.TRUNCATED for status in statuses], dtype=bool)
    undecodable_N, num_scripts_N = _characters(batch, is_truncated_N)
    return Signals(
        is_finite_N=num_finite_N == num_tokens_N,
        log_prob_N=np.divide(sums_N, num_finite_N, out=np.full(len(batch), np.nan), where=num_finite_N > 0),
        num_tokens_N=num_tokens_N,
        run_N=_longest_runs(ids_R, sample_R, len(batch)),
        compression_N=np.array([compression(row["text"]) for row in batch.rows]),
        num_invalid_N=_count(sample_R[~_is_token(ids_R, vocabulary)], len(batch)),
        undecodable_N=undecodable_N,
        num_scripts_N=num_scripts_N,
        is_truncated_N=is_truncated_N,
        log_size=vocabulary.log_size,
    )


def compression(text: str) -> float:
    """How many times the text shrinks under zlib; 1.0 for a short one."""
    data = text[-MAX_TEXT_CHARS:].encode("utf-8", "surrogatepass")
    return len(data) / len(zlib.compress(data, 1)) if len(data) >= MIN_TEXT_BYTES else 1.0


def _is_token(ids_R: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    inside_R = (ids_R >= 0) & (ids_R < len(vocabulary.is_token_V))
    return inside_R & vocabulary.is_token_V[np.where(inside_R, ids_R, 0)]


def _longest_runs(ids_R: np.ndarray, sample_R: np.ndarray, num_samples: int) -> np.ndarray:
    """int64 [N]: most times that one id stands in a row among the sampled tokens of each sample."""
    longest_N = np.zeros(num_samples, dtype=np.int64)
    if len(ids_R):
        is_start = np.concatenate([[True], (ids_R[1:] != ids_R[:-1]) | (sample_R[1:] != sample_R[:-1])])
        starts = np.flatnonzero(is_start)
        np.maximum.at(longest_N, sample_R[starts], np.diff(starts, append=len(ids_R)))
    return longest_N


def _characters(batch: RolloutBatch, is_truncated_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(share of U+FFFD float64 [N], number of scripts that no prompt has int64 [N])."""
    known = _scripts("".join({row["prompt_text"] for row in batch.rows}))
    undecodable_N, num_scripts_N = np.zeros(len(batch)), np.zeros(len(batch), dtype=np.int64)
    for i, row in enumerate(batch.rows):
        text = row["text"].rstrip(chr(REPLACEMENT)) if is_truncated_N[i] else row["text"]
        if not text.isascii():  # ASCII has one script and no U+FFFD
            undecodable_N[i] = text.count(chr(REPLACEMENT)) / max(1, len(text))
            num_scripts_N[i] = len(_scripts(text) - known)
        elif "LATIN" not in known:
            num_scripts_N[i] = any(map(str.isalpha, set(text)))
    return undecodable_N, num_scripts_N


def _scripts(text: str) -> frozenset[str]:
    return frozenset(script for letter in set(text) if (script := _script(letter)) is not None)


@lru_cache(maxsize=1 << 16)
def _script(letter: str) -> str | None:
    """The script of a letter; None for digits, punctuation and what belongs to all."""
    return SCRIPTS.get(unicodedata.name(letter, "").partition(" ")[0]) if letter.isalpha() else None


def _count(sample_R: np.ndarray, num_samples: int) -> np.ndarray:
    return np.bincount(sample_R, minlength=num_samples)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
