"""What each engine fault changes, and nothing else. Without vLLM: on a model that transformers made."""

import pytest
import tiny_models
import torch

from vime.align.faults import FAULTS, Place, is_in_engine
from vime.backends.vllm.faults import PLANTERS, plant
from vime.backends.vllm.walk_faults import IN_ENGINE, WORKER_PLANTERS
from vime.errors import UsageError


@pytest.fixture
def model():
    return tiny_models.build("llama", 0)


def planted(model, name):
    """(what was said, names of parameters that changed)"""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        said = PLANTERS[name](model)
    return said, [n for n, p in model.named_parameters() if not torch.equal(before[n], p)], before


def test_every_fault_of_an_engine_has_a_planter_and_no_other():
    walked = {*WORKER_PLANTERS, *IN_ENGINE} - {"dropped-tensor"}  # that one is told of as a fault of the sync
    assert set(PLANTERS) | walked == {name for name, fault in FAULTS.items() if fault.place == Place.ENGINE}
    assert set(PLANTERS) == {name for name in FAULTS if is_in_engine(name)}
    assert is_in_engine("nan-weight")
    assert not is_in_engine("base-model")
    assert not is_in_engine("no such fault")


def test_one_element_is_nan(model):
    said, changed, _ = planted(model, "nan-weight")
    (name,) = changed
    assert said == f"{name}: element 0 is NaN"
    assert name == "model.layers.2.self_attn.q_proj.weight"
    assert torch.isnan(dict(model.named_parameters())[name]).sum() == 1


def test_every_weight_is_drawn_anew_and_the_same_way_each_time(model):
    _, changed, _ = planted(model, "random-weights")
    assert changed == [n for n, _ in model.named_parameters()]
    other = tiny_models.build("llama", 1)
    planted(other, "random-weights")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_two_layers_hold_each_others_weights(model):
    said, changed, before = planted(model, "swapped-layers")
    assert said == "layers 0 and 2 are swapped"
    now = dict(model.named_parameters())
    assert {n.split(".")[2] for n in changed} == {"0", "2"}
    for n in changed:
        twin = n.replace(".0.", ".*.").replace(".2.", ".0.").replace(".*.", ".2.")
        assert torch.equal(now[n], before[twin])


def test_the_rotary_cache_is_zero_and_no_parameter_changes(model):
    said, changed, _ = planted(model, "zero-rotary")
    assert changed == []
    assert "rotary" in said
    assert all((b == 0).all() for n, b in model.named_buffers() if "rotary" in n)


def test_a_model_without_a_place_for_the_fault_is_refused(model):
    bare = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="no rotary cache"):
        planted(bare, "zero-rotary")
    with pytest.raises(UsageError, match="no numbered layers"):
        planted(bare, "nan-weight")
    with pytest.raises(UsageError, match="the model has 1 layer"):
        planted(tiny_models.build("llama", 0, num_hidden_layers=1), "swapped-layers")
    with pytest.raises(UsageError, match="'base-model' is no fault of an engine"):
        plant(model, "base-model")


def test_layers_that_are_not_built_alike_cannot_be_swapped(model):
    mlp = model.get_submodule("model.layers.2.mlp")
    mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="layers 0 and 2 are not built alike"):
        planted(model, "swapped-layers")
