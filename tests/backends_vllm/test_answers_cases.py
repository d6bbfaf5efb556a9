"""What the engine may answer, and what must never pass as data. No engine is started."""

import numpy as np
import pytest

from vime.backends.vllm.answers import response_arrays
from vime.backends.vllm.sampling import StopIds, request_options, with_changes
from vime.config.schema import Sampling
from vime.errors import UsageError, VimeError


def test_fewer_log_probs_than_tokens_are_refused():
    """Case R03: 2 ids and 1 log-prob; the message has the request and both lengths, and nothing of the text."""
    with pytest.raises(VimeError) as error:
        response_arrays("request-7", [5, 6], [-0.5])
    assert error.value.message == "request request-7: 2 tokens but 1 log-probs"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_no_number_is_refused(value):
    """Case R03."""
    with pytest.raises(VimeError) as error:
        response_arrays("request-7", [5, 6], [-0.5, value])
    for part in ("request request-7", "response token 1", "2 tokens, 2 log-probs"):
        assert part in error.value.message


def test_true_zeros_and_empty_answers_are_data():
    """Case R03: a log-prob of exactly 0.0 (probability 1) and an answer of no token are right values."""
    ids, log_probs = response_arrays("r", [5, 6], [0.0, -0.5])
    assert ids.tolist() == [5, 6]
    assert log_probs.tolist() == [0.0, -0.5]
    ids, log_probs = response_arrays("r", [], [])
    assert (len(ids), len(log_probs)) == (0, 0)
    assert (ids.dtype, log_probs.dtype) == (np.int32, np.float32)


def test_log_probs_that_were_asked_for_and_are_absent_are_an_error():
    """Case R05: not a mask of zeros that trains nothing; the first answer says so."""
    with pytest.raises(VimeError, match=r"request r: log-probs were asked for and are missing \(2 tokens, 0 log-probs"):
        response_arrays("r", [5, 6], None)
    assert request_options(Sampling(), StopIds({}))["logprobs"] == 0  # 0 more than the sampled token's; None is off


@pytest.mark.parametrize("name", ["logprobs", "top_logprobs", *Sampling.model_fields])
def test_an_explicit_null_turns_nothing_off(name):
    """Case R05: neither log-probs, which are no option at all, nor an option, whose default would hold unseen."""
    with pytest.raises(UsageError, match=rf"^sampling\.{name} = None"):
        with_changes(Sampling(), {name: None})


def test_log_probs_of_other_tokens_are_refused():
    """Case R06: ids that do not belong to the log-probs."""
    with pytest.raises(VimeError, match="log-prob 1 of 2 belongs to another token"):
        response_arrays("r", [5, 6], [-0.1, -0.2], [5, 7])
