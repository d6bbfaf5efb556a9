"""Our layer map is megatron's."""

from __future__ import annotations

import jobs

from vime.config.schema import Parallel
from vime.models import layer_map
from vime.models.spec import ModelSpec


def test_layer_map_is_megatrons(pool):
    cases = [
        (8, {"pp": 2}),
        (8, {"pp": 4, "vpp": 2}),
        (8, {"pp": 2, "vpp": 4}),
        (7, {"pp": 2, "num_layers_in_first_stage": 3}),
        (7, {"pp": 3, "num_layers_in_last_stage": 1}),
        (9, {"pp": 4, "num_layers_in_first_stage": 2, "num_layers_in_last_stage": 1}),
        (10, {"pp": 3, "vpp": 2, "num_layers_in_first_stage": 2}),
        (12, {"pp": 4, "vpp": 2, "num_layers_in_first_stage": 2, "num_layers_in_last_stage": 2}),
    ]
    theirs = pool.run(1, jobs.layer_offsets, cases)[0]
    for (num_layers, options), placed in zip(cases, theirs, strict=True):
        spec = ModelSpec("llama", num_layers, 8, 2, 2, 4, 8, 8, False, False, False, 1e-6, {}, 8, "float32")
        assert layer_map(spec, Parallel(**options)) == placed, options
