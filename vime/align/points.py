"""The points of a decoder at which any two implementations of it can be compared, by one name each.

``embed``, then per layer ``layers.N.PART`` for the parts below, then ``final_norm`` and ``log_prob``. An output is
float32 [L, width]; ``log_prob`` is [L, 1], nats at temperature 1, 0.0 at the first token. ``q``, ``k`` and ``v`` are
those before the rotary embedding, after the norm per head where the model has one. A point that an implementation
cannot give is absent from its answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vime.errors import UsageError

EMBED, FINAL_NORM, LOG_PROB = "embed", "final_norm", "log_prob"
ATTENTION_PARTS = ("attn_in", "q", "k", "v", "attn_out")
PARTS = (*ATTENTION_PARTS, "mlp_in", "router", "mlp_out", "out")
"""Of one layer, in the order of computation; ``router``: logits of the experts."""
EXPERTS = "experts"
"""``layers.N.experts``, for the comparison of routing only: [L, K] ids of the experts chosen, ascending."""

OPERATIONS = {
    EMBED: "token embedding",
    "attn_in": "norm before attention",
    "q": "query projection (and norm per head)",
    "k": "key projection (and norm per head)",
    "v": "value projection",
    "attn_out": "attention: rotary, q.k softmax v, o_proj",
    "mlp_in": "residual sum, norm before the MLP",
    "router": "router of the experts",
    "mlp_out": "MLP: gate, up, silu, down (of the chosen experts)",
    "out": "residual sum",
    FINAL_NORM: "final norm",
    LOG_PROB: "head, log softmax",
}

_ATTENTION, _MLP = "self_attn.", "mlp."
WEIGHTS = {
    "attn_in": ("input_layernorm.",),
    "q": (f"{_ATTENTION}q_proj.", f"{_ATTENTION}q_norm."),
    "k": (f"{_ATTENTION}k_proj.", f"{_ATTENTION}k_norm."),
    "v": (f"{_ATTENTION}v_proj.",),
    "attn_out": (f"{_ATTENTION}o_proj.",),
    "mlp_in": ("post_attention_layernorm.",),
    "router": (f"{_MLP}gate.",),
    "mlp_out": (f"{_MLP}gate_proj.", f"{_MLP}up_proj.", f"{_MLP}down_proj.", f"{_MLP}experts."),
    "out": (),
}
"""Beginnings of the Hugging Face names, inside the layer, of the weights between a part and the one before it."""


def point(layer: int, part: str) -> str:
    return f"layers.{layer}.{part}"


def layer_of(name: str) -> int | None:
    """Global layer id of a point; None outside the layers."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def part_of(name: str) -> str:
    """``layers.3.q`` -> ``q``; ``embed`` -> ``embed``."""
    return name.rpartition(".")[2]


def all_points(num_layers: int, has_experts: bool) -> tuple[str, ...]:
    """Every point of a model in the order of computation."""
    parts = [part for part in PARTS if has_experts or part != "router"]
    inside = (point(layer, part) for layer in range(num_layers) for part in parts)
    return (EMBED, *inside, FINAL_NORM, LOG_PROB)


def order(name: str) -> tuple[int, int]:
    """Sort key: the order of computation."""
    layer = layer_of(name)
    if layer is not None:
        return layer, (*PARTS, EXPERTS).index(part_of(name))
    return (-1, 0) if name == EMBED else (1 << 30, (FINAL_NORM, LOG_PROB).index(name))


def operation(name: str) -> str:
    """What computes a point from the points before it, in words."""
    layer = layer_of(name)
    return OPERATIONS[part_of(name)] if layer is None else f"layer {layer}, {OPERATIONS[part_of(name)]}"


def weights_of(name: str, tensors: Iterable[str]) -> list[str]:
    """Of the Hugging Face names ``tensors``, those that a point is computed with and the one before it is not."""
    layer = layer_of(name)
    if layer is not None:
        begins: tuple[str, ...] = tuple(f"model.layers.{layer}.{part}" for part in WEIGHTS[part_of(name)])
    elif name == LOG_PROB:
        known = list(tensors)
        return [t for t in known if t.startswith("lm_head.")] or weights_of(EMBED, known)
    else:
        begins = ("model.embed_tokens.",) if name == EMBED else ("model.norm.",)
    return [tensor for tensor in tensors if begins and tensor.startswith(begins)]


def check_points(names: Sequence[str], num_layers: int) -> None:
    """Raise UsageError for a name that is no point of a model of ``num_layers`` layers."""
    known = {EMBED, FINAL_NORM, LOG_PROB}
    for name in names:
        head, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        is_inside = head == "layers" and number.isdecimal() and part in (*PARTS, EXPERTS) and int(number) < num_layers
        if name not in known and not is_inside:
            parts = ", ".join(PARTS)
            raise UsageError(
                f"{name!r} is no point of this model",
                f"known: {EMBED}, layers.0 to layers.{num_layers - 1} with .{parts}; {FINAL_NORM}, {LOG_PROB}",
            )
