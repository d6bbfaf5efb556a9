"""Dumps on the disk: whole or not at all, loadable by others, readable without tensors, refused where damaged."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_weights import dump_of, entries, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vime.errors import UsageError, VimeError
from vime.weights import dump as dumping
from vime.weights.dump import FolderPlan, put_in_place, record_stream, require_room, tell_progress, writing_folder
from vime.weights.files import chosen, compare_paths, copy_missing, open_dumps
from vime.weights.manifest import digest
from vime.weights.manifest_file import read_dump, write_dump
from vime.weights.values import block_of, record_of


def test_a_record_says_what_the_tensor_is() -> None:
    tensor = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.5, float("nan")], [float("inf"), 0.0]])
    record = record_of("w", tensor)
    assert (record.minimum, record.maximum, record.num_nonfinite) == (-2.0, 4.0, 2)
    assert record.l2 == pytest.approx((1 + 4 + 9 + 16 + 0.25) ** 0.5)
    assert record.mean == pytest.approx(6.5 / 6)
    assert (record.digest, record.block, len(record.rows)) == (digest(tensor), 1, 4)
    assert record.rows[1] == digest(tensor[1:2])[:16]
    assert record.is_bf16
    assert not record_of("w", torch.tensor([0.1])).is_bf16
    assert record_of("w", torch.zeros(3)).is_zero
    assert record_of("w", torch.full((3,), 2.0)).is_constant
    assert not record_of("w", torch.ones(1)).is_constant  # of one element nothing is said
    assert record_of("w", torch.empty(0, 4)).numel == 0
    assert record_of("ids", torch.arange(5)).maximum == 4.0


@pytest.mark.parametrize(
    ("shape", "block"), [((64, 8), 1), ((576, 8), 16), ((1536, 8), 32), ((128256, 4), 256), ((50257, 4), 0), ((7,), 0)]
)
def test_blocks_of_rows_divide_shards(shape: tuple[int, ...], block: int) -> None:
    assert block_of(shape) == block
    assert block == 0 or shape[0] % block == 0


def test_a_folder_of_several_files_is_what_others_read(tmp_path: Path) -> None:
    """Case W22: weight_map and total size are right, whatever order the tensors come in."""
    tensors = weights() | {"ids": torch.arange(7), "half": torch.randn(3, 5).bfloat16(), "none": torch.empty(0, 4)}
    backwards = reversed(list(tensors.items()))
    records = record_stream(backwards, entries(tensors), tmp_path, shard_bytes=8000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert set(index["weight_map"].values()) == {file.name for file in files}
    read = {name: t for file in files for name, t in load_file(file).items()}
    assert read.keys() == tensors.keys() == index["weight_map"].keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert {n: r.digest for n, r in records.items()} == {n: digest(t) for n, t in tensors.items()}
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    record_stream(weights().items(), entries(weights()), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_tensors_that_never_come_and_that_come_twice_are_an_error(tmp_path: Path) -> None:
    """Case W19."""
    tensors = weights()
    with pytest.raises(VimeError, match="1 tensors never came, first lm_head"):
        record_stream(list(tensors.items())[:-1], entries(tensors), tmp_path)
    with pytest.raises(ValueError, match="comes twice"):
        record_stream([*tensors.items(), *tensors.items()], entries(tensors))
    with pytest.raises(VimeError, match="bytes came"):
        record_stream([("norm", torch.ones(3))], [replace(entries({"norm": torch.ones(4)})[0])], tmp_path)


def test_only_what_is_chosen_is_taken() -> None:
    left = chosen(entries(weights()), 2, "gate|up")
    assert [e.name.split(".")[-2] for e in left] == ["gate_proj", "up_proj"]
    assert record_stream(weights().items(), left).keys() == {e.name for e in left}
    with pytest.raises(UsageError, match="--layer 9: the model has layers 0 to 3"):
        chosen(entries(weights()), 9, None)
    with pytest.raises(UsageError, match="finds none") as error:
        chosen(entries(weights()), None, "gatee_proj")
    assert "gate_proj" in (error.value.hint or "")
    with pytest.raises(UsageError, match="no regular expression"):
        chosen(entries(weights()), None, "(")


def test_a_full_disk_is_said_before_and_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VimeError, match=r"MB free, the tensors need 1000000000000\.0 MB"):
        require_room(tmp_path / "not" / "there", 10**18)

    def full(*arguments) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dumping.os, "pwrite", full)
    with pytest.raises(VimeError, match="cannot be written: No space left on device"):
        record_stream(weights().items(), entries(weights()), tmp_path)


def test_a_folder_gets_its_name_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "dumps" / "trainer"
    folder = writing_folder(final)
    (folder / "left").touch()
    assert writing_folder(final) == folder  # what an interrupted dump left is gone
    assert not (folder / "left").exists()
    put_in_place(folder, final)
    assert final.is_dir()
    assert not folder.exists()
    with pytest.raises(UsageError, match="exists already"):
        writing_folder(final)


def test_progress_is_told_across_processes(tmp_path: Path) -> None:
    hear = tell_progress(str(tmp_path / "done"))
    hear(5)
    hear(1234)
    assert int((tmp_path / "done").read_text()) == 1234


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    dump = dump_of(weights(), "engine-held", buffers=dump_of({"cache": torch.zeros(4)}).tensors, family="qwen3")
    write_dump(tmp_path / "engine-held.manifest.json", dump)
    assert read_dump(tmp_path / "engine-held.manifest.json") == dump


def damaged(content: dict) -> dict:
    return content | {"tensors": [{"name": "w"}]}


def twice(content: dict) -> dict:
    return content | {"tensors": [content["tensors"][0]] * 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: {"a": 1}, "is no manifest"),
        (lambda content: [1], "is no manifest"),
        (lambda content: content | {"vime_manifest": 99}, "manifest format 99, this vime reads 1"),
        (damaged, "damaged manifest"),
        (twice, "comes twice"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, change, message: str) -> None:
    file = tmp_path / "trainer.manifest.json"
    write_dump(file, dump_of(weights()))
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(UsageError, match=message):
        open_dumps(file)


def test_paths_that_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "bytes").write_bytes(os.urandom(64))
    for name, message in {"text": "not JSON", "bytes": "is no manifest", "none": "does not exist"}.items():
        with pytest.raises(UsageError, match=message):
            open_dumps(tmp_path / name)
    with pytest.raises(UsageError, match="safetensors file"):
        open_dumps(tmp_path)


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 64}))
    return folder


def test_manifests_dumps_and_folders_are_compared(tmp_path: Path) -> None:
    """A folder against a dump of the same weights is equal; tensors are read where both sides have them."""
    folder = saved(tmp_path / "model", weights())
    wrong = weights()
    wrong["model.norm.weight"] = wrong["model.norm.weight"] + 0.5
    out = tmp_path / "dump"
    (out / "trainer").mkdir(parents=True)
    record_stream(wrong.items(), entries(wrong), out / "trainer")
    write_dump(out / "trainer.manifest.json", dump_of(wrong, family="qwen3"))
    write_dump(out / "checkpoint.manifest.json", dump_of(weights(), "checkpoint", family="qwen3"))
    equal, different = compare_paths(folder, out)
    assert equal.is_equal
    assert [str(f.kind) for f in different.findings] == ["value"]
    assert different.findings[0].detail.startswith("max |difference| 0.5, ")
    (alone,) = compare_paths(out / "checkpoint.manifest.json", out / "trainer")
    assert alone.findings[0].detail.startswith("l2 ")


def test_tensors_that_a_view_never_had_are_copied_from_the_origin(tmp_path: Path) -> None:
    """Case W22: two tensors of the origin's index are in no trainer; the dump loads with them."""
    extra = {"visual.patch.weight": torch.randn(4, 4), "mtp.head.weight": torch.randn(8, 2)}
    origin = saved(tmp_path / "origin", weights() | extra)
    out = tmp_path / "trainer"
    out.mkdir()
    record_stream(weights().items(), entries(weights()), out)
    shutil.copyfile(origin / "config.json", out / "config.json")
    (result,) = compare_paths(origin, out)
    assert {str(f) for f in result.findings} == {f"missing: {n}: in {origin}, not in {out}" for n in extra}
    records = copy_missing(origin, entries(extra), out)
    assert records.keys() == extra.keys()
    assert records["mtp.head.weight"].how == f"copied from {origin}"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in (weights() | extra).values())
    assert compare_paths(origin, out)[0].is_equal


def test_the_plan_of_an_empty_choice_is_a_file_without_tensors() -> None:
    plan = FolderPlan.of([])
    assert plan.places == {}
    assert plan.index() == {"metadata": {"total_size": 0}, "weight_map": {}}
