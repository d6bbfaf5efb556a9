"""The command of the tiny example: its options, and its errors as people see them."""

from __future__ import annotations

import json
from pathlib import Path


def test_options_reach_the_recipe(script, tmp_path: Path, capsys) -> None:
    main = script("tiny/make_model.py").main
    assert main([str(tmp_path / "m"), "--family", "llama", "--tied", "--steps", "0", "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"model ready: {tmp_path / 'm'}\n"
    made = json.loads((tmp_path / "m" / "made_by.json").read_text(encoding="utf-8"))
    assert [made[name] for name in ("family", "tied", "steps", "seed", "chat")] == ["llama", True, 0, 3, False]


def test_a_folder_of_something_else_is_an_error_with_a_hint(script, tmp_path: Path, capsys) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    assert script("tiny/make_model.py").main([str(tmp_path), "--steps", "0"]) == 2
    assert "hint: name another folder" in capsys.readouterr().err
