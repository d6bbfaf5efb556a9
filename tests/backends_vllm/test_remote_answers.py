"""What a server may answer, and what must never pass as data. The server is a script: nothing of vLLM is loaded."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import make_config, make_prompt
from tiny_models import SHAPE

from vime.backends.vllm.remote import LOGITS, PROCESSED, RAW, RemoteEngine, is_same_model, mode_of, not_neutral, parse
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
        (choice() | {"token_ids": None}, "the answer has no token ids"),
        (choice(prompt=(10, 12)), "answered another prompt: 2 tokens, 2 were sent; they differ from position 1 on"),
        (choice(prompt=(2, 10, 11)), "answered another prompt: 3 tokens, 2 were sent; they differ from position 0 on"),
        (choice(prompt=(10, 11, 2)), "3 tokens, 2 were sent; they differ from position 2 on"),
        (choice((7, 8, 9)), "stopped at token 9, which is no stop id that was sent"),
        (choice((7, 8), (-1.0, -1.0), "length"), "cut at 2 tokens, 3 were allowed"),
        (choice(reason="repetition"), "ended for the reason 'repetition'"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_answers_are_refused(answer, message: str) -> None:
    """Cases R03, R05 and R06: at the first sample, with the request and both lengths."""
    with pytest.raises(VimeError, match=f"^request r: .*{message}"):
        parse("r", BODY, {"choices": [answer]})


@pytest.mark.parametrize("content", [{}, [], None, {"choices": []}, {"choices": "x"}])
def test_no_answer_at_all(content) -> None:
    with pytest.raises(VimeError, match="request r: 0 answers, one was asked for"):
        parse("r", BODY, content)


def test_which_log_probs_a_server_reports() -> None:
    minus_inf = -9999.0
    assert mode_of(0.0, [0.0, minus_inf, minus_inf]) == PROCESSED
    assert mode_of(-7.1, [-0.7, -1.4, -2.0, -7.1]) == RAW  # 0.50 + 0.25 + 0.14 of the probability
    assert mode_of(-2.0, [3.5, 1.0, 0.5]) == LOGITS
    assert mode_of(-1.5, [-0.1, -0.2, -0.3]) == LOGITS  # 0.90 + 0.82 + 0.74
    assert mode_of(-math.log(2), [-math.log(2), -math.log(4)]) == RAW


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


def as_mode(allowed: float, top: tuple[float, ...]):
    def complete(body, headers):
        if "allowed_token_ids" not in body:
            return 200, {"choices": [choice(prompt=body["prompt"])]}
        found = choice((0,), (allowed,), "length", body["prompt"])
        found["logprobs"]["top_logprobs"] = [{f"token_id:{i}": v for i, v in enumerate(top)}]
        return 200, {"choices": [found]}

    return complete


def test_every_option_is_sent(script: Script, tmp_path) -> None:
    """Case R17, over HTTP: nothing is left to the server's defaults."""
    script.serve(as_mode(0.0, ()))
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
    script.serve(as_mode(-7.1, (-0.7, -1.4, -2.0)))
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
    script.serve(as_mode(2.5, (9.0, 8.0)))
    with pytest.raises(UsageError, match="reports logits, not log-probs"):
        asyncio.run(engine_of(script, tmp_path).start())


def test_the_api_key_is_sent_and_asked_for(script: Script, tmp_path, monkeypatch) -> None:
    def guarded(answer):
        def route(body, headers):
            is_right = headers.get("Authorization") == "Bearer secret-key"
            return answer(body, headers) if is_right else (401, {"error": "Unauthorized"})

        return route

    script.serve(as_mode(0.0, ()))
    script.routes = {path: guarded(answer) for path, answer in script.routes.items()}
    for name in ("VIME_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(VimeError, match=r"/v1/models answered 401: .*Unauthorized") as refused:
        asyncio.run(engine_of(script, tmp_path).start())
    assert "set VIME_API_KEY or OPENAI_API_KEY" in refused.value.hint
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    monkeypatch.setenv("VIME_API_KEY", "secret-key")
    info = asyncio.run(engine_of(script, tmp_path).start())
    assert "secret-key" not in str(info)


def test_several_models_are_told_apart_by_name(script: Script, tmp_path) -> None:
    cards = [{"id": name, "root": name, "max_model_len": 128} for name in ("dense", "lora")]
    script.serve(as_mode(0.0, ()), cards)
    assert asyncio.run(engine_of(script, tmp_path).start())["model_id"] == "dense"
    script.serve(as_mode(0.0, ()), [{"id": name, "max_model_len": 128} for name in ("a", "b")])
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


def test_no_wait_is_endless(script: Script) -> None:
    forever = threading.Event()
    script.routes["/v1/models"] = lambda *_: (forever.wait(20), "")
    server = Server(script.url, 0.3)

    async def ask():
        async with server.client() as client:
            return await server.get(client, "/v1/models")

    try:
        with pytest.raises(VimeError, match=r"/v1/models did not answer within 0\.3 s"):
            asyncio.run(ask())
    finally:
        forever.set()


def test_vllm_is_not_loaded() -> None:
    heavy = ("vllm", "ray", "torch", "httpx")
    code = f"import sys, vime.backends.vllm.remote; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
