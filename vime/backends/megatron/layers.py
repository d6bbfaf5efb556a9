"""Layer parts that need no transformer-engine, under transformer-engine's parameter names.

One table of names and one checkpoint format then serve both. Axes: T tokens of a packed micro-batch on this rank,
H heads, D head size.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, rounded in the order of Hugging Face's models (weight times the rounded value)."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def _norm_weight(size: int, config: TransformerConfig) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    # Each tensor-parallel rank sees only its part of the sequence: megatron then sums the gradients of marked weights.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class RMSNorm(torch.nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer: the local twin of TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = _norm_weight(input_size, config)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(rms_norm(x, self.layer_norm_weight, self.eps), *args, **options)


MIN_ROWS = 16
"""MKL multiplies matrices of up to 11 rows by other kernels; above, a row's result does not depend on the others."""


def _with_rows(x: Tensor) -> Tensor:
    """Zero rows behind ``x`` up to ``MIN_ROWS``; nothing behind no rows at all."""
    num_rows = x.shape[0]
    return F.pad(x, (0, 0, 0, MIN_ROWS - num_rows)) if 0 < num_rows < MIN_ROWS else x


class ExpertColumnLinear(ColumnParallelLinear):
    """First layer of an expert: a token's result is the same, bitwise, whatever else its micro-batch sends here."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        out, bias = super().forward(_with_rows(x), *args, **options)
        return out[: x.shape[0]], bias


class ExpertRowLinear(RowParallelLinear):
    """Second layer of an expert, likewise."""

    def forward(self, x: Tensor) -> Any:
        out, bias = super().forward(_with_rows(x))
        return out[: x.shape[0]], bias


class _GatherKeysValues(torch.autograd.Function):
    """All-gather over the context-parallel group; backward sums every rank's share of this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


class PackedAttention(MegatronModule):
    """Causal attention with torch's SDPA, sequence by sequence of a packed micro-batch; context parallel by zig-zag.

    Under context parallelism a rank holds chunks ``r`` and ``2 cp - 1 - r`` of each sequence, which is why every
    sequence is padded to a multiple of ``2 cp``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.cp = pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T, H, D] each -> [T, H * D]."""
        assert packed_seq_params is not None, "only packed micro-batches are supported"
        ends = (packed_seq_params.cu_seqlens_q // self.cp.size()).tolist()
        spans = list(itertools.pairwise(ends))
        if self.cp.size() == 1:
            parts = [self._attend(query[a:b], key[a:b], value[a:b]) for a, b in spans]
        else:
            gathered = _GatherKeysValues.apply(torch.stack((key, value), 1), self.cp)
            parts = [self._attend_zigzag(query[a:b], gathered[:, a:b]) for a, b in spans]
        return torch.cat(parts).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal; the queries are the last rows of the keys."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        mask = None
        if q.shape[2] != k.shape[2]:
            rows = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = rows.tril(k.shape[2] - q.shape[2])
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    def _attend_zigzag(self, query: Tensor, gathered: Tensor) -> Tensor:
        """One sequence: query [T, H, D] of this rank, gathered [cp, T, 2, H, D] of all ranks."""
        cp, rank, chunk = self.cp.size(), self.cp.rank(), query.shape[0] // 2
        low = [gathered[i, :chunk] for i in range(cp)]
        high = [gathered[i, chunk:] for i in reversed(range(cp))]
        key, value = torch.cat(low + high).unbind(1)
        parts = []
        for half, position in enumerate((rank, 2 * cp - 1 - rank)):
            end = (position + 1) * chunk
            parts.append(self._attend(query[half * chunk : (half + 1) * chunk], key[:end], value[:end]))
        return torch.cat(parts)
