"""Tied and untied models over one, two and four pipeline stages: who holds the embedding, and what is exported."""

from __future__ import annotations

import jobs
import numpy as np
import pytest
import random_models


def test_middle_stages_contribute_no_embedding(pool, tiny):
    """Case W04: four stages of a tied model; the last one holds a copy, which nobody exports."""
    folder = tiny("qwen3", True, 131)
    ranks = pool.run(4, jobs.held_and_exported, jobs.config(folder, parallel={"pp": 4}))
    tables = [[name for name in one["held"] if "embedding" in name or "output" in name] for one in ranks]
    assert tables == [["embedding.word_embeddings.weight"], [], [], ["output_layer.weight"]]
    source = random_models.tensors(folder)
    for one in ranks:
        assert one["exported"].keys() == source.keys()
        assert [name for name, value in source.items() if not np.array_equal(value, one["exported"][name])] == []
    assert "lm_head.weight" not in source


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2])
def test_lm_head_is_written_where_it_is_one(pool, tiny, tmp_path, is_tied, pp):
    """Case W05: a tied model's folder has no lm_head; transformers loads either and computes the same log-probs."""
    source, out = tiny("qwen3", is_tied, 131), tmp_path / "hf"
    settings = jobs.config(source, parallel={"pp": pp})
    scored = pool.run(settings.parallel.world_size, jobs.export, settings, str(out))[0]
    written = random_models.tensors(out)
    assert ("lm_head.weight" in written) != is_tied
    assert written.keys() == random_models.tensors(source).keys()
    assert random_models.config_json(out)["tie_word_embeddings"] is is_tied
    hf = random_models.hf_log_probs(out, [s.token_ids for s in jobs.batch(vocab=131).samples()])
    assert np.abs(hf - scored).max() <= 2.4e-6
