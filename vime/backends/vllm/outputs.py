"""Outputs of the engine at the named points (``vime.align.points``), kept by hooks in its workers during one prefill.

Layers return (hidden, residual), added in the norm that follows: ``out`` is their sum. Kernels write into their
arguments on the way, so everything is copied when it passes. Axes: L tokens of the sequence, which may come in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vime.align.bench import Routing
from vime.align.points import EMBED, EXPERTS, FINAL_NORM, LOG_PROB, PARTS, check_points, layer_of, order, part_of, point
from vime.align.routing import tie_margin
from vime.errors import PromptTooLong, UsageError, VimeError
from vime.models import load_spec
from vime.types import RolloutBatch

if TYPE_CHECKING:
    from vime.backends.vllm.engine import VllmEngine

Pick = Callable[[Any], torch.Tensor]


class Capture:
    """Hooks on ``model`` that keep float32 copies of ``points`` until ``take``.

    UsageError where hooks would not run: compiled models, pipeline stages.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, points: Sequence[str]) -> None:
        _check(model, vllm_config)
        self._root: Any = model.model
        self._num_chosen = int(getattr(vllm_config.model_config.hf_text_config, "num_experts_per_tok", 0))
        check_points(points, len(self._root.layers))
        self._chunks: dict[str, list[torch.Tensor]] = {}
        self._hooks: list[Any] = []
        try:
            for name in points:
                self._place(name)
        except BaseException:
            self.remove()
            raise

    def take(self) -> dict[str, torch.Tensor]:
        """float32 [L, width here] on the CPU by point; q, k and v are this rank's heads. The hooks are gone."""
        self.remove()
        return {name: torch.cat(chunks) for name, chunks in self._chunks.items()}

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _place(self, name: str) -> None:
        layer = layer_of(name)
        if layer is not None:
            self._place_in_layer(name, self._root.layers[layer])
        elif name != LOG_PROB:
            module = {EMBED: self._root.embed_tokens, FINAL_NORM: self._root.norm}[name]
            self._after(module, name, _first)

    def _place_in_layer(self, name: str, block: Any) -> None:
        attention, part = block.self_attn, part_of(name)
        gate = getattr(block.mlp, "gate", None)
        if part in ("q", "k") and hasattr(attention, f"{part}_norm"):
            self._after(getattr(attention, f"{part}_norm"), name, _first)
        elif part in ("q", "k", "v"):  # not at the rotary embedding, which all layers share
            sizes = [attention.q_size, attention.kv_size, attention.kv_size]
            self._after(attention.qkv_proj, name, partial(_heads, sizes=sizes, index="qkv".index(part)))
        elif part == "out":
            self._after(block, name, _sum)
        elif part == "router" and gate is not None:
            self._after(gate, name, _first)
        elif part == "experts" and gate is not None:
            self._after(gate, name, partial(_top, count=self._num_chosen))
        elif part in PARTS and part != "router":
            modules = {
                "attn_in": block.input_layernorm,
                "attn_out": attention,
                "mlp_in": block.post_attention_layernorm,
                "mlp_out": block.mlp,
            }
            self._after(modules[part], name, _first)

    def _after(self, module: torch.nn.Module, name: str, pick: Pick) -> None:
        self._hooks.append(module.register_forward_hook(lambda _module, _arguments, out: self._keep(name, pick(out))))

    def _keep(self, name: str, value: torch.Tensor) -> None:
        copy = value.detach().to("cpu", torch.float32, copy=True)
        self._chunks.setdefault(name, []).append(copy.reshape(len(copy), -1))


def _check(model: torch.nn.Module, vllm_config: Any) -> None:
    if not hasattr(getattr(model, "model", None), "layers"):
        raise UsageError(f"{type(model).__name__} has no model.layers to look into", "compare the trainer with hf")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise UsageError("outputs of the engine: vllm.pipeline_parallel_size > 1 is not supported")
    if not vllm_config.model_config.enforce_eager:
        raise UsageError(
            "outputs of the engine: its model is compiled, and nothing can be seen inside", "vllm.enforce_eager=true"
        )


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _sum(output: Any) -> torch.Tensor:
    """(hidden, residual), as ``out`` of any other implementation."""
    if not isinstance(output, tuple):
        return output
    hidden, residual = output[:2]
    return hidden if residual is None else hidden + residual


