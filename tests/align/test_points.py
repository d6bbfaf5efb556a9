from __future__ import annotations

import pytest

from vime.align.points import all_points, check_points, operation, order, weights_of
from vime.errors import UsageError

TENSORS = [
    "model.embed_tokens.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.q_norm.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.1.mlp.experts.0.up_proj.weight",
    "model.layers.11.self_attn.q_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def test_the_order_is_that_of_computation():
    points = all_points(2, False)
    assert points[:9] == (
        "embed", "layers.0.attn_in", "layers.0.q", "layers.0.k", "layers.0.v", "layers.0.attn_out", "layers.0.mlp_in",
        "layers.0.mlp_out", "layers.0.out",
    )  # fmt: skip
    assert points[-2:] == ("final_norm", "log_prob")
    assert len(points) == 1 + 2 * 8 + 2
    assert sorted(points, key=order) == list(points)
    assert "layers.1.router" in all_points(2, True)


def test_layer_11_comes_after_layer_2():
    assert order("layers.2.out") < order("layers.11.attn_in") < order("final_norm")


def test_weights_between_a_point_and_the_one_before():
    assert weights_of("embed", TENSORS) == ["model.embed_tokens.weight"]
    assert weights_of("layers.1.q", TENSORS) == TENSORS[2:4]
    assert weights_of("layers.1.attn_out", TENSORS) == TENSORS[4:5]
    assert weights_of("layers.1.router", TENSORS) == ["model.layers.1.mlp.gate.weight"]
    assert weights_of("layers.1.mlp_out", TENSORS) == TENSORS[6:8]
    assert weights_of("layers.1.out", TENSORS) == []
    assert weights_of("log_prob", TENSORS) == ["lm_head.weight"]
    assert weights_of("log_prob", TENSORS[:-1]) == ["model.embed_tokens.weight"], "tied"


def test_operations_in_words():
    assert operation("layers.3.attn_out") == "layer 3, attention: rotary, q.k softmax v, o_proj"
    assert operation("final_norm") == "final norm"


@pytest.mark.parametrize("name", ["layers.2.out", "layers.x.out", "layers.0.head", "layers.0", "logits", ""])
def test_a_name_that_is_no_point(name):
    with pytest.raises(UsageError, match="is no point of this model"):
        check_points(["embed", name], 2)


def test_names_that_are():
    check_points([*all_points(2, True), "layers.0.experts"], 2)
