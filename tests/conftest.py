"""Being here puts this folder on the import path: tests of any folder can import ``fakes``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

CLUSTERS = (
    "test_attach_clusters.py",
    "test_attach_doctor.py",
    "test_attach_pausing.py",
    "test_run_ray.py",
    "test_stop_in_ray.py",
)
"""They start clusters that any process can find, or look at all that this machine has: one after the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side (``-n 2 --dist loadgroup``), those of a file stay together and share fixtures."""
    for item in items:
        name = item.path.name
        item.add_marker(pytest.mark.xdist_group("clusters" if name in CLUSTERS else name))


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that has learned to add: its rollouts are coherent. To be read, not written."""
    from examples.tiny.make_model import make_tiny_model

    return Path(make_tiny_model(tmp_path_factory.mktemp("trained") / "model"))