def _heads(output: Any, sizes: Sequence[int], index: int) -> torch.Tensor:
    """Query, key or value of the joined projection."""
    return _first(output).split(list(sizes), dim=-1)[index]


def _top(output: Any, count: int) -> torch.Tensor:
    """The experts that softmax and top-k choose: those of the largest logits."""
    return _first(output).float().topk(count, dim=-1).indices.sort(-1).values


# ---------------------------------------------------------------- the engine's side


async def engine_outputs(
    engine: VllmEngine, token_ids: Sequence[int] | np.ndarray, points: Sequence[str]
) -> dict[str, np.ndarray]:
    """float32 [L, width] of ``points`` by a fresh forward (the prefix cache is not read), whole heads.

    Nothing else may run. PromptTooLong for more tokens than the context less one: a request must generate one.
    """
    ids = [int(t) for t in token_ids]
    if not 2 <= len(ids) < engine.max_model_len:
        raise PromptTooLong(f"outputs of {len(ids)} tokens: from 2 to {engine.max_model_len - 1} fit into the context")
    if engine.is_busy:
        raise VimeError(f"engine {engine.index}: outputs are of one sequence alone, but requests are running")
    check_points(points, load_spec(engine.config.model.path).num_layers)
    await engine._rpc("vime_outputs_start", list(points))
    try:
        log_probs = await engine.score_prompt(ids)
    finally:
        ranks = await engine._rpc("vime_outputs_take")
    found = _whole(engine, ranks)
    if LOG_PROB in points:
        found[LOG_PROB] = log_probs[:, None]
    for name, value in found.items():
        if len(value) != len(ids):
            raise VimeError(f"engine {engine.index}: {len(value)} rows of {name} for {len(ids)} tokens")
    return {name: found[name] for name in sorted(found, key=order)}


def _whole(engine: VllmEngine, ranks: Sequence[Any]) -> dict[str, np.ndarray]:
    """Tensor-parallel ranks hold whole outputs but for heads; beyond the key/value heads they hold copies."""
    spec = load_spec(engine.config.model.path)
    parts = [{name: np.frombuffer(data, np.float32).reshape(shape) for name, shape, data in rank} for rank in ranks]
    num_heads = {"q": spec.num_attention_heads, "k": spec.num_query_groups, "v": spec.num_query_groups}
    found = dict(parts[0])
    for name in found:
        if part_of(name) in num_heads:
            step = max(1, len(parts) // num_heads[part_of(name)])
            found[name] = np.concatenate([part[name] for part in parts[::step]], 1)
    return found


async def engine_routing(engine: VllmEngine, batch: RolloutBatch) -> Routing:
    """Experts of every token, each sample alone in a prefill. UsageError for a model without experts."""
    spec = load_spec(engine.config.model.path)
    if not spec.num_experts:
        raise UsageError(f"model.path = {engine.config.model.path}: a model without experts routes no tokens")
    points = [point(layer, part) for layer in range(spec.num_layers) for part in (EXPERTS, "router")]
    spans = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    samples = [await engine_outputs(engine, batch.token_ids_T[a:b], points) for a, b in spans]
    layers = sorted({layer for name in samples[0] if (layer := layer_of(name)) is not None})
    experts, margins = [], []
    for layer in layers:
        chosen = np.concatenate([found[point(layer, EXPERTS)] for found in samples]).astype(np.int16)
        experts.append(chosen)
        margins.append(tie_margin(np.concatenate([found[point(layer, "router")] for found in samples]), chosen))
    return Routing(tuple(layers), np.stack(experts, 1), np.stack(margins, 1))
