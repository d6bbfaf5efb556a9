from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import random_models
import ranks


@pytest.fixture(scope="session")
def pool() -> Iterator[ranks.Pool]:
    """Trainer processes, started when first needed and shared by all tests of the session."""
    made = ranks.Pool()
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model folder by family, tying and vocabulary; made once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(family: str = "qwen3", is_tied: bool = False, vocab_size: int = 128, **changes) -> Path:
        key = f"{family}-{is_tied}-{vocab_size}-{sorted(changes.items())}"
        if key not in made:
            folder = root / str(len(made))
            made[key] = random_models.make(folder, family, is_tied=is_tied, vocab_size=vocab_size, **changes)
        return made[key]

    return get
