"""Temporary files of runs: gone at the end of a run, and those of a killed one with the next."""

from __future__ import annotations

import os

from vime.cluster.leftovers import MIN_AGE_SECONDS, RUN_PREFIX, make_temp_dir, temp_dir


def test_a_killed_run_is_cleaned_up_after_and_a_living_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, living = tmp_path / f"{RUN_PREFIX}killed", make_temp_dir()
    killed.mkdir()
    (killed / "socket").touch()
    for folder in (killed, living[0]):
        os.utime(folder, (0, os.stat(folder).st_mtime - 2 * MIN_AGE_SECONDS))
    with temp_dir() as folder:
        (folder / "file").touch()
        assert folder.parent == tmp_path
        assert not killed.exists()
        assert living[0].exists()
    assert not folder.exists()
    os.close(living[1])
