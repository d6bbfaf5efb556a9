"""A registry of this machine that belongs to one test."""

import os

import pytest

from vime.debug.stop import registry as registries
from vime.debug.stop.registry import FolderRegistry


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Where ``vime debug-attach`` looks, in this process and in those it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / f"vime-debug-{os.getuid()}"
    monkeypatch.setattr(registries, "root", lambda: folder)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    return FolderRegistry(folder)
