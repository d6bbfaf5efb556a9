"""What a run says when it starts, and what its closing table holds."""

import io

from fakes import sample

from vime.log import Progress
from vime.runs.introduce import introduce_engines
from vime.runs.result import _examples
from vime.types import RolloutBatch

INFO = {
    "vllm_version": "0.32.0",
    "max_model_len": 128,
    "kv_tokens": 4096,
    "stop_origins": {1: ("config.json",), 5: ("tokenizer", "generation_config.json")},
    "sampling": {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0, "stop_token_ids": [1, 5]},
    "warnings": ["generation_config.json has top_k = 5; rollout.sampling.top_k = 0 is used"],
}


def introduced(**changes):
    said = io.StringIO()
    introduce_engines(Progress(1, said, False), [{**INFO, **changes}])
    return said.getvalue()


def test_stop_ids_are_printed_with_their_origins():
    """Case R08: the union, and where each id comes from; an empty one is said."""
    assert "stop ids: 1 from config.json; 5 from tokenizer, generation_config.json" in introduced()
    assert "stop ids: none: every sample runs to the length limit" in introduced(stop_origins={})


def test_the_options_in_effect_are_printed_and_what_the_file_wanted_is_a_warning():
    """Case R17."""
    text = introduced()
    assert "sampling, sent with every request: temperature=1.0 top_k=0 repetition_penalty=1.0" in text
    assert "warning: generation_config.json has top_k = 5; rollout.sampling.top_k = 0 is used" in text


def test_examples_are_paired_by_prompt():
    """A prompt may have got no answer in the first or the last evaluation; the run must end well all the same."""
    before = RolloutBatch.from_samples(0, [sample(g, 0, text=f"old {g}") for g in (0, 1, 2)])
    after = RolloutBatch.from_samples(1, [sample(g, 0, text=f"new {g}") for g in (0, 2)])
    assert [(e.before, e.after) for e in _examples(before, after)] == [("old 0", "new 0"), ("old 2", "new 2")]
    assert _examples(before) == []
