"""Faults of the export on a stream of small tensors: the same names in the same order, other values."""

from __future__ import annotations

import json

import pytest
import torch

from vime.align.export_faults import EXPORT_FAULTS, NUM_PADDING_ROWS
from vime.align.faults import FAULTS, Place
from vime.errors import UsageError
from vime.models import load_spec

LAYER = "model.layers.{}.{}.weight"
GATE, UP = (LAYER.format(2, f"mlp.{name}_proj") for name in ("gate", "up"))


def spec_of(folder, **changes):
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 12,
        "vocab_size": 10,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return load_spec(folder)


def exported(spec):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in spec.tensors().items()}


def changed_by(fault, spec):
    """(tensors before, tensors after, names that changed)"""
    before = exported(spec)
    stream = list(EXPORT_FAULTS[fault].apply(spec, iter(before.items())))
    after = dict(stream)
    assert [name for name, _ in stream if name in before] == list(before)
    return before, after, [name for name in before if not torch.equal(before[name], after[name])]


def test_every_fault_of_the_export_is_here_and_says_what_it_does(tmp_path):
    assert set(EXPORT_FAULTS) == {name for name, fault in FAULTS.items() if fault.place == Place.EXPORT}
    spec = spec_of(tmp_path)
    assert EXPORT_FAULTS["swapped-gate-up"].says(spec) == f"{GATE} and {UP} have each other's values"


def test_two_layers_have_each_others_names(tmp_path):
    before, after, changed = changed_by("stage-offset", spec_of(tmp_path))
    assert {name.split(".")[2] for name in changed} == {"0", "2"}
    for name in changed:
        one, other = (".0.", ".2.") if ".0." in name else (".2.", ".0.")
        assert torch.equal(after[name], before[name.replace(one, other)])


def test_rows_of_query_and_key_are_exchanged(tmp_path):
    before, after, changed = changed_by("swapped-qk", spec_of(tmp_path))
    q, k = (LAYER.format(2, f"self_attn.{name}_proj") for name in "qk")
    assert changed == [q, k]
    assert torch.equal(after[q], torch.cat([before[k], before[q][4:]]))
    assert torch.equal(after[k], before[q][:4])


def test_gate_and_up_have_each_others_values(tmp_path):
    before, after, changed = changed_by("swapped-gate-up", spec_of(tmp_path))
    assert changed == [GATE, UP]
    assert torch.equal(after[GATE], before[UP])


def test_shards_joined_by_rank_keep_every_row_and_lose_their_order(tmp_path):
    before, after, changed = changed_by("joined-shards", spec_of(tmp_path))
    assert changed == [GATE, UP]
    assert torch.equal(after[GATE], torch.cat([before[GATE][:6], before[UP][:6]]))
    assert torch.equal(after[UP], torch.cat([before[GATE][6:], before[UP][6:]]))


def test_a_square_matrix_is_transposed(tmp_path):
    before, after, (name,) = changed_by("transposed", spec_of(tmp_path))
    assert torch.equal(after[name], before[name].T)
    assert after[name].is_contiguous()


def test_the_embedding_keeps_rows_of_padding(tmp_path):
    before, after, _ = changed_by("padded-rows", spec_of(tmp_path))
    name = "model.embed_tokens.weight"
    assert after[name].shape == (10 + NUM_PADDING_ROWS, 8)
    assert torch.equal(after[name][:10], before[name])


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_is_the_embedding_once_more(tmp_path, is_tied):
    before, after, changed = changed_by("duplicated-lm-head", spec_of(tmp_path, tie_word_embeddings=is_tied))
    assert torch.equal(after["lm_head.weight"], before["model.embed_tokens.weight"])
    assert changed == ([] if is_tied else ["lm_head.weight"])
    assert set(after) - set(before) == ({"lm_head.weight"} if is_tied else set())


def test_a_model_without_a_place_is_refused(tmp_path):
    spec = spec_of(tmp_path, num_hidden_layers=1)
    with pytest.raises(UsageError, match="the model has 1 layer"):
        EXPORT_FAULTS["stage-offset"].check(spec)
    with pytest.raises(UsageError, match="no matrix of layer 2 is square"):
        EXPORT_FAULTS["transposed"].check(spec_of(tmp_path, num_attention_heads=3))
