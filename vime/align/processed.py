"""Log-probs of sampled tokens as vLLM reports them after its sampling options, from logits. For the options' search.

Axes: R sampled tokens of one sample in order, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """What the engine knew when it sampled the tokens of one sample.

    logits_RV  float32, before anything is done to them
    token_ids  int [L], prompt and response; at_R: the index in it of each sampled token
    """

    logits_RV: torch.Tensor
    token_ids: np.ndarray
    prompt_len: int
    at_R: np.ndarray


def log_probs(given: Position, options: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs [R] of the sampled tokens under ``options``, log S [R] of the mass that truncation keeps), nats.

    A token that truncation drops has log-prob -inf.
    """
    import torch

    found_RV, log_s_R = distribution(given, options)
    ids_R = torch.from_numpy(given.token_ids[given.at_R].astype(np.int64))
    return found_RV.gather(1, ids_R[:, None])[:, 0].double().numpy(), log_s_R.double().numpy()


def distribution(given: Position, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs [R, V], log S [R]) under ``options``, nats.

    In vLLM's order: penalties, temperature, then min_p, top_k and top_p, over which it normalises again. Temperature 0
    stands for 1.
    """
    import torch

    logits_RV = _penalised(given, options) / (float(options.get("temperature", 1.0)) or 1.0)
    full_RV = torch.log_softmax(logits_RV, -1).masked_fill(~_kept(logits_RV, options), -torch.inf)
    log_s_R = torch.logsumexp(full_RV, -1)
    return full_RV - log_s_R[:, None], log_s_R


def _penalised(given: Position, options: Mapping[str, Any]) -> torch.Tensor:
    """Repetition penalises tokens of prompt and response, presence and frequency those of the response alone."""
    import torch

    repetition = float(options.get("repetition_penalty", 1.0))
    presence, frequency = (float(options.get(f"{name}_penalty", 0.0)) for name in ("presence", "frequency"))
    if repetition == 1.0 and presence == 0.0 and frequency == 0.0:
        return given.logits_RV
    out_RV = given.logits_RV.clone()
    width = out_RV.shape[1]
    for r, at in enumerate(given.at_R.tolist()):
        seen = torch.from_numpy(np.unique(given.token_ids[:at]).astype(np.int64))
        values = out_RV[r, seen]
        out_RV[r, seen] = torch.where(values > 0, values / repetition, values * repetition)
        counts_V = torch.from_numpy(np.bincount(given.token_ids[given.prompt_len : at], minlength=width)).float()
        out_RV[r] -= frequency * counts_V + presence * (counts_V > 0).float()
    return out_RV


def _kept(logits_RV: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """bool [R, V]: the tokens that min_p, top_k and top_p leave."""
    import torch

    kept_RV = torch.ones_like(logits_RV, dtype=torch.bool)
    if (min_p := float(options.get("min_p", 0.0))) > 0.0:
        probs_RV = torch.softmax(logits_RV, -1)
        kept_RV &= probs_RV >= min_p * probs_RV.amax(-1, keepdim=True)
    if 0 < (top_k := int(options.get("top_k", 0))) < logits_RV.shape[1]:
        kept_RV &= logits_RV >= torch.topk(logits_RV, top_k).values[:, -1:]
    if (top_p := float(options.get("top_p", 1.0))) < 1.0:
        left_RV = logits_RV.masked_fill(~kept_RV, -torch.inf)
        ordered_RV, order_RV = torch.sort(torch.softmax(left_RV, -1), descending=True)
        before_RV = ordered_RV.cumsum(-1) - ordered_RV  # mass of the likelier tokens
        kept_RV &= torch.zeros_like(kept_RV).scatter(1, order_RV, before_RV < top_p)
    return kept_RV
