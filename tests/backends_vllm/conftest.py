from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from engine_host import EngineHost

from vime.config.schema import Config
from vime.types import Prompt


def make_config(path: str, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"path": path},
        "data": {"prompts": ["unused.jsonl"]},
        "rollout": {"sampling": {"max_response_len": 24}},
        "vllm": {"max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20},
    }
    return Config.model_validate({**base, **sections})


def make_prompt(length: int = 6, group: int = 0, first: int = 10) -> Prompt:
    return Prompt(group, np.arange(first, first + length, dtype=np.int32), f"prompt {group}", label="x")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    os.environ["OMP_NUM_THREADS"] = "1"
    root = tmp_path_factory.mktemp("models")
    for name, kind, seed, changes in [
        ("dense", "qwen3", 0, {}),
        ("dense2", "qwen3", 1, {}),
        ("tied", "qwen3", 2, {"tie_word_embeddings": True}),
        ("tied2", "qwen3", 3, {"tie_word_embeddings": True}),
        ("llama", "llama", 4, {}),
        ("llama2", "llama", 5, {}),
    ]:
        tiny_models.save(tiny_models.build(kind, seed, **changes), root / name)
    return {p.name: p for p in root.iterdir()}


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


class Engine:
    """One engine of the host, called by method name."""

    def __init__(self, host: EngineHost, name: str, config: Config) -> None:
        self.host, self.name = host, name
        self.info = host.call(name, "open", config)

    def __call__(self, method: str, *args: Any) -> Any:
        return self.host.call(self.name, method, *args)

    def submit(self, method: str, *args: Any) -> Any:
        return self.host.submit(self.name, method, *args)


@pytest.fixture(scope="module")
def dense(host: EngineHost, models: dict[str, Path]) -> Engine:
    # blocks of 32 tokens: prompts of the tests are long enough to be cached
    vllm = {"max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
    return Engine(host, "dense", make_config(str(models["dense"]), vllm=vllm))
