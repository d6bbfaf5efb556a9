"""Example scripts, loaded by path: they are no package, and two of them have the same name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def examples() -> Path:
    return EXAMPLES


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """``script("tiny/make_model.py")`` is that file as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name.replace("/", "_").removesuffix(".py"), EXAMPLES / name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
