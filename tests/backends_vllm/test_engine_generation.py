"""The engine generates what it says: ids, log-probs, seeds, stops, limits."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from conftest import Engine, make_config, make_prompt
from tiny_models import CONTEXT, MODEL_EOS, TOKENIZER_EOS

from vime.errors import PromptTooLong, UsageError
from vime.types import Status


@pytest.fixture(scope="module")
def reference(models):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32).eval()

    def log_probs(token_ids, temperature: float) -> np.ndarray:
        ids = torch.as_tensor(np.asarray(token_ids), dtype=torch.long)
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double() / temperature
        lp = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
        return np.concatenate([[0.0], lp.numpy()])

    return log_probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_distribution_sampled_from(dense: Engine, reference, temperature: float) -> None:
    samples = dense("generate", make_prompt(), [1, 2, 3, 4], {"temperature": temperature})
    for sample in samples:
        expected = reference(sample.token_ids, temperature)
        response = slice(sample.prompt_len, None)
        assert np.abs(sample.rollout_log_probs[response] - expected[response]).max() <= 1e-5
        assert (sample.rollout_log_probs[: sample.prompt_len] == 0).all()
        assert sample.loss_mask.tolist() == [False] * sample.prompt_len + [True] * sample.response_len
        assert sample.token_ids[: sample.prompt_len].tolist() == make_prompt().token_ids.tolist()


def test_score_equals_sampling_bitwise_and_transformers(dense: Engine, reference) -> None:
    (sample,) = dense("generate", make_prompt(), [5])
    scored = dense("score", sample.token_ids)
    assert scored.dtype == np.float32
    assert (scored[sample.prompt_len :] == sample.rollout_log_probs[sample.prompt_len :]).all()
    assert np.abs(scored - reference(sample.token_ids, 1.0)).max() <= 1e-5


def test_score_as_long_as_the_context(dense: Engine, reference) -> None:
    ids = np.arange(CONTEXT) % 400 + 10
    assert np.abs(dense("score", ids) - reference(ids, 1.0)).max() <= 1e-5
    with pytest.raises(PromptTooLong, match="129 tokens"):
        dense("score", np.arange(CONTEXT + 1))


def test_samples_of_a_group_differ_and_are_repeatable(dense: Engine) -> None:
    """Case R16."""
    prompt = make_prompt()
    first = dense("generate", prompt, [11, 12, 13, 14])
    assert len({tuple(s.token_ids) for s in first}) == 4
    assert [(s.index, s.seed) for s in first] == [(0, 11), (1, 12), (2, 13), (3, 14)]
    # another order, among other requests
    others = [dense.submit("generate", make_prompt(9, g, 100 + g), [g, g + 50]) for g in range(1, 8)]
    again = dense("generate", prompt, [14, 13, 12, 11])
    for future in others:
        future.result(60)
    for a, b in zip(first, reversed(again), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.rollout_log_probs == b.rollout_log_probs).all()


def test_seeds_hold_under_chunked_prefill(dense: Engine, host, models) -> None:
    chunked = make_config(
        str(models["dense"]),
        vllm={"max_num_batched_tokens": 48, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20},
    )
    engine = Engine(host, "chunked", chunked)
    prompts = [make_prompt(90, g, 10 + 3 * g) for g in range(4)]
    want = [dense("generate", p, [1, 2]) for p in prompts]
    running = [engine.submit("generate", p, [1, 2]) for p in prompts]
    got = [f.result(60) for f in running]
    # pausing drops every key and value: what was generated so far is prefilled again, in chunks
    long = engine.submit("generate", prompts[0], [1, 2], {"max_response_len": 38})
    engine("pause")
    engine("resume")
    for want_group, got_group in [*zip(want, got, strict=True), (want[0], long.result(60))]:
        for w, g in zip(want_group, got_group, strict=True):
            assert g.token_ids[: len(w.token_ids)].tolist() == w.token_ids.tolist()
            assert np.abs(g.rollout_log_probs[: len(w.token_ids)] - w.rollout_log_probs).max() <= 1e-5
    engine("shutdown")


def test_stop_ids_are_the_union_and_end_the_answer(dense: Engine) -> None:
    """Case R08: the model's and the tokenizer's end of text differ; neither replaces the other."""
    assert dense.info["stop_token_ids"] == [MODEL_EOS, TOKENIZER_EOS]
    assert "tokenizer" in dense.info["stop_origins"][TOKENIZER_EOS]
    seen = {}
    for group in range(6):
        for s in dense("generate", make_prompt(4, group), range(40), {"max_response_len": 100, "temperature": 2.0}):
            seen.setdefault((s.status, int(s.token_ids[-1])), s)
            assert not set(s.token_ids[s.prompt_len : -1]) & {MODEL_EOS, TOKENIZER_EOS}
    assert (Status.COMPLETED, MODEL_EOS) in seen
    assert (Status.COMPLETED, TOKENIZER_EOS) in seen
    assert any(status is Status.TRUNCATED for status, _ in seen)
    text = seen[Status.COMPLETED, MODEL_EOS].text
    assert text.split()[-1] == "<1>"  # an ordinary word of this tokenizer; only special tokens are left out
    assert "<5>" not in seen[Status.COMPLETED, TOKENIZER_EOS].text


def test_extra_stop_ids_and_ignore_stop(dense: Engine) -> None:
    (sample,) = dense("generate", make_prompt(), [3])
    assert sample.response_len == 24
    stop = int(sample.token_ids[sample.prompt_len + 4])
    (short,) = dense("generate", make_prompt(), [3], {"ignore_stop": True, "max_response_len": 7})
    assert (short.response_len, short.status) == (7, Status.TRUNCATED)
    with pytest.raises(UsageError, match=r"sampling\.tempature"):
        dense("generate", make_prompt(), [3], {"tempature": 1.0})
    with pytest.raises(UsageError, match=r"sampling\.top_p = 0\.0"):
        dense("generate", make_prompt(), [3], {"top_p": 0.0})
    assert stop not in (MODEL_EOS, TOKENIZER_EOS)


def test_only_the_prompt_that_is_too_long_is_refused(dense: Engine) -> None:
    """Case R09."""
    good = dense.submit("generate", make_prompt(), [1])
    with pytest.raises(PromptTooLong, match="prompt 9 has 128 tokens; the context of 128"):
        dense("generate", make_prompt(CONTEXT, 9), [1])
    assert len(good.result(60)) == 1
    (last,) = dense("generate", make_prompt(CONTEXT - 1, 9), [1])
    assert last.response_len == 1
    (cut,) = dense("generate", make_prompt(CONTEXT - 3, 9), [1], {"ignore_stop": True})
    assert (cut.response_len, cut.status) == (3, Status.TRUNCATED)


def test_generation_config_is_overridden_and_said(host, models, tmp_path) -> None:
    """Case R17, and the stop ids that only generation_config.json and the run's configuration name."""
    folder = tmp_path / "model"
    shutil.copytree(models["dense"], folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3, "eos_token_id": [1, 17]})
    )
    config = make_config(str(folder), rollout={"sampling": {"max_response_len": 24, "stop_token_ids": [33]}})
    engine = Engine(host, "generation_config", config)
    assert engine.info["warnings"] == [
        "generation_config.json has temperature = 0.6; rollout.sampling.temperature = 1.0 is used",
        "generation_config.json has top_k = 5; rollout.sampling.top_k = 0 is used",
        "generation_config.json has repetition_penalty = 1.3; rollout.sampling.repetition_penalty = 1.0 is used",
    ]
    assert engine.info["stop_token_ids"] == [1, 5, 17, 33]
    assert engine.info["sampling"]["top_k"] == 0
    assert engine.info["sampling_origin"]["max_response_len"] == "rollout.sampling"
    assert engine.info["sampling_origin"]["top_k"] == "default"
    plain = Engine(host, "plain", make_config(str(models["dense"])))
    a, b = (e("generate", make_prompt(), [1], {"ignore_stop": True})[0] for e in (engine, plain))
    assert a.token_ids.tolist() == b.token_ids.tolist()
    for one in (engine, plain):
        one("shutdown")


