"""Log-prob of given tokens, and entropy, from logits that are split over the vocabulary.

Axes: T tokens, V vocabulary entries on this tensor-parallel rank. Works through a few rows at a time, so that beside
the logits and their gradient nothing of size T x V is held. megatron's vocab_parallel_cross_entropy is not used: it
overwrites float32 logits in place, after which no entropy can be had from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ELEMENTS_AT_ONCE = 1 << 22
"""16 MiB of float32: a chunk of rows and its temporaries stay near the cache."""


def log_probs_and_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    group: dist.ProcessGroup,
    temperature: float,
    vocab_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Both float32 [T], in nats, of softmax(logits / temperature) over the first ``vocab_size`` entries.

    Entries beyond ``vocab_size`` pad the last rank and have probability 0. Without ``with_entropy`` the second is 0.
    """
    first = group.rank() * logits_TV.shape[-1]
    scale = _Scale(temperature, vocab_size - first)
    is_here_T = (targets_T >= first) & (targets_T < first + logits_TV.shape[-1])
    index_T = torch.where(is_here_T, targets_T - first, 0)
    return _LogProbs.apply(logits_TV, index_T, is_here_T, group, scale, with_entropy)


@dataclass(frozen=True)
class _Scale:
    """What turns raw logits of this rank into those of the distribution."""

    temperature: float
    num_real: int

    def __call__(self, logits_RV: Tensor) -> Tensor:
        """float32 logits / temperature, -inf from column ``num_real`` on. Never writes to the argument."""
        z_RV = logits_RV.float()
        if self.temperature != 1.0:
            z_RV = z_RV / self.temperature
        if self.num_real < z_RV.shape[-1]:
            z_RV = z_RV.clone()
            z_RV[:, max(self.num_real, 0) :] = float("-inf")
        return z_RV


def _chunks(logits_TV: Tensor) -> Iterator[slice]:
    num_tokens, width = logits_TV.shape
    step = max(1, _ELEMENTS_AT_ONCE // width)
    return (slice(start, start + step) for start in range(0, num_tokens, step))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        index_T: Tensor,
        is_here_T: Tensor,
        group: dist.ProcessGroup,
        scale: _Scale,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        peak_T = torch.cat([scale(logits_TV[rows]).amax(-1) for rows in _chunks(logits_TV)])
        if group.size() > 1:
            dist.all_reduce(peak_T, dist.ReduceOp.MAX, group=group)
        # Rows: sum of exp, target's logit, logits weighted with exp. One buffer, of one shape whatever is asked, so
        # that the order of gloo's sums never depends on with_entropy.
        sums = torch.zeros(3, len(index_T), dtype=torch.float32, device=logits_TV.device)
        for rows in _chunks(logits_TV):
            z_RV = scale(logits_TV[rows])
            peak_R = peak_T[rows, None]
            sums[1, rows] = torch.where(is_here_T[rows], (z_RV.gather(1, index_T[rows, None]) - peak_R)[:, 0], 0.0)
            exp_RV = (z_RV - peak_R).exp_()
            sums[0, rows] = exp_RV.sum(-1)
            if with_entropy:
                sums[2, rows] = exp_RV.mul_(_finite(z_RV)).sum(-1)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_sum_T = sums[0].log()
        entropy_T = peak_T + log_sum_T - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_sum_T)
        ctx.save_for_backward(logits_TV, peak_T + log_sum_T, entropy_T, is_here_T, index_T)
        ctx.scale = scale
        return sums[1] - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_TV, log_total_T, entropy_T, is_here_T, index_T = ctx.saved_tensors
        grad_log_prob_T, grad_entropy_T = grads
        out_TV = torch.empty_like(logits_TV)
        for rows in _chunks(logits_TV):
            log_p_RV = ctx.scale(logits_TV[rows]) - log_total_T[rows, None]
            p_RV = log_p_RV.exp()
            out_RV = torch.zeros_like(p_RV)
            if grad_entropy_T is not None:
                out_RV -= grad_entropy_T[rows, None] * p_RV * (_finite(log_p_RV) + entropy_T[rows, None])
            if grad_log_prob_T is not None:
                out_RV -= p_RV.mul_(grad_log_prob_T[rows, None])
                mine_R = torch.where(is_here_T[rows], grad_log_prob_T[rows], 0.0)
                out_RV.scatter_add_(1, index_T[rows, None], mine_R[:, None])
            out_TV[rows] = out_RV / ctx.scale.temperature
        return out_TV, None, None, None, None, None


def _finite(x: Tensor) -> Tensor:
    """-inf becomes the lowest number, so that probability 0 times it is 0."""
    return x.clamp_min(torch.finfo(x.dtype).min)
