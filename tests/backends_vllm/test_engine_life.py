"""Start, death and end of an engine, and its OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request

import pytest
from conftest import Engine, make_config, make_prompt

from vime.errors import VimeError


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_info_says_what_runs(dense: Engine) -> None:
    info = dense.info
    assert info["max_model_len"] == 128
    assert info["kv_tokens"] >= 128
    assert info["vllm_version"].startswith("0.32")
    assert all(alive(pid) for pid in info["pids"])
    assert dense("memory")["rss"] > 50e6
    dense("check_health")


def test_a_killed_engine_core_is_named_within_seconds(host, models) -> None:
    """Case R25."""
    engine = Engine(host, "killed", make_config(str(models["dense"])))
    running = engine.submit("generate", make_prompt(), range(64), {"ignore_stop": True, "max_response_len": 120})
    (pid,) = engine.info["pids"]
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(VimeError, match=rf"engine \d+ is dead \(engine-core process \[{pid}\] ended\)"):
        running.result(60)
    assert time.monotonic() - start < 20
    for method, args in [("check_health", ()), ("generate", (make_prompt(), [1])), ("pause", ())]:
        with pytest.raises(VimeError, match="is dead"):
            engine(method, *args)
    engine("shutdown")


def test_shutdown_leaves_neither_processes_nor_files(host, models) -> None:
    engine = Engine(host, "ended", make_config(str(models["dense"])))
    folder = host.call("ended", "get", "environment").temp_dir
    assert os.path.isdir(folder)
    (pid,) = engine.info["pids"]
    engine("shutdown")
    assert not alive(pid)
    assert not os.path.exists(folder)
    engine("shutdown")
    with pytest.raises(VimeError, match="holds no complete weights: the engine is shut down"):
        engine("generate", make_prompt(), [1])


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_openai_server_is_the_same_engine(host, models) -> None:
    model = str(models["dense"])
    engine = Engine(host, "served", make_config(model))
    url = engine("serve_openai")
    assert url.startswith("http://127.0.0.1:")
    assert engine("serve_openai") == url
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        assert json.load(answer)["data"][0]["id"] == model
    (sample,) = engine("generate", make_prompt(), [7], {"ignore_stop": True})
    completion = post(
        f"{url}/v1/completions",
        {
            "model": model,
            "prompt": make_prompt().token_ids.tolist(),
            "max_tokens": 24,
            "temperature": 1.0,
            "seed": 7,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert completion["choices"][0]["token_ids"] == sample.token_ids[sample.prompt_len :].tolist()
    chat = post(
        f"{url}/v1/chat/completions",
        {"model": model, "messages": [{"role": "user", "content": "<30> <31>"}], "max_tokens": 5, "ignore_eos": True},
    )
    assert chat["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9} | {
        k: v for k, v in chat["usage"].items() if k.endswith("details")
    }
    engine("shutdown")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/v1/models", timeout=5)
