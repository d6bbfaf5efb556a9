"""Log-prob of given tokens, and entropy, from logits that are split over the vocabulary.

Axes: T tokens, V vocabulary entries on this tensor-parallel rank. megatron's vocab_parallel_cross_entropy is not used
because it overwrites float32 logits in place, after which no entropy can be had from them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
    return _LogProbs.apply(logits_TV, targets_T, group, temperature, vocab_size, with_entropy)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        group: dist.ProcessGroup,
        temperature: float,
        vocab_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        num_local = logits_TV.shape[-1]
        first = group.rank() * num_local
        z = _scaled(logits_TV, temperature, vocab_size - first)
        peak = z.amax(-1)
        if group.size() > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        exp = (z - peak[:, None]).exp_()
        is_here = (targets_T >= first) & (targets_T < first + num_local)
        index = torch.where(is_here, targets_T - first, 0)
        picked = torch.where(is_here, z.gather(1, index[:, None])[:, 0] - peak, 0.0)
        total = exp.sum(-1)
        weighted = (
            (exp.mul_(z.clamp_min(torch.finfo(z.dtype).min))).sum(-1) if with_entropy else torch.zeros_like(total)
        )
        # One buffer, of one shape whatever is asked, so that the order of gloo's sums never depends on with_entropy.
        sums = torch.stack([total, picked, weighted])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy = peak + log_sum - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_sum)
        ctx.save_for_backward(z, peak + log_sum, entropy, is_here, index)
        ctx.temperature, ctx.dtype = temperature, logits_TV.dtype
        return sums[1] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        z, log_total, entropy, is_here, index = ctx.saved_tensors
        grad_log_prob, grad_entropy = grads
        log_p = z - log_total[:, None]
        p = log_p.exp()
        out = torch.zeros_like(z)
        if grad_entropy is not None:
            out -= grad_entropy[:, None] * p * (log_p.clamp_min(torch.finfo(z.dtype).min) + entropy[:, None])
        if grad_log_prob is not None:
            out -= p.mul_(grad_log_prob[:, None])
            out.scatter_add_(1, index[:, None], torch.where(is_here, grad_log_prob, 0.0)[:, None])
        return (out / ctx.temperature).to(ctx.dtype), None, None, None, None, None


def _scaled(logits_TV: Tensor, temperature: float, num_real: int) -> Tensor:
    """float32 logits / temperature, -inf from column ``num_real`` on. Never writes to the argument."""
    z = logits_TV.float()
    if temperature != 1.0:
        z = z / temperature
    if num_real < z.shape[-1]:
        z = z.clone()
        z[:, max(num_real, 0) :] = float("-inf")
    return z
