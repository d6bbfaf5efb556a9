"""Truncation as ``vime.align.processed`` computes it is that of vLLM's own sampler."""

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vime.align.processed import Position, distribution


def test_the_same_tokens_are_kept_and_normalised():
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(64, 100, generator=generator)
    given = Position(logits, np.zeros(65, np.int64), 1, np.arange(1, 65))
    for k, p in ((20, 1.0), (100, 0.8), (30, 0.5)):
        theirs = apply_top_k_top_p_pytorch(logits.clone(), torch.full((64,), k), torch.full((64,), p))
        ours, _ = distribution(given, {"top_k": k, "top_p": p})
        assert torch.equal(torch.isfinite(ours), torch.isfinite(theirs))
        assert torch.allclose(ours.exp(), torch.softmax(theirs, -1), atol=1e-6)
