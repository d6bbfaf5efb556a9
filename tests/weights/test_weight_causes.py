"""A cause is named where it is planted, whatever the weights, and no other: random manifests with one fault each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_weights import FFN, LAYERS, Tensors, found, lines, weights

from vime.weights.compare import Kind
from vime.weights.values import block_of, record_of

Q, K, V = (f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv")
O = Q.replace("q_proj", "o_proj")
GATE, UP, DOWN = (f"model.layers.2.mlp.{p}_proj.weight" for p in ("gate", "up", "down"))
HEAD = "lm_head.weight"


def _fresh(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def _one_element(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    changed = tensor.clone()
    flat = changed.view(-1)
    at = seed % flat.numel()
    flat[at] = torch.nextafter(flat[at], torch.tensor(9.0))
    return changed


def _steps(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Half of the elements a step up, half a step down, the extremes untouched: norm and mean stay as they were."""
    up = torch.arange(tensor.numel()).view(tensor.shape) % 2 == seed % 2
    moved = torch.where(up, torch.nextafter(tensor, torch.tensor(9.0)), torch.nextafter(tensor, torch.tensor(-9.0)))
    is_edge = (tensor == tensor.min()) | (tensor == tensor.max())
    return torch.where(is_edge, tensor, moved)


def _other_model(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Other values of the same size that bfloat16 happens to hold: they did not come from ``tensor``."""
    return _fresh(tensor, seed + 1).bfloat16().float()


def _rows_moved(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    order = torch.arange(len(tensor)).roll(1 + seed % (len(tensor) - 1))
    return tensor[order]


def _columns_moved(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return tensor.roll(1 + seed % (tensor.shape[1] - 1), 1)


FAULTS: dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], set[Kind]]] = {
    "fresh": (_fresh, {Kind.VALUE}),
    "one element": (_one_element, {Kind.VALUE}),
    "steps": (_steps, {Kind.VALUE}),
    "another model": (_other_model, {Kind.VALUE}),
    "scaled": (lambda t, seed: t * (1 + 2.0 ** -(1 + seed % 20)), {Kind.VALUE}),
    "rounded": (lambda t, seed: t.bfloat16().float(), {Kind.ROUNDED}),
    "cut to bfloat16": (lambda t, seed: (t.view(torch.int32) & -65536).view(torch.float32), {Kind.ROUNDED}),
    "bfloat16": (lambda t, seed: t.bfloat16(), {Kind.DTYPE}),
    "zero": (lambda t, seed: torch.zeros_like(t), {Kind.ZERO}),
    "constant": (lambda t, seed: torch.full_like(t, 1.0 + seed), {Kind.CONSTANT}),
    "nan": (lambda t, seed: torch.where(t == t.max(), torch.nan, t), {Kind.NONFINITE}),
    "transposed": (lambda t, seed: t.t().contiguous(), {Kind.TRANSPOSED}),
    "turned and other values": (lambda t, seed: _fresh(t.t(), seed), {Kind.SHAPE}),
    "rows": (_rows_moved, {Kind.ROWS, Kind.ELEMENTS}),
    "columns": (_columns_moved, {Kind.ELEMENTS}),
}


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from([Q, O, GATE, DOWN]),
    fault=st.sampled_from(sorted(FAULTS)),
    seed=st.integers(0, 1000),
    with_tensors=st.booleans(),
)
def test_one_fault_in_one_tensor_is_that_and_nothing_else(name: str, fault: str, seed: int, with_tensors: bool) -> None:
    a, b = weights(), weights()
    change, kinds = FAULTS[fault]
    b[name] = change(a[name], seed)
    (finding,) = found(a, b, with_tensors).findings
    assert finding.kind in kinds, finding
    assert finding.tensors == (name,)
    if finding.kind == Kind.ELEMENTS and fault == "rows":
        assert "rows" in finding.detail


@settings(max_examples=60, deadline=None)
@given(layers=st.permutations(range(LAYERS)))
def test_permuted_layers_are_each_named_with_the_one_they_hold(layers: list[int]) -> None:
    a = weights()
    b = {name: a[_of_layer(name, layers)] for name in a}
    texts = lines(found(a, b))
    moved = [i for i in range(LAYERS) if layers[i] != i]
    assert len(texts) == len(moved)
    for i, text in zip(moved, texts, strict=True):
        assert f"layer {i} holds layer {layers[i]}'s tensors" in text
        assert "stage offset" not in text  # every layer is still there


def _of_layer(name: str, layers: list[int]) -> str:
    if ".layers." not in name:
        return name
    head, number, rest = name.split(".layers.")[0], *name.split(".layers.")[1].split(".", 1)
    return f"{head}.layers.{layers[int(number)]}.{rest}"


@pytest.mark.parametrize("size", [1, 2])
def test_every_stage_that_counts_from_0_is_a_missing_offset(size: int) -> None:
    a = weights()
    b = {name: a[_of_layer(name, [i % size for i in range(LAYERS)])] for name in a}
    texts = lines(found(a, b))
    assert len(texts) == LAYERS - size
    assert all("the stage offset is missing" in text for text in texts)


def test_one_tensor_of_another_layer_is_no_layer() -> None:
    a, b = weights(), weights()
    b[UP] = a[UP.replace(".2.", ".0.")]
    assert lines(found(a, b)) == [f"swapped: {UP}: holds {UP.replace('.2.', '.0.')}"]


@settings(max_examples=40, deadline=None)
@given(one=st.integers(0, 7), other=st.integers(0, 7))
def test_an_expert_alone_is_no_missing_offset(one: int, other: int) -> None:
    a, b = weights(experts=8), weights(experts=8)
    for name in a:
        if name.startswith(f"model.layers.1.mlp.experts.{one}."):
            b[name] = a[name.replace(f".experts.{one}.", f".experts.{other}.")]
    texts = lines(found(a, b))
    if one == other:
        assert texts == []
    else:
        assert texts == [f"wrong experts: model.layers.1.mlp: experts in another order: {one} holds {other}"]


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_every_rank_that_counts_its_experts_from_0(ep: int) -> None:
    """Case W10, with all ranks after the first at once."""
    a, b, size = weights(experts=8), weights(experts=8), 8 // ep
    for name in a:
        for expert in range(size, 8):
            if f".experts.{expert}." in name:
                b[name] = a[name.replace(f".experts.{expert}.", f".experts.{expert % size}.")]
    texts = lines(found(a, b))
    assert len(texts) == LAYERS
    assert all(f"experts {size}..7 hold 0..{size - 1} again: rank" in text for text in texts)


@pytest.mark.parametrize("kv", [32, 128])
def test_rows_of_query_key_and_value_of_different_sizes_are_compared_as_one(kv: int) -> None:
    """Case W07 with grouped queries: four times as many rows of queries as of keys."""
    a, b, tp = weights(), weights(), 2
    for name, rows in ((Q, 4 * kv), (K, kv), (V, kv)):
        a[name] = torch.randn(rows, 8)
    joined = torch.cat([a[name].chunk(tp)[rank] for rank in range(tp) for name in (Q, K, V)])
    b |= a | dict(zip((Q, K, V), joined.split([4 * kv, kv, kv]), strict=True))
    (text,) = lines(found(a, b))
    assert "qkv: shards of tp = 2 joined in plain rank order, each of them fused itself" in text
    assert "or 2 key/value groups not split back" in text  # the same order, of another cause


@pytest.mark.parametrize("rows", [64, 1024, 4096, 16384, 32768])
def test_blocks_of_heads_are_alike_whatever_their_number(rows: int) -> None:
    assert block_of((rows, 8), is_heads=True) == 4


def test_padding_that_is_not_all_that_differs() -> None:
    a, b = weights(), weights()
    b[HEAD] = torch.cat([a[HEAD] + 1, torch.ones(64, a[HEAD].shape[1])])
    (text,) = lines(found(a, b))
    assert text.endswith("64 rows of padding were not cut off; of the others the digests tell nothing")
    (text,) = lines(found(a, b, with_tensors=True))
    assert text.endswith("64 rows of padding were not cut off; other rows differ too")


def test_ones_under_two_names_are_not_renamed() -> None:
    a, b = weights(), weights()
    a["model.scale"], b["visual.scale"] = torch.ones(7), torch.ones(7)
    assert [str(f.kind) for f in found(a, b).findings] == ["missing", "extra"]


DTYPES = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float64", "int64", "uint8", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 6), (), (0, 4), (1,)])
def test_every_type_and_shape_is_recorded_and_compared(dtype: str, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 9).to(getattr(torch, dtype))
    record = record_of("w", value)
    assert (record.dtype, record.shape, len(record.bag)) == (dtype, shape, 32)
    a: Tensors = {"w": value}
    assert found(a, a, with_tensors=True).is_equal
    if len(shape) == 2 and value.numel() and dtype != "bool":
        (finding,) = found(a, {"w": value.flip(0)}, with_tensors=True).findings
        assert finding.kind == Kind.ROWS


def test_a_bag_forgets_the_order_alone() -> None:
    value = torch.randn(FFN, 16).bfloat16().float()
    bag = record_of("w", value).bag
    assert record_of("w", value[torch.randperm(FFN)][:, torch.randperm(16)]).bag == bag
    assert record_of("w", _steps(value, 0)).bag != bag
    assert record_of("w", _one_element(value, 5)).bag != bag
