"""What a server may answer, and what must never pass as data. The server is a script: nothing of vLLM is loaded."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import make_config, make_prompt
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SHAPE

from vime.backends.vllm import remote
from vime.backends.vllm.completions import FLOOR, LOGITS, PROBED, PROCESSED, RAW, mode_of, parse
from vime.backends.vllm.remote import RemoteEngine, is_same_model, not_neutral
from vime.backends.vllm.server import Server
from vime.config.schema import Sampling
from vime.errors import UsageError, VimeError
from vime.types import Status

BODY = {"prompt": [10, 11], "max_tokens": 3, "stop_token_ids": [1, 5]}


def choice(ids=(7, 8, 1), log_probs=(-0.5, -0.25, -1.0), reason="stop", prompt=(10, 11), names=None):
    names = [f"token_id:{i}" for i in ids] if names is None else names
    return {
        "token_ids": None if ids is None else list(ids),
        "prompt_token_ids": list(prompt),
        "logprobs": {"token_logprobs": None if log_probs is None else list(log_probs), "tokens": names},
        "finish_reason": reason,
    }


def test_an_answer() -> None:
    (ids, log_probs), status = parse("r", BODY, {"choices": [choice()]})
    assert (ids.tolist(), log_probs.tolist(), status) == ([7, 8, 1], [-0.5, -0.25, -1.0], Status.COMPLETED)
    (ids, log_probs), status = parse("r", BODY, {"choices": [choice((7, 8, 9), (0.0, 0.0, -1.0), "length")]})
    assert (ids.tolist(), log_probs.tolist(), status) == ([7, 8, 9], [0.0, 0.0, -1.0], Status.TRUNCATED)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (choice(log_probs=None), r"log-probs were asked for and are missing \(3 tokens, 0 log-probs\)"),
        (choice() | {"logprobs": None}, r"log-probs were asked for and are missing \(3 tokens"),
        (choice(log_probs=(-0.5, -0.25)), "3 tokens but 2 log-probs"),
        (choice(log_probs=(-0.5, None, -1.0)), r"1 of 3 log-probs are not finite, the first \(nan\)"),
        (choice(log_probs=(-0.5, -9999.0, -1.0)), r"not finite, the first \(-inf\) at response token 1"),
        (choice(names=["token_id:7", "token_id:6", "token_id:1"]), "log-prob 1 of 3 belongs to another token"),
        (choice(names=["a", "b", "c"]), "log-prob 0 of 3 belongs to another token"),
        (choice(log_probs=(-0.5, "-1", -1.0)), r"1 of 3 log-probs are not finite, the first \(nan\)"),
        (choice(names=["token_id:7", "token_id:8"]), "3 tokens, but log-probs are said to be of 2"),
        (choice() | {"logprobs": {"token_logprobs": [-1.0] * 3}}, "3 tokens, but log-probs are said to be of 0"),
        (choice() | {"logprobs": [-1.0] * 3}, "log-probs were asked for and are missing"),
        (choice() | {"token_ids": None}, "the answer has no token ids"),
        (choice() | {"token_ids": ["7", "8", "1"]}, "the answer has no token ids"),
        (choice((7, 2**31, 1)), "the answer has no token ids"),
        (choice() | {"prompt_token_ids": None}, "the answer does not say which prompt ids it is to"),
        (choice(prompt=(10, 12)), "answered another prompt: 2 tokens, 2 were sent; they differ from position 1 on"),
        (choice(prompt=(2, 10, 11)), "answered another prompt: 3 tokens, 2 were sent; they differ from position 0 on"),
        (choice(prompt=(10, 11, 2)), "3 tokens, 2 were sent; they differ from position 2 on"),
        (choice((7, 8, 9)), "stopped at token 9, which is no stop id that was sent"),
        (choice((7, 8), (-1.0, -1.0), "length"), "cut at 2 tokens, 3 were allowed"),
        (choice(reason="repetition"), "ended for the reason 'repetition'"),
        (choice(reason=["stop"]), r"ended for the reason \['stop'\]"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_answers_are_refused(answer, message: str) -> None:
    """Cases R03, R05 and R06: at the first sample, with the request and both lengths."""
    with pytest.raises(VimeError, match=f"^request r: .*{message}"):
        parse("r", BODY, {"choices": [answer]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["tokens", "token_logprobs"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(list(choice())), JSON, min_size=1), JSON)
def test_whatever_a_server_says_is_an_answer_or_one_clear_error(changes, content) -> None:
    for answer in ({"choices": [choice() | changes]}, content):
        with suppress(VimeError):  # any other error fails here
            (ids, log_probs), _ = parse("r", BODY, answer)
            assert len(ids) == len(log_probs)
            assert np.isfinite(log_probs).all()


@pytest.mark.parametrize("content", [{}, [], None, {"choices": []}, {"choices": "x"}])
def test_no_answer_at_all(content) -> None:
    with pytest.raises(VimeError, match="request r: 0 answers, one was asked for"):
        parse("r", BODY, content)


@pytest.mark.parametrize(
    ("top", "mode"),
    [
        ({0: math.log(0.25), 1: math.log(0.75), 2: FLOOR, 3: FLOOR}, PROCESSED),
        ({0: 0.0, 1: FLOOR}, PROCESSED),
        ({0: -7.1, 5: -0.7, 6: -1.4, 7: -2.0}, RAW),  # 0.50 + 0.25 + 0.14 of the probability
        ({0: -math.log(2), 9: -math.log(2)}, RAW),
        ({i: -math.log(100) for i in range(6)}, RAW),  # as flat as can be
        ({0: -2.0, 5: 3.5, 6: 1.0, 7: 0.5}, LOGITS),
        ({0: -1.5, 5: -0.1, 6: -0.2, 7: -0.3}, LOGITS),  # 0.90 + 0.82 + 0.74
        ({0: -33.1, 5: -30.0, 6: -31.0, 7: -32.0}, LOGITS),  # some token has at least 1/100
        ({0: 0.0, 5: -0.5, 6: -0.6, 7: -0.7}, LOGITS),  # token 0 has a logit of 0, others have one too
        ({0: -2.3, 1: -3.0, 2: FLOOR, 3: FLOOR}, LOGITS),  # logits after the options
        ({0: 0.0, 1: 0.0, 2: FLOOR}, LOGITS),
        ({0: 800.0, 1: 3.0}, LOGITS),
        ({0: FLOOR, 1: FLOOR}, LOGITS),
    ],
)
def test_which_log_probs_a_server_reports(top: dict[int, float], mode: str) -> None:
    assert mode_of(top, 100) == mode


def test_options_under_which_raw_log_probs_are_wrong() -> None:
    assert not_neutral(Sampling()) == []
    assert not_neutral(Sampling(temperature=0.0, max_response_len=9, stop_token_ids=[3])) == []
    found = not_neutral(Sampling(temperature=0.5, top_p=0.9, min_response_len=2))
    assert found == [
        "rollout.sampling.temperature = 0.5",
        "rollout.sampling.top_p = 0.9",
        "rollout.sampling.min_response_len = 2",
    ]


@pytest.mark.parametrize(
    ("root", "model_id", "is_same"),
    [
        ("/models/qwen", "anything", True),
        ("other", "/models/qwen", True),
        ("org/qwen", "name", True),
        ("org/llama", "policy", False),
    ],
)
def test_whether_a_server_could_serve_the_model(root: str, model_id: str, is_same: bool) -> None:
    assert is_same_model("/models/qwen", root, model_id) is is_same


# ---- a scripted server ---------------------------------------------------------------------------------------------


class Script:
    """An HTTP server whose answers are ``routes[path](body, headers)`` -> (status, text)."""

    def __init__(self) -> None:
        script = self
        self.routes: dict = {}
        self.requests: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections stay open where the client keeps them

            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict) -> None:
                if body:
                    script.requests.append(body)
                status, text = script.routes.get(self.path, lambda *_: (404, "Not Found"))(body, self.headers)
                data = (text if isinstance(text, str) else json.dumps(text)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # a client that waits no longer
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def serve(self, complete, models=None) -> None:
        card = {"id": "policy", "root": "/m/dense", "max_model_len": 64}
        self.routes |= {
            "/v1/models": lambda *_: (200, {"data": [card] if models is None else models}),
            "/version": lambda *_: (200, {"version": "0.32.0"}),
            "/v1/completions": complete,
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.close()


class Words:
    eos_token_id = 5

    def decode(self, ids, skip_special_tokens):
        return " ".join(f"<{i}>" for i in ids)


def engine_of(script: Script, tmp_path, **sampling) -> RemoteEngine:
    folder = tmp_path / "dense"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    config = make_config(str(folder), rollout={"sampling": {"max_response_len": 3, **sampling}, "timeout_seconds": 5.0})
    return RemoteEngine(config, script.url, 0, Words())


PROCESSED_TOP = {0: math.log(0.25), 1: math.log(0.75), 2: FLOOR}
RAW_TOP = {0: -7.1, 5: -0.7, 6: -1.4, 7: -2.0}
LOGITS_TOP = {0: 2.5, 5: 9.0, 6: 8.0}


def as_mode(top: dict[int, float], **answer):
    """Answers to ids of 10 and more; ``answer`` changes them."""

    def complete(body, headers):
        if "allowed_token_ids" not in body:
            return 200, {"choices": [choice(prompt=body["prompt"], **answer)]}
        assert body["allowed_token_ids"] == list(PROBED)
        found = choice((0,), (top[0],), "length", body["prompt"])
        found["logprobs"]["top_logprobs"] = [{f"token_id:{i}": v for i, v in top.items()}]
        return 200, {"choices": [found]}

    return complete


def test_every_option_is_sent(script: Script, tmp_path) -> None:
    """Case R17, over HTTP: nothing is left to the server's defaults."""
    script.serve(as_mode(PROCESSED_TOP))
    engine = engine_of(script, tmp_path, temperature=0.5)
    info = asyncio.run(engine.start())
    assert (info["log_probs_mode"], info["max_model_len"], info["warnings"]) == (
        PROCESSED,
        64,
        [f"{script.url}: its context is 64 tokens, 128 are wanted: the longest answers are cut"],
    )
    (sample,) = asyncio.run(engine.generate(make_prompt(2, first=10), [9], {"top_k": 4}))
    assert sample.text == "<7> <8> <1>"
    assert script.requests[-1] == {
        "model": "policy",
        "prompt": [10, 11],
        "seed": 9,
        "n": 1,
        "max_tokens": 3,
        "min_tokens": 0,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 4,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [],
        "stop_token_ids": [1, 5],
        "ignore_eos": True,
        "logprobs": 0,
        "stream": False,
        "echo": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_raw_log_probs_are_right_at_neutral_options_and_refused_elsewhere(script: Script, tmp_path) -> None:
    script.serve(as_mode(RAW_TOP))
    engine = engine_of(script, tmp_path)
    assert asyncio.run(engine.start())["log_probs_mode"] == RAW
    assert len(asyncio.run(engine.generate(make_prompt(2), [1], {"temperature": 0.0}))) == 1
    text = r"reports log-probs before sampling options, and rollout\.sampling\.temperature = 0\.5: they are not those"
    with pytest.raises(UsageError, match=text) as refused:
        asyncio.run(engine.generate(make_prompt(2), [1], {"temperature": 0.5}))
    assert "--logprobs-mode processed_logprobs" in refused.value.hint
    with pytest.raises(UsageError, match=text):
        asyncio.run(engine_of(script, tmp_path, temperature=0.5).start())


def test_logits_are_never_log_probs(script: Script, tmp_path) -> None:
    script.serve(as_mode(LOGITS_TOP))
    with pytest.raises(UsageError, match="reports logits, not log-probs"):
        asyncio.run(engine_of(script, tmp_path).start())


def test_a_server_whose_log_probs_cannot_be_measured(script: Script, tmp_path) -> None:
    script.serve(lambda body, _: (200, {"choices": [choice((0,), (0.0,), "length", body["prompt"])]}))
    with pytest.raises(VimeError, match="probe: the answer has no top_logprobs, which were asked for"):
        asyncio.run(engine_of(script, tmp_path).start())


@pytest.mark.parametrize("value", [None, FLOOR])
def test_log_probs_that_are_not_finite_are_judged_and_not_hidden(script: Script, tmp_path, value) -> None:
    """Case R18, over HTTP: as with an engine of our own, vime rollout judges them; elsewhere they end the run."""
    script.serve(as_mode(PROCESSED_TOP, log_probs=(-0.5, value, -1.0)))
    engine = engine_of(script, tmp_path)
    asyncio.run(engine.start())
    with pytest.raises(VimeError, match="1 of 3 log-probs are not finite"):
        asyncio.run(engine.generate(make_prompt(2, first=10), [9]))
    debug = engine.config.debug.model_copy(update={"rollout_only": True})
    engine.config = engine.config.model_copy(update={"debug": debug})
    (sample,) = asyncio.run(engine.generate(make_prompt(2, first=10), [9]))
    assert sample.status is Status.FAILED
    assert sample.metadata["failure"].startswith("1 of 3 log-probs are not finite")


def test_abort_ends_what_runs_and_what_waits(script: Script, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "MAX_REQUESTS", 2)
    answers, hold = as_mode(PROCESSED_TOP), threading.Event()
    script.serve(lambda body, headers: answers(body, headers) if "allowed_token_ids" in body or hold.wait(20) else None)
    engine = engine_of(script, tmp_path)
    asyncio.run(engine.start())

    async def abort():
        running = asyncio.ensure_future(engine.generate(make_prompt(2, first=10), range(5)))
        while len(script.requests) < 3:  # the probe and two
            await asyncio.sleep(0.01)
        return await engine.abort(), await running

    try:
        count, samples = asyncio.run(abort())
    finally:
        hold.set()
    assert (count, len(script.requests)) == (5, 3)
    assert [s.status for s in samples] == [Status.ABORTED] * 5
    assert engine._running == engine._aborted == set()


def test_one_request_that_fails_ends_the_others_of_its_group(script: Script, tmp_path) -> None:
    answers, hold = as_mode(PROCESSED_TOP), threading.Event()

    def complete(body, headers):
        if body.get("seed") == 1 and "allowed_token_ids" not in body:
            return 400, {"error": {"message": "no"}}
        return answers(body, headers) if "allowed_token_ids" in body or hold.wait(20) else None

    script.serve(complete)
    engine = engine_of(script, tmp_path)
    asyncio.run(engine.start())
    try:
        with pytest.raises(VimeError, match="answered 400: 'no'"):
            asyncio.run(asyncio.wait_for(engine.generate(make_prompt(2, first=10), [0, 1, 2]), 10))
    finally:
        hold.set()
    assert engine._running == set()


def test_the_api_key_is_sent_and_asked_for(script: Script, tmp_path, monkeypatch) -> None:
    def guarded(answer):
        def route(body, headers):
            is_right = headers.get("Authorization") == "Bearer secret-key"
            return answer(body, headers) if is_right else (401, {"error": "Unauthorized"})

        return route

    script.serve(as_mode(PROCESSED_TOP))
    script.routes = {path: guarded(answer) for path, answer in script.routes.items()}
    monkeypatch.delenv("VIME_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")  # of somebody else's service: it is not sent
    with pytest.raises(VimeError, match=r"/v1/models answered 401: .*Unauthorized") as refused:
        asyncio.run(engine_of(script, tmp_path).start())
    assert "set VIME_API_KEY in the environment" in refused.value.hint
    for wrong in ("secret-key\n", "", "secret kéy"):
        monkeypatch.setenv("VIME_API_KEY", wrong)
        with pytest.raises(UsageError, match="VIME_API_KEY in the environment must be printable ASCII") as refused:
            asyncio.run(engine_of(script, tmp_path).start())
        assert "secret" not in str(refused.value)
    monkeypatch.setenv("VIME_API_KEY", "secret-key")
    info = asyncio.run(engine_of(script, tmp_path).start())
    assert "secret-key" not in str(info)


def test_several_models_are_told_apart_by_name(script: Script, tmp_path) -> None:
    cards = [{"id": name, "root": name, "max_model_len": 128} for name in ("dense", "lora")]
    script.serve(as_mode(PROCESSED_TOP), cards)
    assert asyncio.run(engine_of(script, tmp_path).start())["model_id"] == "dense"
    script.serve(as_mode(PROCESSED_TOP), [{"id": name, "max_model_len": 128} for name in ("a", "b")])
    with pytest.raises(UsageError, match=r"serves 'a', 'b'; none or several could be model\.path"):
        asyncio.run(engine_of(script, tmp_path).start())


def test_what_is_no_server_of_vllm(script: Script, tmp_path) -> None:
    engine = engine_of(script, tmp_path)
    script.routes["/v1/models"] = lambda *_: (200, "<html>welcome</html>")
    with pytest.raises(VimeError, match="/v1/models answered no JSON: '<html>welcome</html>'"):
        asyncio.run(engine.start())
    script.serve(lambda *_: (500, {"error": {"message": "the engine is dead", "code": 500}}))
    with pytest.raises(VimeError, match="/v1/completions answered 500: 'the engine is dead'") as broken:
        asyncio.run(engine.start())
    assert broken.value.hint == "see the server's log"


def get(server: Server):
    async def ask():
        async with server.client() as client:
            return await server.get(client, "/v1/models")

    return asyncio.run(ask())


def test_no_wait_is_endless(script: Script) -> None:
    forever = threading.Event()
    script.routes["/v1/models"] = lambda *_: (forever.wait(20), "")
    try:
        with pytest.raises(VimeError, match=r"/v1/models did not answer within 0\.3 s"):
            get(Server(script.url, 0.3))
    finally:
        forever.set()


def test_an_answer_that_comes_in_drops_is_limited_as_a_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):  # the client waits no longer
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(100):
                    connection.sendall(b" ")
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(VimeError, match=r"/v1/models did not answer within 0\.4 s"):
            get(Server(f"http://127.0.0.1:{listening.getsockname()[1]}", 0.4))
        thread.join(10)
    assert not thread.is_alive()


def test_no_proxy_of_the_environment_is_used(script: Script, monkeypatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    script.routes["/v1/models"] = lambda *_: (200, {"data": []})
    assert get(Server(script.url, 5.0)) == {"data": []}


def test_no_connection_outlives_its_answer(script: Script) -> None:
    """Idle ones would add up to more sockets than a process may have, and are closed by the server at any time."""
    script.routes["/v1/models"] = lambda *_: (200, {})
    server = Server(script.url, 5.0)

    async def ask():
        async with server.client() as client:
            await asyncio.gather(*(server.get(client, "/v1/models") for _ in range(8)))
            return client._transport._pool.connections

    assert asyncio.run(ask()) == []


def test_vllm_is_not_loaded() -> None:
    heavy = ("vllm", "ray", "torch", "httpx")
    code = f"import sys, vime.backends.vllm.remote; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
