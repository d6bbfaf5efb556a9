"""Faults that align-check plants in a live engine: each changes what it says, and a heal and a sync undo it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Engine, make_config, make_prompt
from sending import send, tensors_of

from vime.errors import VimeError

SAMPLING = {"max_response_len": 8, "temperature": 0.5, "ignore_stop": True}
PROMPT = make_prompt(70)  # two blocks of the cache, and a few tokens
IDS = np.arange(40, dtype=np.int32)


@pytest.fixture(scope="module")
def engine(host, models) -> Engine:
    vllm = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
    rollout = {"sampling": SAMPLING}
    return Engine(host, "planted", make_config(str(models["dense"]), vllm=vllm, rollout=rollout))


@pytest.fixture(scope="module")
def weights(models) -> dict[str, Any]:
    return tensors_of(Path(models["dense"]))


def state(engine: Engine) -> tuple[Any, ...]:
    """Tokens, log-probs, scores and options: whatever a fault changes."""
    (sample,) = engine("generate", PROMPT, [3])
    options = engine("describe")["sampling"]
    return sample.token_ids.tolist(), sample.rollout_log_probs.tolist(), engine("score", IDS).tolist(), options


@contextmanager
def planted(engine: Engine, weights: dict[str, Any], fault: str) -> Iterator[str]:
    """In here ``fault`` is planted; after it the engine is bitwise as before."""
    before = state(engine)
    yield engine("plant", fault)
    engine("heal")
    send(engine, 0, weights)
    assert state(engine) == before


@pytest.mark.parametrize(
    ("fault", "option", "value"), [("top-p", "top_p", 0.8), ("generation-config", "repetition_penalty", 1.3)]
)
def test_options_from_somewhere_else_are_in_effect_and_described(engine, weights, fault, option, value) -> None:
    with planted(engine, weights, fault) as said:
        assert said == f"sampled with {option} = {value}"
        assert engine("describe")["sampling"][option] == value


def test_raw_log_probs_are_those_of_temperature_1(engine, weights) -> None:
    before = state(engine)
    with planted(engine, weights, "raw-log-probs"):
        assert engine("describe")["log_probs_mode"] == "raw_logprobs"
        tokens, log_probs, _, _ = state(engine)
        assert tokens == before[0]
        scores = engine("score", np.array(tokens, np.int32))
        assert np.allclose(log_probs[len(PROMPT.token_ids) :], scores[len(PROMPT.token_ids) :], atol=1e-4)
        assert not np.allclose(log_probs, before[1], atol=1e-3)


def test_a_dropped_tensor_is_not_received_and_the_old_value_stays(engine, weights) -> None:
    with planted(engine, weights, "dropped-tensor") as said:
        name = said.split()[0]
        other = {n: 1.5 * t if n == name else t for n, t in weights.items()}
        sent, received, held = send(engine, 1, other, is_strict=False)
        assert name == "model.layers.2.self_attn.o_proj.weight"
        assert set(sent.tensors) - set(received.tensors) == {name}
        assert held.tensors[name].digest != sent.tensors[name].digest


def test_swapped_layers_are_swapped_after_every_update(engine, weights) -> None:
    with planted(engine, weights, "swapped-layers") as said:
        assert said == "layers 0 and 2 are swapped, after every update too"
        sent, _, held = send(engine, 1, weights, is_strict=False)
        wrong = {n for n in sent.tensors if held.tensors[n].digest != sent.tensors[n].digest}
        assert {n.split(".")[2] for n in wrong} == {"0", "2"}


def test_a_nan_leaves_no_trace_in_the_cache(engine, weights) -> None:
    with planted(engine, weights, "nan-weight"), pytest.raises(VimeError):
        engine("generate", PROMPT, [3])


def test_a_stale_cache_survives_a_sync(engine, weights) -> None:
    def hits() -> int:
        before = engine("prefix_cache")[1]
        engine("generate", PROMPT, [3])
        return engine("prefix_cache")[1] - before

    with planted(engine, weights, "stale-prefix-cache"):
        engine("reset_prefix_cache")
        assert hits() == 0
        send(engine, 1, weights)
        assert hits() == 64


def test_the_zeroed_rotary_cache_comes_back(engine, weights) -> None:
    with planted(engine, weights, "zero-rotary"):
        (names,) = engine("changed_buffers")
        assert [name for name in names if "rotary" in name]
    assert engine("changed_buffers") == [[]]


def test_a_buffer_is_lost_in_sleep_and_the_engine_says_so(engine, weights) -> None:
    with planted(engine, weights, "lost-buffer"):
        assert engine("changed_buffers") == [[]]
        engine("sleep", 1)
        with pytest.raises(VimeError, match=r"buffers were lost or changed on rank 0: .*rotary"):
            engine("wake")


def test_a_heal_wakes_an_engine_that_sleeps(engine, weights) -> None:
    engine("sleep", 2)
    engine("heal")
    send(engine, 0, weights)
    assert state(engine)


def test_a_fault_of_somebody_else_is_refused(engine) -> None:
    with pytest.raises(VimeError, match="'noisy-kernel' is no fault of an engine"):
        engine("plant", "noisy-kernel")
