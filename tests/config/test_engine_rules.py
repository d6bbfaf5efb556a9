"""Rules of ``rollout.engines``."""

from __future__ import annotations

import pytest

from vime.config.load import load
from vime.config.rules import check
from vime.config.schema import Config
from vime.errors import ConfigError

URL = "http://127.0.0.1:8000"


def config_of(*urls: str, **sections) -> Config:
    rollout = {"engines": list(urls) or [URL], **sections.pop("rollout", {})}
    debug = {"rollout_only": True, **sections.pop("debug", {})}
    base = {"model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]}}
    return Config.model_validate({**base, "rollout": rollout, "debug": debug, **sections})


def findings(config: Config) -> tuple[list[str], list[str]]:
    return tuple([f"{f.path}: {f.text}" for f in found] for found in check(config))


@pytest.mark.parametrize("url", [URL, "https://vllm.example.com", "http://[::1]:80/", "https://gate.example/team/a"])
def test_addresses(url: str) -> None:
    assert findings(config_of(url)) == ([], [])


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000: must read http://HOST:PORT or https://HOST:PORT"),
        ("http://", "http://: must read http://HOST:PORT"),
        ("http://a b", "http://a b: must read http://HOST:PORT"),
        ("http://host:80?key=1", "must read http://HOST:PORT"),
        ("http://host:80/v1", "http://host:80/v1: must end before /v1"),
        ("http://host:80/v1/", "must end before /v1"),
        ("http://me:secret@host:80", "@host:80: must not hold credentials"),
        ("http://host:99999", "http://host:99999: must read http://HOST:PORT"),
        ("http://host:0", "must read http://HOST:PORT"),
        ("http://host:80:81", "must read http://HOST:PORT"),
        ("http://::::", "must read http://HOST:PORT"),
        ("http://[::1:80", "must read http://HOST:PORT"),
    ],
)
def test_addresses_that_are_refused(url: str, what: str) -> None:
    (problem,), _ = findings(config_of(url))
    assert what in problem


@pytest.mark.parametrize(
    "url", ["http://me:secret@host:80", "http://me:sec/secret@host", f"http://{'m' * 90}:secret@host"]
)
def test_credentials_are_not_printed(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([], ["model.path=m", "data.prompts=['a']", "debug.rollout_only=true", f'rollout.engines=["{url}"]'])
    (problem,) = caught.value.problems
    assert problem.startswith('rollout.engines = ["http://...@host')
    assert ": http://...@host" in problem
    assert "secret" not in problem
    assert "mmm" not in problem


@pytest.mark.parametrize("url", ["http://a:1", "http://[::1]:80/", "http://h.example", "http://1.2.3.4:65535/x"])
def test_what_is_taken_for_an_address_is_one_for_the_client(url: str) -> None:
    httpx = pytest.importorskip("httpx")
    assert findings(config_of(url)) == ([], [])
    assert httpx.URL(url).host


def test_a_server_is_named_once() -> None:
    assert findings(config_of(URL, f"{URL}/"))[0] == [f"rollout.engines: names {URL} 2 times"]


def test_no_weights_are_sent_to_others() -> None:
    (problem,), _ = findings(config_of(debug={"rollout_only": False}))
    assert problem.startswith("rollout.engines: needs debug.rollout_only")
    problems, _ = findings(config_of(rollout={"num_engines": 2, "engine_tp": 2, "serve_openai": True}))
    assert problems == [
        f"rollout.{name}: contradicts rollout.engines: no engine of our own is started"
        for name in ("num_engines", "engine_tp", "serve_openai")
    ]


def test_what_is_ignored_is_said() -> None:
    _, doubtful = findings(config_of(vllm={"max_num_seqs": 4}, cluster={"ray_address": "host:1"}))
    assert [text.partition(":")[0] for text in doubtful] == ["vllm", "cluster.ray_address"]
    recorded = {"rollout_only": False, "train_only": True, "load_rollout_data": "data_{rollout_id}.pt"}
    problems, doubtful = findings(config_of(debug=recorded))
    assert problems == []
    assert "rollout.engines: is ignored: no engine is asked for recorded rollouts" in doubtful
