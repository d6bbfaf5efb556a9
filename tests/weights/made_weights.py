"""Weights of a tiny made-up model, and dumps of them: every tensor differs from every other."""

from __future__ import annotations

from pathlib import Path

import torch

from vime.types import TensorEntry
from vime.weights.compare import WeightDiff, diff
from vime.weights.manifest_file import Dump
from vime.weights.values import record_of

LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, VOCAB = 4, 16, 4, 2, 8, 32, 64
Tensors = dict[str, torch.Tensor]


def weights(experts: int = 0, is_tied: bool = False) -> Tensors:
    """Hugging Face names -> float32 tensors of their own."""
    generator = torch.Generator().manual_seed(0)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found = {"model.embed_tokens.weight": fresh(VOCAB, HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        found[f"{at}.input_layernorm.weight"] = torch.ones(HIDDEN)
        found[f"{at}.self_attn.q_proj.weight"] = fresh(HEADS * HEAD_DIM, HIDDEN)
        found[f"{at}.self_attn.k_proj.weight"] = fresh(GROUPS * HEAD_DIM, HIDDEN)
        found[f"{at}.self_attn.v_proj.weight"] = fresh(GROUPS * HEAD_DIM, HIDDEN)
        found[f"{at}.self_attn.o_proj.weight"] = fresh(HIDDEN, HEADS * HEAD_DIM)
        for mlp in [f"{at}.mlp.experts.{e}" for e in range(experts)] or [f"{at}.mlp"]:
            found[f"{mlp}.gate_proj.weight"] = fresh(FFN, HIDDEN)
            found[f"{mlp}.up_proj.weight"] = fresh(FFN, HIDDEN)
            found[f"{mlp}.down_proj.weight"] = fresh(HIDDEN, FFN)
    found["model.norm.weight"] = fresh(HIDDEN)
    if not is_tied:
        found["lm_head.weight"] = fresh(VOCAB, HIDDEN)
    return found


def entries(tensors: Tensors) -> list[TensorEntry]:
    return [TensorEntry(n, tuple(t.shape), str(t.dtype)[6:]) for n, t in tensors.items()]


def dump_of(tensors: Tensors, origin: str = "trainer", folder: Path | None = None, **about) -> Dump:
    return Dump(0, origin, {n: record_of(n, t) for n, t in tensors.items()}, folder=folder, **about)


def found(a: Tensors, b: Tensors, with_tensors: bool = False, **about) -> WeightDiff:
    read = (a.__getitem__, b.__getitem__) if with_tensors else (None, None)
    return diff(dump_of(a, "checkpoint", **about), dump_of(b, "trainer", **about), *read)


def lines(result: WeightDiff) -> list[str]:
    return [str(finding) for finding in result.findings]