def test_abort_keeps_the_tokens_so_far(dense: Engine) -> None:
    full = dense("generate", make_prompt(), [1, 2], {"ignore_stop": True, "max_response_len": 120})
    running = dense.submit("generate", make_prompt(), [1, 2], {"ignore_stop": True, "max_response_len": 120})
    dense("pause")  # nothing advances: the abort cannot come too late
    assert dense("abort") == 2
    dense("resume")
    for sample, whole in zip(running.result(60), full, strict=True):
        assert sample.status is Status.ABORTED
        assert sample.response_len < 120
        assert sample.token_ids.tolist() == whole.token_ids[: len(sample.token_ids)].tolist()
        assert np.array_equal(sample.rollout_log_probs, whole.rollout_log_probs[: len(sample.token_ids)])
    assert dense("abort") == 0


def test_derived_and_unknown_engine_arguments_are_refused(host, models) -> None:
    config = make_config(str(models["dense"]), vllm={"max_model_len": 64, "logprobs_mode": "raw_logprobs"})
    with pytest.raises(UsageError) as error:
        Engine(host, "derived", config)
    assert "vllm.max_model_len = 64: comes from rollout.max_context_len" in str(error.value)
    assert "vllm.logprobs_mode = 'raw_logprobs'" in str(error.value)
    with pytest.raises(UsageError, match=r"vllm\.max_num_sequences is not an argument of vLLM 0\.32"):
        Engine(host, "unknown", make_config(str(models["dense"]), vllm={"max_num_sequences": 4}))
