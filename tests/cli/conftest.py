"""A folder with everything a run names."""

import json

import pytest
from tiny_run import RUN, make_model


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """The folder, which is the current one too. 8 prompts, 4 layers, 4 heads, 2 key/value heads, context 512."""
    make_model(tmp_path / "model")
    rows = [{"prompt": f"1+{i}", "label": str(1 + i)} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path
