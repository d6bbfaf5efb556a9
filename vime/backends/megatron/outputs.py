"""Outputs of the trainer at the named points (``vime.align.points``), kept by hooks during one forward.

Axes: L tokens of the sequence, P positions of its padded pack, S positions on this context-parallel rank. Sequence
parallelism splits S over the tensor-parallel ranks, tensor parallelism splits heads: both are gathered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from vime.align.points import (
    EMBED,
    EXPERTS,
    FINAL_NORM,
    LOG_PROB,
    check_points,
    layer_of,
    order,
    part_of,
    point,
)
from vime.align.routing import tie_margin
from vime.backends.megatron.build import Model
from vime.backends.megatron.forward import Micro, make_micro, run_schedule, score
from vime.backends.megatron.layers import rms_norm

HEADS = ("q", "k", "v")
"""Split by heads over the tensor-parallel ranks; everything else is whole, or split by sequence."""


@dataclass
class Kept:
    """Copies of this rank's part by point, one per micro-batch in order: [S or S / tp, width or width / tp]."""

    wanted: frozenset[str]
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def keep(self, name: str, value: Tensor) -> None:
        copy = value.detach().float().reshape(value.shape[0], -1).clone()
        self.parts.setdefault(name, []).append(copy)


@torch.no_grad()
def compute_outputs(model: Model, token_ids: np.ndarray, points: Sequence[str]) -> dict[str, np.ndarray]:
    """float32 [L, width] of the points that this pipeline stage computes; the same on all ranks of the stage.

    One forward of one sequence, at temperature 1. A collective; no hook is left behind.
    """
    check_points(points, model.spec.num_layers)
    ends = np.array([0, len(token_ids)])
    copies = model.parallel.pp if model.parallel.vpp is not None else 1
    tokens = np.asarray(token_ids, np.int64)
    micros = [make_micro(i, tokens, ends, model.parallel, None) for i in range(copies)]
    kept = Kept(frozenset(points))
    with hooked(model, kept):
        scored = run_schedule(model, micros, partial(_log_prob, model), forward_only=True)
    if LOG_PROB in points and scored:
        kept.parts[LOG_PROB] = [values[:, None] for values in scored]
    return {name: _whole(model, micros[0], name, kept.parts[name][0]) for name in sorted(kept.parts, key=order)}


