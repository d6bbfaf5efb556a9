"""A server of somebody else, asked over HTTP, gives what the engine itself gives, bit by bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from conftest import Engine, make_config, make_prompt
from tiny_models import CONTEXT, MODEL_EOS, TOKENIZER_EOS

from vime.backends.vllm.remote import RemoteEngine
from vime.data.tokenizer import load_tokenizer
from vime.errors import PromptTooLong, UsageError, VimeError
from vime.rollout.turns import Turns
from vime.types import Status


@pytest.fixture(scope="module")
def url(dense: Engine) -> str:
    return dense("serve_openai")


@pytest.fixture(scope="module")
def tokenizer(models: dict[str, Path]):
    return load_tokenizer(str(models["dense"]))


@pytest.fixture(scope="module")
def remote(url: str, models: dict[str, Path], tokenizer) -> RemoteEngine:
    engine = RemoteEngine(make_config(str(models["dense"]), vllm={}), url, 0, tokenizer)
    engine.info = asyncio.run(engine.start())
    return engine


def ask(engine: RemoteEngine, *args):
    return asyncio.run(engine.generate(*args))


def test_a_server_is_introduced(remote: RemoteEngine, dense: Engine, url: str, models: dict[str, Path]) -> None:
    info = remote.info
    assert (info["url"], info["model_id"], info["root"]) == (url, str(models["dense"]), str(models["dense"]))
    assert info["log_probs_mode"] == "processed_logprobs"
    assert info["max_model_len"] == CONTEXT
    assert info["warnings"] == []
    for name in ("stop_token_ids", "stop_origins", "sampling", "sampling_origin", "vllm_version"):
        assert info[name] == dense.info[name]


@pytest.mark.parametrize(
    "sampling",
    [
        None,
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 2.0, "max_response_len": 100},
        {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "min_response_len": 20},
        {"ignore_stop": True, "max_response_len": 40},
        {"stop_token_ids": [30, 31, 32, 33, 34, 35]},
    ],
    ids=str,
)
def test_the_same_seeds_give_the_same_bits(remote: RemoteEngine, dense: Engine, sampling) -> None:
    for group in range(2):
        prompt, seeds = make_prompt(4 + group, group), [7, 8, 9, 2**53 - 1]
        pairs = zip(ask(remote, prompt, seeds, sampling), dense("generate", prompt, seeds, sampling), strict=True)
        for there, here in pairs:
            assert there.token_ids.tolist() == here.token_ids.tolist()
            assert np.array_equal(there.rollout_log_probs, here.rollout_log_probs)
            assert np.array_equal(there.loss_mask, here.loss_mask)
            for name in ("group_id", "index", "prompt_len", "status", "text", "seed", "label", "prompt_text"):
                assert getattr(there, name) == getattr(here, name), name


def test_stop_ids_end_an_answer_and_are_kept(remote: RemoteEngine) -> None:
    """Case R08: of the model and of the tokenizer, through the server as well."""
    samples = ask(remote, make_prompt(4), range(40), {"max_response_len": 100, "temperature": 2.0})
    last = {int(s.token_ids[-1]) for s in samples if s.status is Status.COMPLETED}
    assert last == {MODEL_EOS, TOKENIZER_EOS}


def test_only_the_prompt_that_is_too_long_is_refused(remote: RemoteEngine) -> None:
    """Case R09."""
    with pytest.raises(PromptTooLong, match="prompt 9 has 128 tokens; the context of 128"):
        ask(remote, make_prompt(CONTEXT, 9), [1])
    (cut,) = ask(remote, make_prompt(CONTEXT - 3, 9), [1], {"ignore_stop": True})
    assert (cut.response_len, cut.status) == (3, Status.TRUNCATED)


def test_abort_and_cancel_end_what_runs(remote: RemoteEngine, dense: Engine) -> None:
    long = {"ignore_stop": True, "max_response_len": 120}

    async def abort():
        running = asyncio.ensure_future(remote.generate(make_prompt(), [1, 2], long))
        while len(remote._running) < 2:
            await asyncio.sleep(0.001)
        return await remote.abort(), await running

    dense("pause")  # nothing advances: the abort cannot come too late
    count, samples = asyncio.run(abort())
    assert count == 2
    assert [(s.status, s.response_len) for s in samples] == [(Status.ABORTED, 0)] * 2

    async def cancel():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(remote.generate(make_prompt(), [1, 2], long), 0.2)

    asyncio.run(cancel())
    dense("resume")
    assert remote._running == set()
    assert len(ask(remote, make_prompt(), [1])) == 1


class Local:
    """The engine behind the server, asked directly."""

    def __init__(self, engine: Engine, tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    async def generate(self, prompt, seeds, sampling):
        return self.engine("generate", prompt, seeds, sampling)


def test_several_turns_are_token_exact_over_http(remote: RemoteEngine, dense: Engine, tokenizer) -> None:
    """Case R06: every turn's prompt comes back as it was sent, and both ways give the same sample."""

    async def dialogue(engine):
        turns = Turns(make_prompt(5), seed=11, index=3, tokenizer=engine.tokenizer, max_response_len=60)
        for _ in range(3):
            await turns.ask(engine, {"max_response_len": 9, "temperature": 0.9})
            turns.observe("<40> <41>")
        return turns.sample()

    there, here = asyncio.run(dialogue(remote)), asyncio.run(dialogue(Local(dense, tokenizer)))
    assert there.token_ids.tolist() == here.token_ids.tolist()
    assert np.array_equal(there.rollout_log_probs, here.rollout_log_probs)
    assert np.array_equal(there.loss_mask, here.loss_mask)
    assert there.metadata["num_turns"] == 3
    (hole,) = {
        tuple(there.token_ids[i : i + 2]) for i in np.flatnonzero(np.diff(there.loss_mask.astype(int)) == -1) + 1
    }
    assert hole == (40, 41)


def test_what_the_server_refuses_is_quoted(remote: RemoteEngine) -> None:
    with pytest.raises(VimeError, match=r"http://127\.0\.0\.1:\d+/v1/completions answered 400: '.*vocab"):
        ask(remote, make_prompt(first=10_000), [1])


def test_addresses_that_lead_nowhere(remote: RemoteEngine, models: dict[str, Path], tokenizer, url: str) -> None:
    config = make_config(str(models["dense"]), vllm={})
    with pytest.raises(VimeError, match=r"^http://127\.0\.0\.1:9: no server answers there") as refused:
        asyncio.run(RemoteEngine(config, "http://127.0.0.1:9", 0, tokenizer).start())
    assert "vllm serve" in refused.value.hint
    with pytest.raises(VimeError, match=r"/v2/v1/models answered 404: ") as lost:
        asyncio.run(RemoteEngine(config, f"{url}/v2", 0, tokenizer).start())
    assert "without a path" in lost.value.hint
    other = make_config(str(models["llama"]), vllm={})
    info = asyncio.run(RemoteEngine(other, url, 0, tokenizer).start())
    (warning,) = info["warnings"]
    assert f"serves '{models['dense']}'" in warning
    assert f"is that model.path = '{models['llama']}'?" in warning
    with pytest.raises(VimeError, match="was not asked yet what it serves"):
        ask(RemoteEngine(config, url, 0, tokenizer), make_prompt(), [1])
    with pytest.raises(UsageError, match=r"sampling\.tempature"):
        ask(remote, make_prompt(), [1], {"tempature": 1.0})
