"""A place for TOML files."""

import pytest


@pytest.fixture
def write(tmp_path):
    """Writes a TOML file below ``tmp_path``; returns its path."""

    def write(text, name="run.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write