@torch.no_grad()
def compute_routing(model: Model, micros: Sequence[Micro]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Layer of this pipeline stage -> (experts int16 [T, K] ascending, margin float32 [T]) of all tokens in order.

    margin: by how much the logit of the last expert chosen is above that of the next; near 0 it is a tie. A collective.
    """
    names = [point(layer, part) for layer in range(model.spec.num_layers) for part in (EXPERTS, "router")]
    kept = Kept(frozenset(names))
    with hooked(model, kept):
        run_schedule(model, micros, lambda micro, logits: None, forward_only=True)
    whole = {
        name: np.concatenate([_whole(model, micro, name, part) for micro, part in zip(micros, parts, strict=True)])
        for name, parts in sorted(kept.parts.items(), key=lambda item: order(item[0]))
    }
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for layer in sorted({layer_of(name) or 0 for name in whole}):
        experts = whole[point(layer, EXPERTS)]
        found[layer] = experts.astype(np.int16), tie_margin(whole[point(layer, "router")], experts)
    return found


def _log_prob(model: Model, micro: Micro, logits: Tensor) -> Tensor:
    return score(model, micro, logits, 1.0, with_entropy=False)[0].float()


# ---------------------------------------------------------------- hooks


@contextmanager
def hooked(model: Model, kept: Kept) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules:
            if module.pre_process:
                _after(stack, module.embedding, kept, EMBED)
            for layer in module.decoder.layers:
                _hook_layer(stack, layer, kept)
            if module.decoder.final_layernorm is not None:
                _after(stack, module.decoder.final_layernorm, kept, FINAL_NORM)
        yield


def _hook_layer(stack: ExitStack, layer: Any, kept: Kept) -> None:
    number = layer.layer_number - 1
    named = {part_of(name): name for name in kept.wanted if layer_of(name) == number}
    if not named:
        return
    _hook_norm(stack, kept, named.get("attn_in"), layer.input_layernorm, layer.self_attention.linear_qkv)
    if any(part in named for part in HEADS):
        _wrap(stack, layer.self_attention, "get_query_key_value_tensors", partial(_keep_heads, kept, number))
    _after(stack, layer.self_attention, kept, named.get("attn_out"))
    _hook_norm(stack, kept, named.get("mlp_in"), layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None))
    router = getattr(layer.mlp, "router", None)
    if router is not None and "router" in named:
        _wrap(stack, router, "gating", lambda logits: kept.keep(named["router"], logits))
    if router is not None and EXPERTS in named:
        _after(stack, router, kept, named[EXPERTS], _chosen)
    _after(stack, layer.mlp, kept, named.get("mlp_out"))
    _after(stack, layer, kept, named.get("out"))


def _hook_norm(stack: ExitStack, kept: Kept, name: str | None, norm: Any, linear: Any) -> None:
    """Where the norm is fused into the linear layer after it, it is computed once more from the layer's input."""
    if name is None:
        return
    if not isinstance(norm, IdentityOp):
        _after(stack, norm, kept, name)
        return

    def hook(module: Any, arguments: Any) -> None:
        kept.keep(name, rms_norm(arguments[0], module.layer_norm_weight, module.eps))

    stack.callback(linear.register_forward_pre_hook(hook).remove)


def _after(
    stack: ExitStack, module: Any, kept: Kept, name: str | None, pick: Callable[[Any], Tensor] | None = None
) -> None:
    if name is None or name not in kept.wanted:
        return

    def hook(_module: Any, _arguments: Any, output: Any) -> None:
        value = pick(output) if pick is not None else output[0] if isinstance(output, tuple) else output
        kept.keep(name, value)

    stack.callback(module.register_forward_hook(hook).remove)


def _wrap(stack: ExitStack, module: Any, method: str, hear: Callable[[Any], None]) -> None:
    """Let ``hear`` see what a method of ``module`` returns: some values pass through no module of their own."""
    had_own = method in vars(module)
    original = getattr(module, method)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        output = original(*arguments, **options)
        hear(output)
        return output

    setattr(module, method, wrapped)
    stack.callback(setattr, module, method, original) if had_own else stack.callback(delattr, module, method)


def _keep_heads(kept: Kept, layer: int, output: Any) -> None:
    """(query, key, value), each [S, 1, heads, head size]; a fused rotary gets them unsplit, and they stay absent."""
    if len(output) < 3:
        return
    for part, value in zip(HEADS, output, strict=False):
        if point(layer, part) in kept.wanted:
            kept.keep(point(layer, part), value)


def _chosen(output: Any) -> Tensor:
    """[S, K] ids, ascending, from (weights, routing map [S, E])."""
    chosen_SE = output[1].reshape(-1, output[1].shape[-1]).bool()
    return chosen_SE.nonzero()[:, 1].reshape(len(chosen_SE), -1)


# ---------------------------------------------------------------- put together


def _whole(model: Model, micro: Micro, name: str, part: Tensor) -> np.ndarray:
    """[L, width] from this stage's tensor- and context-parallel ranks."""
    whole_S = _of_tensor_ranks(model, name, part)
    group = parallel_state.get_context_parallel_group()
    whole_P = torch.zeros(len(micro.pack.tokens_P), whole_S.shape[1], device=whole_S.device)
    whole_P[torch.from_numpy(micro.index_S).to(whole_S.device)] = whole_S
    if group.size() > 1:
        dist.all_reduce(whole_P, group=group)
    values = whole_P.cpu().numpy()
    if name == LOG_PROB:
        return micro.pack.to_tokens(values[:, 0])[:, None]
    return values[micro.pack.position_T]


def _of_tensor_ranks(model: Model, name: str, part: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    size, inside = group.size(), part_of(name)
    is_by_head = inside in HEADS
    is_by_sequence = not is_by_head and name != LOG_PROB and model.transformer.sequence_parallel
    if size == 1 or not (is_by_head or is_by_sequence):
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    if is_by_sequence:
        return torch.cat(parts)
    num_heads = model.spec.num_attention_heads if inside == "q" else model.spec.num_query_groups
    return torch.cat(parts[:: max(1, size // num_heads)], 1)  # ranks beyond the key/value heads hold copies
