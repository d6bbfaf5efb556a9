"""What a model is: the facts of its config.json, the shapes of its tensors, and the table of its two names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(frozen=True)
class ModelSpec:
    """One decoder, dense or of experts in every layer, read from a Hugging Face folder.

    Sizes are counts of elements; nothing depends on a layout.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads."""
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    is_tied: bool
    """Input and output embedding are one tensor; the checkpoint then has no lm_head.weight."""
    has_qkv_bias: bool
    has_qk_norm: bool
    rms_norm_eps: float
    rope: dict[str, Any]
    """``rope_type``, ``rope_theta`` and the parameters of that type."""
    max_position_embeddings: int
    dtype: str
    """Type of the checkpoint's weights according to config.json."""
    path: str = field(default="", compare=False)
    num_experts: int = 0
    """Experts of each layer; 0: a dense model."""
    num_experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    renormalizes_experts: bool = True
    """The weights of a token's experts sum to 1; else they are the softmax over all experts."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape, exactly the set a checkpoint of this model has."""
        found: dict[str, tuple[int, ...]] = {}
        for rule in self.rules():
            shapes = [self.shape(axes) for _, axes in rule.parts]
            for layer, expert in self.places(rule):
                found.update(zip(rule.hf_of(layer, expert), shapes, strict=True))
        return found

    def megatron_names(self) -> dict[str, tuple[str, ...]]:
        """Global Megatron name -> the Hugging Face names it is made of, in the order they are joined."""
        return {
            rule.megatron_of(layer, expert): rule.hf_of(layer, expert)
            for rule in self.rules()
            for layer, expert in self.places(rule)
        }

    def rules(self) -> list[Rule]:
        """Every row of the table that holds for this model."""
        return [rule for rule in TABLE if rule.when(self)]

    def places(self, rule: Rule) -> Iterator[tuple[int | None, int | None]]:
        """(layer, expert) of every tensor that a rule stands for; None where it has none."""
        experts = range(self.num_experts) if rule.is_per_expert else [None]
        for layer in range(self.num_layers) if rule.is_per_layer else [None]:
            yield from ((layer, expert) for expert in experts)

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.axis(name) for name in axes)

    def axis(self, name: str) -> int:
        """Length of a named axis of the table."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "heads": self.num_attention_heads * self.head_dim,
            "groups": self.num_query_groups * self.head_dim,
            "head_dim": self.head_dim,
            "ffn": self.ffn_hidden_size,
            "experts": self.num_experts,
            "expert_ffn": self.expert_ffn_hidden_size,
        }[name]

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for shape in self.tensors().values())


SPLIT_AXES = ("vocab", "heads", "groups", "ffn", "expert_ffn")
"""Axes that tensor-parallel ranks share; a tensor without any of them is whole on every rank."""


@dataclass(frozen=True)
class Rule:
    """One row of the table: a Megatron tensor and the Hugging Face tensors it is made of.

    ``*`` is the global layer, ``#`` the global expert. One part is a copy, two are the gate above the up projection,
    three are query, key and value interleaved per key/value head. ``only_if`` names a ModelSpec flag; a leading ``!``
    negates it.
    """

    megatron: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    only_if: str = ""

    @property
    def is_per_layer(self) -> bool:
        return "*" in self.megatron

    @property
    def is_per_expert(self) -> bool:
        return "#" in self.megatron

    @property
    def split_dim(self) -> int | None:
        """Dimension that tensor-parallel ranks share (for an expert: expert-tensor-parallel ranks); None: none."""
        return next((dim for dim, axis in enumerate(self.parts[0][1]) if axis in SPLIT_AXES), None)

    def when(self, spec: ModelSpec) -> bool:
        if not self.only_if:
            return True
        return bool(getattr(spec, self.only_if.lstrip("!"))) != self.only_if.startswith("!")

    def megatron_of(self, layer: int | None, expert: int | None = None) -> str:
        return self.megatron.replace("*", str(layer)).replace("#", str(expert))

    def hf_of(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        return tuple(hf.replace("*", str(layer)).replace("#", str(expert)) for hf, _ in self.parts)


def _layer(megatron: str, *parts: tuple[str, tuple[str, ...]], only_if: str = "") -> Rule:
    return Rule(f"decoder.layers.*.{megatron}", tuple((f"model.layers.*.{hf}", axes) for hf, axes in parts), only_if)


_H = "hidden"
TABLE: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", ("vocab", _H)),)),
    _layer("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight", (_H,))),
    _layer(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", ("heads", _H)),
        ("self_attn.k_proj.weight", ("groups", _H)),
        ("self_attn.v_proj.weight", ("groups", _H)),
    ),
    _layer(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", ("heads",)),
        ("self_attn.k_proj.bias", ("groups",)),
        ("self_attn.v_proj.bias", ("groups",)),
        only_if="has_qkv_bias",
    ),
    _layer("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", ("head_dim",)), only_if="has_qk_norm"),
    _layer("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", ("head_dim",)), only_if="has_qk_norm"),
    _layer("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", (_H, "heads"))),
    _layer("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight", (_H,)), only_if="!is_moe"),
    _layer(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", ("ffn", _H)),
        ("mlp.up_proj.weight", ("ffn", _H)),
        only_if="!is_moe",
    ),
    _layer("mlp.linear_fc2.weight", ("mlp.down_proj.weight", (_H, "ffn")), only_if="!is_moe"),
    _layer("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", (_H,)), only_if="is_moe"),
    _layer("mlp.router.weight", ("mlp.gate.weight", ("experts", _H)), only_if="is_moe"),
    _layer(
        "mlp.experts.linear_fc1.weight#",
        ("mlp.experts.#.gate_proj.weight", ("expert_ffn", _H)),
        ("mlp.experts.#.up_proj.weight", ("expert_ffn", _H)),
        only_if="is_moe",
    ),
    _layer("mlp.experts.linear_fc2.weight#", ("mlp.experts.#.down_proj.weight", (_H, "expert_ffn")), only_if="is_moe"),
    Rule("decoder.final_layernorm.weight", (("model.norm.weight", (_H,)),)),
    Rule("output_layer.weight", (("lm_head.weight", ("vocab", _H)),), only_if="!is_tied"),
)
"""Megatron names are those of the transformer-engine layer spec (grouped experts), to which local ones are mapped."""

_LAYER_ID = re.compile(r"\.layers\.(\d+)\.")
_EXPERT_ID = re.compile(r"\.mlp\.experts\.(?:(\d+)\.|linear_fc[12]\.weight(\d+)$)")


def layer_of(name: str) -> int | None:
    """Global layer id in a name of either side; None outside the layers."""
    found = _LAYER_ID.search(name)
    return int(found[1]) if found else None


def expert_of(name: str) -> int | None:
    """Global expert id in a name of either side; None for a tensor that is no expert's."""
    found = _EXPERT_ID.search(name)
    return int(found[1] or found[2]) if found else None


def hf_names(megatron_name: str) -> tuple[str, ...]:
    """The Hugging Face names of a global Megatron name. Raises KeyError for a name the table does not know."""
    layer, expert = layer_of(megatron_name), expert_of(megatron_name)
    for rule in TABLE:
        if rule.megatron_of(layer, expert) == megatron_name:
            return rule.hf_of(layer, expert)
    raise KeyError(f"no Hugging Face name for {megatron_name}")


def megatron_name(hf_name: str, *, is_moe: bool = False) -> str:
    """The global Megatron name that holds a Hugging Face tensor. Raises KeyError for a name the table does not know.

    ``is_moe``: in a model of experts, whose norm before the experts is no part of a linear layer.
    """
    layer, expert = layer_of(hf_name), expert_of(hf_name)
    for rule in TABLE:
        is_here = rule.only_if not in (("!is_moe",) if is_moe else ("is_moe",))
        if is_here and hf_name in rule.hf_of(layer, expert):
            return rule.megatron_of(layer, expert)
    raise KeyError(f"no Megatron name for {hf_name}")
