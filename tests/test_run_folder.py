"""The run folder: which checkpoints are there, and which stay."""

import shutil
from pathlib import Path

import pytest

from vime.config.load import load
from vime.errors import UsageError
from vime.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    for done in (1, 2, 3):
        folder.checkpoint(done).mkdir(parents=True)
        for name in ("manifest.json", "state.json"):
            (folder.checkpoint(done) / name).touch()
    return folder


def names(folder):
    return [path.name for path in folder.checkpoints()]


def test_the_newest_stay(folder):
    folder.prune(None)
    assert names(folder) == ["rollout_000001", "rollout_000002", "rollout_000003"]
    folder.prune(2)
    assert names(folder) == ["rollout_000002", "rollout_000003"]
    assert not folder.checkpoint(1).exists()
    folder.prune(5)
    assert len(names(folder)) == 2


def test_killed_while_it_prunes_nothing_half_looks_complete(folder, monkeypatch):
    def killed(path):
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.prune(2)
    assert names(folder) == ["rollout_000002", "rollout_000003"]


def test_a_checkpoint_that_was_not_finished_is_none(folder):
    (folder.checkpoint(3) / "manifest.json").unlink()
    (folder.path / "checkpoints" / ".rollout_000004.writing").mkdir()
    assert folder.newest_checkpoint() == folder.checkpoint(2)
    with pytest.raises(UsageError, match="no complete checkpoint"):
        RunFolder(folder.path / "none").newest_checkpoint()


def test_a_folder_holds_one_run(folder):
    def loaded(*overrides):
        return load([], ["model.path=m", 'data.prompts=["p.jsonl"]', *overrides])

    shutil.rmtree(folder.path / "checkpoints" / "rollout_000003")
    folder.begin(loaded(), resume=False)
    folder.metrics.write_text("{}\n")
    with pytest.raises(UsageError, match="already holds a run"):
        folder.begin(loaded(), resume=False)
    folder.begin(loaded(), resume=True)
    assert len(names(folder)) == 2
    assert folder.metrics.exists()
    folder.begin(loaded("run.overwrite=true"), resume=False)
    assert names(folder) == []
    assert not folder.metrics.exists()
    assert "overwrite = true" in folder.config.read_text()


def test_a_new_run_does_not_empty_the_records_it_reads(folder):
    record = Path(folder.records.format(rollout_id=0))
    record.parent.mkdir()
    record.write_text("")
    ours = load([], ["model.path=m", 'data.prompts=["p.jsonl"]', "run.overwrite=true"])
    folder.begin(ours, resume=True)
    with pytest.raises(UsageError, match="a new run empties it, and the records"):
        folder.begin(ours, resume=False, template=folder.records)
    assert record.exists()
    folder.begin(ours, resume=False)
    assert not record.exists()


def test_two_runs_at_the_same_time_do_not_write_to_one_folder(folder):
    with folder.held(), pytest.raises(UsageError, match="another run is writing to it"), RunFolder(folder.path).held():
        pass
    with folder.held():
        pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/run': cannot be written"), RunFolder(tmp_path / "file" / "run").held():
        pass
