"""Faults that are planted before a run starts: always said, and the copied checkpoint is what the run reads."""

import io
import sys
from pathlib import Path

import pytest

from vime.align.markers import ChatMarkers
from vime.config.load import read
from vime.data.tokenizer import load_tokenizer
from vime.errors import UsageError
from vime.log import Progress
from vime.runs.planted import planted

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.tiny.make_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("planted") / "model", steps=0)


def loaded(model, *faults):
    names = ", ".join(f'"{name}"' for name in faults)
    return read([], [f"model.path={model}", 'data.prompts=["a.jsonl"]', f"debug.inject=[{names}]"])


def test_without_a_fault_nothing_is_said_or_copied(model, tmp_path):
    said, given = io.StringIO(), loaded(model)
    with planted(given, tmp_path, Progress(1, said, False)) as found:
        assert found is given
    assert (said.getvalue(), list(tmp_path.iterdir())) == ("", [])


def test_the_run_reads_a_copy_whose_markers_were_never_trained(model, tmp_path):
    said = io.StringIO()
    with planted(loaded(model, "base-model"), tmp_path, Progress(1, said, False)) as found:
        path = found.config.model.path
        assert Path(path).parent == tmp_path
        assert ChatMarkers.of(load_tokenizer(path), path).untrained
    assert list(tmp_path.iterdir()) == []
    assert "warning: PLANTED FAULT base-model (debug.inject): the chat markers were never trained" in said.getvalue()


def test_what_a_killed_run_left_of_the_copy_goes_first_and_the_copy_ends_with_an_error(model, tmp_path):
    (tmp_path / ".base-model").mkdir()
    (tmp_path / ".base-model" / "old").write_text("half")
    with planted(loaded(model, "base-model"), tmp_path, Progress(1, io.StringIO(), False)) as found:
        assert Path(found.config.model.path) == tmp_path / ".base-model"
        assert not (tmp_path / ".base-model" / "old").exists()
    assert list(tmp_path.iterdir()) == []
    copying = planted(loaded(model, "base-model"), tmp_path, Progress(1, io.StringIO(), False))
    with pytest.raises(KeyboardInterrupt), copying:
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_fault_that_is_planted_elsewhere_is_said_too(model, tmp_path):
    said = io.StringIO()
    with planted(loaded(model, "zero-rotary"), tmp_path, Progress(1, said, False)) as found:
        assert found.config.model.path == str(model)
    assert "PLANTED FAULT zero-rotary" in said.getvalue()


def test_a_name_that_is_no_fault_is_never_ignored(model, tmp_path):
    with (
        pytest.raises(UsageError, match="'zero' is no fault"),
        planted(loaded(model, "zero"), tmp_path, Progress(1, io.StringIO(), False)),
    ):
        pass
