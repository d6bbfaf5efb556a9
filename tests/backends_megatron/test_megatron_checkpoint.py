"""Saving, resuming in the same and in another layout, and what damage is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jobs
import numpy as np
import pytest

from vime.backends.megatron import manifest
from vime.errors import VimeError

SHARDED = {"distributed_optimizer": True}
TP2 = {"tp": 2, "sequence_parallel": True}
# name, model, layout, sections, layouts to load into beside its own
RUNS = [
    ("one process", ("qwen3", False, 128), {}, {}, [{"tp": 2}, {"pp": 2}]),
    ("bf16", ("qwen2", False, 128), {}, {"model": {"dtype": "bfloat16"}}, []),
    ("tp2, padded vocabulary", ("qwen3", True, 131), TP2, {}, [{}, {"pp": 2, "vpp": 2}]),
    ("pp2 vpp2", ("llama", False, 128), {"pp": 2, "vpp": 2}, {}, [{"dp": 2}]),
    ("dp2 sharded", ("qwen3", False, 128), {"dp": 2, **SHARDED}, {}, [{"tp": 2, **SHARDED}]),
    ("dp2 sharded bf16", ("qwen3", False, 128), {"dp": 2, **SHARDED}, {"model": {"dtype": "bfloat16"}}, []),
    # the shared embedding has a bucket of its own: megatron saves states behind its padding shifted
    ("pp2 sharded tied", ("qwen3", True, 131), {"pp": 2, **SHARDED}, {}, [SHARDED]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(pool, tiny, folder):
    made = {}

    def get(name: str):
        if name not in made:
            _, model, layout, sections, _ = next(run for run in RUNS if run[0] == name)
            settings = jobs.config(tiny(*model), parallel=layout, **sections)
            path = str(folder / name.replace(" ", "_"))
            made[name] = path, pool.run(settings.parallel.world_size, jobs.save_and_go_on, settings, path, model[2])[0]
        return made[name]

    return get


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[0])
def test_resume_in_the_same_layout_is_bitwise(pool, tiny, saved, run):
    name, model, layout, sections, _ = run
    path, before = saved(name)
    settings = jobs.config(tiny(*model), parallel=layout, **sections)
    again = pool.run(settings.parallel.world_size, jobs.resume, settings, path, model[2], before["scored"])[0]
    assert again["state"] == {"cursor": 7}
    assert again["same_ref"]
    for tensor, value in before["saved"].items():
        assert np.array_equal(value, again["loaded"][tensor]), tensor
    for tensor, value in before["after"].items():
        assert np.array_equal(value, again["after"][tensor]), tensor
    assert (before["stats"].loss, before["stats"].grad_norm) == (again["stats"].loss, again["stats"].grad_norm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_before_the_first_step_is_one_too(pool, tiny, tmp_path, dtype):
    """As of a run whose steps were all skipped."""
    path, settings = str(tmp_path / "none"), jobs.config(tiny("qwen3", False, 128), model={"dtype": dtype})
    before = pool.run(1, jobs.save_and_go_on, settings, path, 128, 0)[0]
    again = pool.run(1, jobs.resume, settings, path, 128, before["scored"])[0]
    for when in ("saved", "after"):
        for tensor, value in before[when].items():
            assert np.array_equal(value, again["loaded" if when == "saved" else "after"][tensor]), tensor


@pytest.mark.parametrize(("run", "layout"), [(r, to) for r in RUNS for to in r[4]], ids=str)
def test_another_layout_reshards(pool, tiny, saved, run, layout):
    name, model, _, sections, _ = run
    path, before = saved(name)
    settings = jobs.config(tiny(*model), parallel=layout, **sections)
    again = pool.run(settings.parallel.world_size, jobs.resume, settings, path, model[2], before["scored"])[0]
    assert again["state"] == {"cursor": 7}
    for tensor, value in before["saved"].items():
        assert np.array_equal(value, again["loaded"][tensor]), tensor
    assert again["stats"].grad_norm == pytest.approx(before["stats"].grad_norm, rel=1e-5)
    for tensor, value in before["after"].items():
        assert np.abs(value - again["after"][tensor]).max() < 1e-6, tensor


def test_a_checkpoint_that_cannot_be_written_is_said_with_the_room_that_is_left(pool, tiny, tmp_path):
    settings = jobs.config(tiny("qwen3", False, 128))
    (said,) = pool.run(1, jobs.save_without_room, settings, str(tmp_path / "checkpoints" / "c"))
    assert said.startswith(f"{tmp_path / 'checkpoints'}: the checkpoint could not be written, ")
    assert "MB are free there" in said
    assert not (tmp_path / "checkpoints" / "c").exists()


def test_without_the_repaired_offsets_a_tied_pipeline_would_resume_wrong(pool, tiny, tmp_path):
    """The planted fault. If this fails, upstream has mended it: delete ``checkpoint._true_offsets``."""
    settings = jobs.config(tiny("qwen3", True, 131), parallel={"pp": 2, **SHARDED})
    path = str(tmp_path / "shifted")
    before = pool.run(2, jobs.save_as_megatron_does, settings, path, 131)[0]
    again = pool.run(2, jobs.resume, settings, path, 131, before["scored"])[0]
    assert max(np.abs(before["after"][name] - value).max() for name, value in again["after"].items()) > 0.1


def _damaged(path: str, copy: Path, damage) -> Path:
    shutil.copytree(path, copy)
    data = max((f for f in copy.iterdir() if f.suffix == ".distcp"), key=lambda f: f.stat().st_size)
    damage(copy, data)
    return copy


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - b for b in content[middle : middle + 64])
    file.write_bytes(content)


DAMAGES = {
    "flipped": (lambda folder, data: _flip(data), "content has changed"),
    "truncated": (lambda folder, data: data.write_bytes(data.read_bytes()[:-10]), "bytes, written were"),
    "missing": (lambda folder, data: data.unlink(), "missing from the checkpoint"),
    "no manifest": (lambda folder, data: (folder / "manifest.json").unlink(), "no complete checkpoint"),
    "cut manifest": (lambda folder, data: (folder / "manifest.json").write_text('{"format": 1, "fi'), "damaged"),
    "newer": (lambda folder, data: (folder / "manifest.json").write_text('{"format": 9, "files": {}}'), "newer"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(saved, tmp_path, name):
    path, _ = saved("one process")
    manifest.verify(path)
    assert manifest.is_checkpoint(path)
    damage, message = DAMAGES[name]
    with pytest.raises(VimeError, match=message):
        manifest.verify(_damaged(path, tmp_path / "copy", damage))


def test_load_refuses_damage_other_models_and_other_optimizers(pool, tiny, saved, tmp_path):
    path, _ = saved("one process")
    settings = jobs.config(tiny())
    copy = _damaged(path, tmp_path / "flipped", DAMAGES["flipped"][0])
    assert "content has changed" in pool.run(1, jobs.refusal, settings, str(copy))[0]
    other = jobs.config(tiny("llama"))
    assert "family = 'qwen3', this one has 'llama'" in pool.run(1, jobs.refusal, other, path)[0]
    sharded = jobs.config(tiny(), parallel=SHARDED)
    assert "parallel.distributed_optimizer = False" in pool.run(1, jobs.refusal, sharded, path)[0]


def test_damage_that_the_manifest_cannot_see_is_a_vime_error_too(pool, tiny, saved, tmp_path):
    """megatron's CheckpointException is a BaseException; here the manifest was rewritten over a truncated file."""
    path, _ = saved("one process")
    copy = _damaged(path, tmp_path / "copy", lambda folder, data: data.write_bytes(data.read_bytes()[:1000]))
    (copy / "manifest.json").unlink()
    manifest.write_manifest(copy)
    assert "cannot be loaded" in pool.run(1, jobs.refusal, jobs.config(tiny()), str(copy))[0]


def test_an_older_checkpoint_of_the_same_name_is_replaced_whole(tmp_path):
    final = tmp_path / "step"
    for content in ("old", "new"):
        writing = manifest.temporary(final)
        writing.mkdir()
        (writing / "state.json").write_text(json.dumps({"state": content}))
        assert not manifest.is_checkpoint(writing)
        manifest.write_manifest(writing)
        manifest.put_in_place(writing, final)
    assert manifest.read_state(final) == {"state": "new"}
    assert [f.name for f in tmp_path.iterdir()] == ["step"]


def test_an_interrupted_write_leaves_no_checkpoint(tmp_path):
    final = tmp_path / "step"
    writing = manifest.temporary(final)
    writing.mkdir()
    (writing / "data").write_text("half")
    assert not manifest.is_checkpoint(final)
    assert manifest.temporary(final) == writing
    assert not writing.exists()
