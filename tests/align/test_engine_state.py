"""What the engines hold against the checkpoint, with engines that answer by script; real ones are in backends_vllm."""

import pytest
import torch
from safetensors.torch import save_file

from vime.align.engine_state import EngineState, engine_state
from vime.errors import UsageError
from vime.types import WeightManifest
from vime.weights.checkpoint import checkpoint_manifest
from vime.weights.manifest import build_manifest, compare

WEIGHTS = {
    "model.layers.0.mlp.weight": torch.arange(6.0).reshape(2, 3) / 7,
    "model.layers.1.mlp.weight": torch.arange(6.0).reshape(2, 3) / 11,
    "model.norm.weight": torch.ones(3),
}


@pytest.fixture
def folder(tmp_path):
    save_file({name: t.bfloat16() for name, t in WEIGHTS.items()}, tmp_path / "model.safetensors")
    return str(tmp_path)


class Scripted:
    def __init__(self, *weights, buffers=((),)):
        self.weights, self.buffers = weights, buffers

    def held(self) -> dict[str, WeightManifest]:
        return {f"engine {i}": build_manifest(0, "engine-held", w.items()) for i, w in enumerate(self.weights)}

    def changed_buffers(self) -> dict[str, list[list[str]]]:
        return {f"engine {i}": [list(names)] for i, names in enumerate(self.buffers)}


def loaded(**changes):
    """What an engine in float32 holds of the bfloat16 checkpoint."""
    return {name: t.bfloat16().float() for name, t in (WEIGHTS | changes).items()}


def test_a_manifest_of_the_checkpoint_in_the_types_of_the_engine(folder):
    in_float32 = checkpoint_manifest(folder, dict.fromkeys(WEIGHTS, "float32"))
    assert compare(in_float32, build_manifest(0, "engine", loaded().items())) == []
    as_stored = checkpoint_manifest(folder, {"model.norm.weight": "bfloat16"})
    assert list(as_stored.tensors) == ["model.norm.weight"]
    assert as_stored.tensors["model.norm.weight"].dtype == "bfloat16"


def test_an_engine_that_holds_the_checkpoint(folder):
    assert engine_state(Scripted(loaded(), loaded(), buffers=((), ())), folder) == EngineState(3, 0)


def test_a_changed_tensor_of_any_engine_is_named_once(folder):
    wrong = loaded() | {"model.norm.weight": torch.full((3,), float("nan"))}
    found = engine_state(Scripted(loaded(), wrong, wrong), folder)
    assert (found.num_tensors, found.num_wrong) == (3, 1)
    assert [(d.kind, d.name) for d in found.differences] == [("value", "model.norm.weight")]


def test_swapped_layers_are_named_as_such(folder):
    one, other = "model.layers.0.mlp.weight", "model.layers.1.mlp.weight"
    found = engine_state(Scripted(loaded(**{one: WEIGHTS[other], other: WEIGHTS[one]})), folder)
    assert [(d.kind, d.name) for d in found.differences] == [("permuted", "layer 0"), ("permuted", "layer 1")]
    assert found.num_wrong == 2


def test_lost_buffers_are_those_of_all_engines(folder):
    found = engine_state(Scripted(loaded(), buffers=(("rope",), ("rope", "scale"))), folder)
    assert found.lost_buffers == ("rope", "scale")


def test_where_no_worker_holds_whole_tensors_the_buffers_are_still_compared(folder):
    class Sharded(Scripted):
        def held(self):
            raise UsageError("rollout.engine_tp = 2: no worker holds whole tensors")

    found = engine_state(Sharded(buffers=(("rope",),)), folder)
    assert found == EngineState(lost_buffers=("rope",), unknown="rollout.engine_tp = 2: no worker holds whole tensors")


def test_engines_that_hold_nothing_are_not_found_right(folder):
    found = engine_state(Scripted({}), folder)
    assert (found.num_tensors, found.unknown) == (0, "the engines hold no tensor to compare")
