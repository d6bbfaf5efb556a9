"""Is it human language? Over a small model that is one: clean, an engine that holds or computes something else, a
template of another family, prompts shown as the model sees them (case A20)."""

from dataclasses import replace

import numpy as np
import pytest
from two_sides import two_sides

from vime.align.checks.coherence import CHECK
from vime.types import RolloutBatch, Verdict
from vime.weights.checkpoint import checkpoint_manifest

TEMPERATURE = 1.5
"""Over 1 nobody expects certainty, which an untrained model has not."""


@pytest.fixture
def bench(net):
    return with_state(two_sides(net, TEMPERATURE))


def with_state(bench, lost=(), held=None):
    """What the engine holds, beside its answers."""
    own = checkpoint_manifest(str(bench.net.path), dict.fromkeys(bench.spec.tensors(), "float32"))
    bench.engine.manifest = lambda view: own if held is None else held(own)
    bench.damage = rendered
    bench.engine.changed_buffers = lambda: {"engine 0": [list(lost)]}
    return bench


def rendered(batch: RolloutBatch, text: str = "<bos>1+2=") -> RolloutBatch:
    """Prompts that were made with a template."""
    return replace(batch, rows=[{**row, "prompt_text": text} for row in batch.rows])


def shifted(by):
    def damage(batch: RolloutBatch) -> RolloutBatch:
        values_T = batch.rollout_log_probs_T + np.float32(by) * batch.loss_mask_T
        return rendered(replace(batch, rollout_log_probs_T=values_T))

    return damage


def test_an_engine_that_samples_what_the_model_says(bench):
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert found.measured.startswith("mean |engine - Hugging Face|")
    assert found.evidence[0].startswith("first prompt, as the model sees it: '<bos>1+2=', ids 1 ")


def test_an_engine_that_holds_something_else(bench):
    def swapped(own):
        tensors = dict(own.tensors)
        for name in [n for n in tensors if ".layers.0." in n]:
            other = name.replace(".layers.0.", ".layers.1.")
            tensors[name], tensors[other] = (
                replace(tensors[name], digest=own.tensors[other].digest),
                replace(tensors[other], digest=own.tensors[name].digest),
            )
        return replace(own, tensors=tensors)

    with_state(bench, held=swapped).damage = shifted(-1.0)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.cause.startswith("conversion: layers have each other's weights")
    assert any("<bos>1+2=" in line for line in found.evidence)


def test_a_lost_buffer(bench):
    with_state(bench, lost=["rotary.cos_sin_cache"]).damage = shifted(-1.0)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.cause.startswith("released buffers: rotary.cos_sin_cache")


def test_an_engine_that_computes_something_else(bench):
    bench.damage = shifted(-1.0)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.cause.startswith("the engine's computation")


def test_prompts_of_another_family(bench):
    """A20"""

    bench.damage = lambda batch: rendered(batch, "<|im_start|>user\n1+2=<|im_end|>")
    found = CHECK.run(bench)
    assert found.verdict in (Verdict.WARN, Verdict.FAIL)
    assert found.cause.startswith("chat template")
    assert "data.apply_chat_template" in found.next_step


def test_a_record_has_no_engine_to_ask(bench):
    bench.is_live = False
    bench.engine = None
    batch = with_state(two_sides(bench.net, TEMPERATURE)).batch
    bench.__dict__["batch"] = batch
    assert CHECK.run(bench).verdict == Verdict.PASS


def test_no_sampled_token(bench):
    bench.damage = lambda batch: replace(batch, loss_mask_T=batch.loss_mask_T & False)
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED
