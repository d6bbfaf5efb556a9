"""Dumps that are damaged, that lie, or that meet a system which refuses: said, and nothing half is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_weights import dump_of, entries, weights
from safetensors.torch import save_file

from vime.errors import UsageError, VimeError
from vime.weights import dump as dumping
from vime.weights.checkpoint import read_specs
from vime.weights.dump import held_alone, put_in_place, record_stream, writing_folder
from vime.weights.files import compare_paths, open_dumps
from vime.weights.manifest_file import read_dump, write_dump

Q = "model.layers.1.self_attn.q_proj.weight"


def _first(content: dict, **changes) -> dict:
    return content | {"tensors": [content["tensors"][0] | changes, *content["tensors"][1:]]}


LIES = {
    "shape": lambda c: _first(c, shape=[7, 7]),
    "negative": lambda c: _first(c, shape=[-64, 16]),
    "fraction": lambda c: _first(c, shape=[64.5, 16]),
    "digest": lambda c: _first(c, digest="0" * 64),
    "no text": lambda c: _first(c, digest=7),
    "dtype": lambda c: _first(c, dtype="float128"),
    "number": lambda c: _first(c, l2="big"),
    "nan": lambda c: _first(c, l2=float("nan")),
    "blocks": lambda c: _first(c, block=-1),
    "unknown field": lambda c: _first(c, surprise=1),
    "lost": lambda c: c | {"tensors": c["tensors"][:-1]},
    "about": lambda c: c | {"version": "one"},
    "no list": lambda c: c | {"tensors": 3},
    "other digest": lambda c: c | {"digest": "0" * 64},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    file = tmp_path / "trainer.manifest.json"
    write_dump(file, dump_of(weights()))
    read_dump(file)
    file.write_text(json.dumps(LIES[lie](json.loads(file.read_text()))))
    with pytest.raises(UsageError, match="damaged manifest"):
        read_dump(file)


def test_json_without_end_is_no_manifest(tmp_path: Path) -> None:
    file = tmp_path / "trainer.manifest.json"
    file.write_text("[" * 200_000)
    with pytest.raises(UsageError, match="is no manifest"):
        read_dump(file)


def test_names_that_look_like_paths_are_names(tmp_path: Path) -> None:
    strange = {"../../../etc/passwd": torch.randn(2, 2), "/abs": torch.randn(3), "<script>": torch.ones(2)}
    file = tmp_path / "trainer.manifest.json"
    write_dump(file, dump_of(strange))
    (found,) = compare_paths(file, file)
    assert found.is_equal
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name]


def test_tensors_that_are_not_those_of_the_manifest_are_said(tmp_path: Path) -> None:
    """Numbers of differences are taken from tensors only where these are what was digested."""
    changed = weights()
    changed[Q] = changed[Q] + 1
    for side, tensors in {"a": weights(), "b": changed}.items():
        (tmp_path / side / "trainer").mkdir(parents=True)
        record_stream(tensors.items(), entries(tensors), tmp_path / side / "trainer")
        write_dump(tmp_path / side / "trainer.manifest.json", dump_of(tensors))
    assert len(compare_paths(tmp_path / "a", tmp_path / "b")[0].findings) == 1
    file = tmp_path / "b" / "trainer" / "model.safetensors"
    save_file(changed | {Q: changed[Q] + 1}, file)
    with pytest.raises(UsageError, match=r"q_proj\.weight has other bytes than its manifest says"):
        compare_paths(tmp_path / "a", tmp_path / "b")
    save_file({n: t for n, t in changed.items() if n != Q}, file)
    with pytest.raises(UsageError, match=r"q_proj\.weight is not there"):
        compare_paths(tmp_path / "a", tmp_path / "b")


def test_a_cut_file_of_tensors_and_a_false_index_are_said(tmp_path: Path) -> None:
    save_file({"w": torch.randn(64, 64)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (4, 40, len(whole) - 100):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(UsageError, match="no complete safetensors file"):
            open_dumps(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    outside = json.dumps({"weight_map": {"w": "../model.safetensors"}})
    for text, message in {"{": "is no index", "[]": "is no index", outside: "which is no file beside it"}.items():
        index.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_specs(tmp_path)
    index.unlink()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json: is not JSON"):
        open_dumps(tmp_path)


@pytest.mark.parametrize("call", ["open", "fsync", "pwrite"])
def test_a_disk_that_refuses_is_an_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*arguments) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dumping.os, call, refuse)
    with pytest.raises(VimeError, match="cannot be written: No space left on device"):
        record_stream(weights().items(), entries(weights()), tmp_path)


def test_a_link_to_nothing_is_no_free_name(tmp_path: Path) -> None:
    (tmp_path / "trainer").symlink_to(tmp_path / "not there")
    with pytest.raises(UsageError, match="exists already"):
        writing_folder(tmp_path / "trainer")


def test_one_dump_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with held_alone(tmp_path), pytest.raises(UsageError, match="another dump writes there"), held_alone(tmp_path):
        pass
    with held_alone(tmp_path):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from vime.types import TensorEntry
from vime.weights.dump import put_in_place, record_stream, writing_folder

final = Path(sys.argv[1])

def tensors():
    yield "a", torch.ones(1000)
    os.kill(os.getpid(), signal.SIGKILL)
    yield "b", torch.ones(1000)

folder = writing_folder(final)
record_stream(tensors(), [TensorEntry(n, (1000,), "float32") for n in "ab"], folder)
put_in_place(folder, final)
"""


def test_a_dump_that_is_killed_leaves_no_half_folder(tmp_path: Path) -> None:
    final = tmp_path / "trainer"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, final], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120
    )
    assert done.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [".trainer.writing"]
    folder = writing_folder(final)
    assert list(folder.iterdir()) == []  # what was left is gone
    put_in_place(folder, final)
    assert [path.name for path in tmp_path.iterdir()] == ["trainer"]
