"""Experts saved, resumed and resharded; emptied and refilled; and exported as a Hugging Face model."""

from __future__ import annotations

import jobs
import numpy as np
import pytest
import random_models
from test_moe_layouts import EXPERTS

EP2 = {"dp": 2, "ep": 2}
# name, layout, layouts to load into
RUNS = [
    ("one process", {}, [EP2, {"pp": 2}]),
    ("ep2", EP2, [{}, {"tp": 2, "sequence_parallel": True}]),
    ("pp2 ep2", {"pp": 2, **EP2}, [EP2]),
    ("ep2 sharded", {**EP2, "distributed_optimizer": True}, [{"distributed_optimizer": True}]),
]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("qwen3_moe", False, 128, **EXPERTS)


@pytest.fixture(scope="module")
def saved(pool, model, tmp_path_factory):
    made, root = {}, tmp_path_factory.mktemp("checkpoints")

    def get(name: str, layout: dict):
        if name not in made:
            settings, path = jobs.config(model, parallel=layout), str(root / name.replace(" ", "_"))
            made[name] = path, pool.run(settings.parallel.world_size, jobs.save_and_go_on, settings, path, 128)[0]
        return made[name]

    return get


@pytest.mark.parametrize(("name", "layout"), [run[:2] for run in RUNS], ids=str)
def test_resume_in_the_same_layout_is_bitwise(pool, model, saved, name, layout):
    path, before = saved(name, layout)
    settings = jobs.config(model, parallel=layout)
    again = pool.run(settings.parallel.world_size, jobs.resume, settings, path, 128, before["scored"])[0]
    assert again["same_ref"]
    for which in ("saved", "after"):
        mine = again["loaded" if which == "saved" else which]
        assert [n for n, value in before[which].items() if not np.array_equal(value, mine[n])] == []
    assert (before["stats"].loss, before["stats"].grad_norm) == (again["stats"].loss, again["stats"].grad_norm)


@pytest.mark.parametrize(("name", "layout", "to"), [(r[0], r[1], to) for r in RUNS for to in r[2]], ids=str)
def test_another_layout_reshards(pool, model, saved, name, layout, to):
    path, before = saved(name, layout)
    settings = jobs.config(model, parallel=to)
    again = pool.run(settings.parallel.world_size, jobs.resume, settings, path, 128, before["scored"])[0]
    assert [n for n, value in before["saved"].items() if not np.array_equal(value, again["loaded"][n])] == []
    assert again["stats"].grad_norm == pytest.approx(before["stats"].grad_norm, rel=1e-5)
    for tensor, value in before["after"].items():
        assert np.abs(value - again["after"][tensor]).max() < 1e-6, tensor


@pytest.mark.parametrize("layout", [EP2, {**EP2, "distributed_optimizer": True}], ids=str)
def test_what_is_emptied_comes_back_bitwise(pool, model, layout):
    for one in pool.run(2, jobs.offload_round_trip, jobs.config(model, parallel=layout)):
        assert one["left"] == 0
        assert one["same"]
        assert one["same_ref"]


@pytest.mark.parametrize(("is_tied", "layout"), [(True, {"pp": 2}), (True, EP2), (False, {"pp": 2, **EP2})], ids=str)
def test_an_exported_folder_is_a_hugging_face_model(pool, tiny, tmp_path, is_tied, layout):
    """Case W05: tied, lm_head is absent and the embedding serves as head; transformers computes the same log-probs."""
    source, out = tiny("qwen3_moe", is_tied, 131, **EXPERTS), tmp_path / "hf"
    settings = jobs.config(source, parallel=layout)
    scored = pool.run(settings.parallel.world_size, jobs.export, settings, str(out))[0]
    before, after = random_models.tensors(source), random_models.tensors(out)
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) != is_tied
    assert not np.array_equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    hf = random_models.hf_log_probs(out, [s.token_ids for s in jobs.batch(vocab=131).samples()])
    assert np.abs(hf - scored).max() <= 2.4e-6
