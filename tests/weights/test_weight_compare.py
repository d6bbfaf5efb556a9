"""Every fault of a weight dump is named by its cause; equal weights raise nothing."""

from __future__ import annotations

import pytest
import torch
from made_weights import FFN, HIDDEN, LAYERS, VOCAB, Tensors, dump_of, found, lines, weights

from vime.errors import UsageError
from vime.weights.compare import Kind, diff

Q1, K1, V1 = (f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv")
GATE, UP, DOWN = (f"model.layers.2.mlp.{p}_proj.weight" for p in ("gate", "up", "down"))
O1 = "model.layers.1.self_attn.o_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def plain_order(parts: list[torch.Tensor], tp: int) -> list[torch.Tensor]:
    """The shards of fused ranks joined in rank order, read as if they were part after part."""
    joined = torch.cat([part.chunk(tp)[rank] for rank in range(tp) for part in parts])
    return list(joined.split([len(part) for part in parts]))


@pytest.mark.parametrize("with_tensors", [False, True])
def test_equal_weights_raise_nothing(with_tensors: bool) -> None:
    result = found(weights(), weights(), with_tensors)
    assert result.is_equal
    assert result.summary == f"trainer = checkpoint: {len(weights())}/{len(weights())} tensors bitwise equal"
    assert {t.kind for t in result.tensors} == {Kind.EQUAL}
    assert result.worst(3) == []


def test_missing_extra_and_renamed() -> None:
    """Cases W19 and W22."""
    b = weights()
    del b[UP]
    b["visual.patch.weight"] = torch.randn(3, 3)
    b[GATE.replace("gate_proj", "w1")] = b.pop(GATE)
    assert lines(found(weights(), b)) == [
        f"missing: {UP}: in checkpoint, not in trainer",
        "extra: visual.patch.weight: in trainer, not in checkpoint",
        f"renamed: {GATE}: is called {GATE.replace('gate_proj', 'w1')} in trainer",
    ]


def test_layers_without_their_stage_offset_are_one_finding_each() -> None:
    """Case W01: the second stage of two names its layers from 0 again."""
    a, b = weights(), weights()
    for name in b:
        for layer in (2, 3):
            if f".layers.{layer}." in name:
                b[name] = a[name.replace(f".layers.{layer}.", f".layers.{layer - 2}.")]
    result = found(a, b)
    num = sum(".layers.2." in name for name in a)
    same = num - 1  # norms that are all ones are alike everywhere
    assert lines(result) == [
        f"permuted layers: layer 2: layer 2 holds layer 0's tensors: the stage offset is missing ({same} of {num})",
        f"permuted layers: layer 3: layer 3 holds layer 1's tensors: the stage offset is missing ({same} of {num})",
    ]
    assert result.num_equal == len(a) - 2 * same


def test_swapped_layers_are_no_missing_offset() -> None:
    a, b = weights(), weights()
    for name in a:
        if ".layers.0." in name:
            other = name.replace(".layers.0.", ".layers.3.")
            b[name], b[other] = a[other], a[name]
    texts = lines(found(a, b))
    assert [t.split(" (")[0] for t in texts] == [
        "permuted layers: layer 0: layer 0 holds layer 3's tensors and the other way round",
        "permuted layers: layer 3: layer 3 holds layer 0's tensors and the other way round",
    ]


@pytest.mark.parametrize(("one", "other"), [(GATE, UP), (K1, V1), (EMBEDDING, HEAD)])
def test_swapped_tensors_are_a_pair(one: str, other: str) -> None:
    a, b = weights(), weights()
    b[one], b[other] = a[other], a[one]
    first, second = sorted((one, other))
    assert lines(found(a, b)) == [f"swapped: {first}: and {second} are swapped"]


def test_a_tensor_in_another_place_alone() -> None:
    a, b = weights(), weights()
    b[UP] = a[GATE]
    assert lines(found(a, b)) == [f"swapped: {UP}: holds {GATE}"]


@pytest.mark.parametrize("tp", [2, 4])
def test_gate_and_up_in_plain_rank_order(tp: int) -> None:
    """Case W07: right shape, wrong rows; the multiset of rows is the same, and the manifest alone says so."""
    a, b = weights(), weights()
    b[GATE], b[UP] = plain_order([a[GATE], a[UP]], tp)
    (text,) = lines(found(a, b))
    assert f"gate/up: shards of tp = {tp} joined in plain rank order" in text
    assert text.startswith(f"permuted rows: {GATE} and up_proj")


def test_query_key_value_in_plain_rank_order_and_by_groups() -> None:
    """Case W07."""
    a, b = weights(), weights()
    b[Q1], b[K1], b[V1] = plain_order([a[Q1], a[K1], a[V1]], 2)
    (text,) = lines(found(a, b))
    assert "qkv: shards of tp = 2 joined in plain rank order" in text


@pytest.mark.parametrize("name", [DOWN, O1, EMBEDDING, GATE])
def test_shards_in_the_order_of_other_ranks(name: str) -> None:
    a, b = weights(), weights()
    dim = 1 if name in (DOWN, O1) else 0
    b[name] = torch.cat(list(reversed(a[name].chunk(2, dim))), dim)
    (text,) = lines(found(a, b, with_tensors=True))
    assert name in text
    assert "tp = 2" in text if dim else "in the order of ranks [1, 0]" in text
    (alone,) = found(a, b).findings
    assert alone.kind in (Kind.ROWS, Kind.ELEMENTS)


def test_transposed() -> None:
    a, b = weights(), weights()
    b[GATE] = a[GATE].t().contiguous()
    assert lines(found(a, b)) == [f"transposed: {GATE}: [32, 16] -> [16, 32]"]
    assert "element by element" in lines(found(a, b, with_tensors=True))[0]
    square = weights() | {O1: torch.randn(HIDDEN, HIDDEN)}
    turned = square | {O1: square[O1].t().contiguous()}
    assert lines(found(square, turned, with_tensors=True)) == [f"permuted elements: {O1}: transposed (square)"]
    (text,) = lines(found(square, turned))
    assert "the same elements at other places: transposed, or" in text


@pytest.mark.parametrize("rank", [1, 2])
def test_experts_counted_from_0_on_every_rank(rank: int) -> None:
    """Case W10: under EP rank 1 holds experts 0..k again."""
    a, b = weights(experts=8), weights(experts=8)
    size = 8 // (rank + 1) if rank == 1 else 2
    first = rank * size
    for name in a:
        for e in range(first, first + size):
            if f".experts.{e}." in name:
                b[name] = a[name.replace(f".experts.{e}.", f".experts.{e - first}.")]
    result = found(a, b)
    assert len(result.findings) == LAYERS
    last = first + size - 1
    assert lines(result)[0].startswith(
        f"wrong experts: model.layers.0.mlp: experts {first}..{last} hold 0..{size - 1} again: rank "
    )


def test_zero_constant_and_not_finite() -> None:
    b = weights()
    b[DOWN] = torch.zeros(HIDDEN, FFN)
    b[UP] = torch.full((FFN, HIDDEN), 0.5)
    b[GATE] = b[GATE].clone()
    b[GATE][3, 4] = float("nan")
    b[GATE][0, 0] = float("inf")
    assert lines(found(weights(), b)) == [
        f"not finite: {GATE}: 2 of 512 elements",
        f"all zero: {DOWN}: all 512 elements are 0",
        f"constant: {UP}: all 512 elements are 0.5",
    ]


def test_dtype_drift_is_flagged_even_where_values_are_close() -> None:
    """Case W12: bfloat16 in a float32 engine, by its type, or by its values where it was cast back."""
    a, b = weights(), weights()
    b[GATE] = a[GATE].bfloat16()
    b[UP] = a[UP].bfloat16().float()
    result = found(a, b, with_tensors=True)
    assert lines(result) == [
        f"dtype: {GATE}: float32 -> bfloat16, norm and extremes close",
        f"rounded to bfloat16: {UP}: every element is what bfloat16 can hold: it went through it",
    ]
    assert 0 < result.worst(1)[0][1].relative_l2 < 5e-3


def test_rows_of_padding_and_other_shapes() -> None:
    """Case W06: both shapes are said."""
    b = weights()
    b[EMBEDDING] = torch.cat([b[EMBEDDING], torch.zeros(64, HIDDEN)])
    b[DOWN] = torch.randn(HIDDEN, FFN + 1)
    assert lines(found(weights(), b)) == [
        f"padded vocabulary: {EMBEDDING}: [64, 16] -> [128, 16]: 64 rows of padding were not cut off",
        f"shape: {DOWN}: [16, 32] -> [16, 33]",
    ]


def test_tied_embeddings() -> None:
    """Case W05: a head that repeats the embedding may be left out; one that does not is named."""
    tied = weights(is_tied=True)
    repeated = tied | {HEAD: tied[EMBEDDING]}
    for a, b in [(tied, repeated), (repeated, tied)]:
        result = found(a, b, is_tied=True)
        assert result.is_equal
        assert "repeats model.embed_tokens.weight" in result.notes[0]
    stale = tied | {HEAD: torch.randn(VOCAB, HIDDEN)}
    for a in (tied, repeated):
        text = "tied embeddings: lm_head.weight: tied, but in trainer it is not the embedding's bytes"
        assert lines(found(a, stale, is_tied=True)) == [text]


def test_plain_differences_say_where_and_how_much() -> None:
    """The shard of one rank is named by its rows; with tensors at hand the numbers are exact."""
    a, b = weights(), weights()
    b[GATE] = a[GATE].clone()
    b[GATE][16:] += 1.0
    (text,) = lines(found(a, b))
    assert text.startswith(f"value: {GATE}: rows 16..31 of 32 differ: the shard of rank 1 at tp = 2; l2 ")
    ((row, gap),) = found(a, b, with_tensors=True).worst(5)
    assert row.name == GATE
    assert gap.max_abs == pytest.approx(1.0, abs=1e-6)
    assert gap.relative_l2 == pytest.approx(256**0.5 / float(a[GATE].norm()), rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(a[GATE].double().view(-1), b[GATE].double().view(-1), dim=0)
    assert gap.cosine == pytest.approx(float(cosine), abs=1e-12)


def test_buffers_that_were_lost_or_changed() -> None:
    """Case W14: a rotary cache that is zero after a sleep."""
    cache = {"rotary.cos_sin_cache": torch.randn(8, 4), "scale": torch.ones(3)}
    before = dump_of(weights(), "engine-held", buffers=dump_of(cache).tensors)
    zeroed = dump_of(weights(), "engine-held", buffers=dump_of({"rotary.cos_sin_cache": torch.zeros(8, 4)}).tensors)
    result = diff(before, zeroed)
    assert lines(result) == [
        "buffer: rotary.cos_sin_cache: changed: all zero",
        "buffer: scale: lost: in engine-held, not in engine-held",
    ]
    assert result.num_equal == len(weights())
    assert diff(before, before).is_equal


def test_a_part_is_compared_with_the_whole() -> None:
    part = {name: t for name, t in weights().items() if ".layers.1." in name}
    a, b = dump_of(weights(), "checkpoint"), dump_of(part, "trainer", selection="layer 1")
    result = diff(a, b)
    assert result.is_equal
    assert len(result.tensors) == len(part)
    assert result.notes == (
        "only the tensors that both have are compared (checkpoint: all tensors and trainer: layer 1)",
    )


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="of family qwen3, trainer of llama"):
        diff(dump_of(weights(), "checkpoint", family="qwen3"), dump_of(weights(), "trainer", family="llama"))
    with pytest.raises(UsageError, match="have no name in common"):
        diff(dump_of(weights(), "checkpoint"), dump_of({"w": torch.ones(2)}, "trainer"))


def test_the_dictionary_is_plain_data() -> None:
    import json

    b: Tensors = weights()
    b[GATE] = b[GATE] * 2
    plain = found(weights(), b, with_tensors=True).as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["num_equal"] == len(b) - 1
    (row,) = [t for t in plain["tensors"] if t["kind"] != "equal"]
    assert (row["name"], row["layer"], row["cosine"]) == (GATE, 2, pytest.approx(1.0))
    assert row["a"]["shape"] == [FFN, HIDDEN]
