"""Being here puts this folder on the import path: tests of any folder can import ``fakes``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that has learned to add: its rollouts are coherent. To be read, not written."""
    from examples.tiny.make_model import make_tiny_model

    return Path(make_tiny_model(tmp_path_factory.mktemp("trained") / "model"))
