from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from vime.types import WeightManifest
from vime.weights.manifest import build_manifest, compare, digest, layer_of, manifest_digest


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
    for layer in range(4):
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (6, 4)
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = (4, 4)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (4,)
    made = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    for name in made:
        if "layernorm" in name:  # equal in every layer, as in a fresh model
            made[name] = torch.ones(4)
    return made


def manifest(of: dict[str, torch.Tensor], origin: str = "engine") -> WeightManifest:
    return build_manifest(3, origin, of.items())


def test_digest_is_blake3_of_the_contiguous_bytes() -> None:
    t = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert digest(t) == blake3(t.numpy().tobytes()).hexdigest()
    assert digest(t.t()) == blake3(t.t().contiguous().numpy().tobytes()).hexdigest() != digest(t)
    assert digest(t.bfloat16()) == blake3(t.bfloat16().view(torch.int16).numpy().tobytes()).hexdigest()
    assert digest(torch.tensor(-0.0)) != digest(torch.tensor(0.0))
    assert digest(torch.empty(0, 3)) == blake3(b"").hexdigest()


def test_manifest_entries() -> None:
    m = manifest({"model.layers.2.w": torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)})
    entry = m.tensors["model.layers.2.w"]
    assert (entry.shape, entry.dtype, entry.l2, entry.layer) == ((1, 2), "bfloat16", 5.0, 2)
    assert m.num_bytes == 4
    with pytest.raises(ValueError, match=r"a\.b comes twice"):
        build_manifest(0, "trainer", [("a.b", torch.ones(1)), ("a.b", torch.ones(1))])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.12.mlp.experts.3.up_proj.weight", ("model.layers.*.mlp.experts.3.up_proj.weight", 12)),
        ("transformer.h.0.attn.bias", ("transformer.h.*.attn.bias", 0)),
        ("lm_head.weight", ("lm_head.weight", None)),
        ("model.mlayers.3.weight", ("model.mlayers.3.weight", None)),
    ],
)
def test_layer_of(name: str, expected: tuple[str, int | None]) -> None:
    assert layer_of(name) == expected


def test_equal_sets_have_no_difference_and_one_digest() -> None:
    a, b = manifest(tensors(), "trainer"), manifest(dict(reversed(tensors().items())))
    assert compare(a, b) == []
    assert manifest_digest(a) == manifest_digest(b)
    assert manifest_digest(a) != manifest_digest(manifest(tensors(1)))


def test_every_kind_of_difference_is_named() -> None:
    wrong = tensors()
    del wrong["model.layers.1.self_attn.q_proj.weight"]
    wrong["model.layers.4.self_attn.q_proj.weight"] = torch.ones(4, 4)
    wrong["model.embed_tokens.weight"] = torch.ones(12, 4)
    wrong["model.norm.weight"] = wrong["model.norm.weight"].bfloat16()
    wrong["model.layers.0.mlp.up_proj.weight"] = wrong["model.layers.0.mlp.up_proj.weight"].flip(0)
    found = {(d.kind, d.name): str(d) for d in compare(manifest(tensors(), "trainer"), manifest(wrong))}
    assert set(found) == {
        ("missing", "model.layers.1.self_attn.q_proj.weight"),
        ("unexpected", "model.layers.4.self_attn.q_proj.weight"),
        ("shape", "model.embed_tokens.weight"),
        ("dtype", "model.norm.weight"),
        ("value", "model.layers.0.mlp.up_proj.weight"),
    }
    assert "[8, 4] in trainer, [12, 4] in engine" in found["shape", "model.embed_tokens.weight"]
    assert "float32 in trainer, bfloat16 in engine" in found["dtype", "model.norm.weight"]


def test_permuted_layers_are_named_by_layer() -> None:
    right, wrong = tensors(), tensors()
    for name in right:
        for here, there in [("layers.2.", "layers.0."), ("layers.3.", "layers.1.")]:
            if here in name:
                wrong[name] = right[name.replace(here, there)]
    wrong["model.layers.3.mlp.up_proj.weight"] = torch.zeros(6, 4)
    found = compare(manifest(right, "trainer"), manifest(wrong))
    assert [(d.kind, d.name) for d in found] == [
        ("permuted", "layer 2"),
        ("permuted", "layer 3"),
        ("value", "model.layers.3.mlp.up_proj.weight"),
    ]
    assert "layer 2 holds layer 0's tensors of trainer (2 of 2 that differ)" in found[0].detail
    assert "layer 3 holds layer 1's tensors of trainer (1 of 2 that differ)" in found[1].detail
