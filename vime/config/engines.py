"""Rules of ``rollout.engines``: vLLM servers that somebody else runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from vime.config.message import Finding
from vime.config.schema import Config

SERVER_URL = re.compile(r"https?://[A-Za-z0-9._~\[\]:-]+(/[^\s?#@]*)?")
_NAME = "rollout.engines"


def problems(c: Config) -> Iterator[Finding]:
    """What cannot be: wrong addresses, training (no weights are sent), and settings of engines of our own."""
    if not c.rollout.engines:
        return
    for url in c.rollout.engines:
        if problem := _url_problem(url):
            yield Finding(_NAME, f"{url}: {problem}")
    for url, count in Counter(url.rstrip("/") for url in c.rollout.engines).items():
        if count > 1:
            yield Finding(_NAME, f"names {url} {count} times")
    if not c.needs_engines:
        return
    if not c.debug.rollout_only:
        text = "needs debug.rollout_only (vime rollout sets it): no weights are sent to servers of somebody else"
        yield Finding(_NAME, text, ("debug.rollout_only",))
    own = {"rollout.num_engines": c.rollout.num_engines != 1, "rollout.engine_tp": c.rollout.engine_tp != 1}
    for path, is_set in (own | {"rollout.serve_openai": c.rollout.serve_openai}).items():
        if is_set:
            yield Finding(path, "contradicts rollout.engines: no engine of our own is started", (_NAME,))


def doubtful(c: Config) -> Iterator[Finding]:
    """Settings that are ignored."""
    if not c.rollout.engines:
        return
    if not c.needs_engines:
        yield Finding(_NAME, "is ignored: no engine is asked for recorded rollouts")
        return
    if c.vllm:
        yield Finding("vllm", "is ignored: the engines of rollout.engines are set up where they were started", (_NAME,))
    if c.cluster.ray_address is not None:
        yield Finding("cluster.ray_address", "is ignored: with rollout.engines no Ray cluster is needed", (_NAME,))


def _url_problem(url: str) -> str | None:
    if "@" in url:
        return "must not hold credentials, which would be saved with the run; set VIME_API_KEY instead"
    if not SERVER_URL.fullmatch(url) or not _is_address(url):
        return "must read http://HOST:PORT or https://HOST:PORT"
    if url.rstrip("/").endswith("/v1"):
        return "must end before /v1"
    return None


def _is_address(url: str) -> bool:
    """Whether there is a host, and a port that can be."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
