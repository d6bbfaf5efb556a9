"""RecordedRollouts: cases P06 and P12."""

import subprocess
import sys

import pytest
from test_record_file import batch_of, same, sample

from vime.errors import UsageError
from vime.record import RecordedRollouts, write


def test_rollouts_come_from_their_files(tmp_path):
    template = str(tmp_path / "r_{rollout_id}.pt")
    for i in (0, 1, 2):
        write(template.format(rollout_id=i), batch_of(sample(text=str(i)), rollout_id=i))
    rollouts = RecordedRollouts(template)
    assert rollouts.ids() == [0, 1, 2]
    assert same(rollouts.produce(1), batch_of(sample(text="1"), rollout_id=1))
    with pytest.raises(UsageError, match="no file for rollout_id 7; existing ids: 0-2"):
        rollouts.produce(7)
    rollouts.load_state_dict({"source": {}})
    assert rollouts.state_dict() == {}


def test_a_literal_path_serves_one_rollout(tmp_path):
    write(tmp_path / "x.pt", batch_of(sample(), rollout_id=4))
    rollouts = RecordedRollouts(str(tmp_path / "x.pt"))
    assert rollouts.produce(0).rollout_id == 4
    with pytest.raises(UsageError, match="is one record, and rollout 1 is the second"):
        rollouts.produce(1)


def test_a_renamed_file_is_noticed(tmp_path):
    write(tmp_path / "r_3.pt", batch_of(sample(), rollout_id=2))
    with pytest.raises(UsageError, match="holds rollout 2, its name says 3"):
        RecordedRollouts(str(tmp_path / "r_{rollout_id}.pt")).produce(3)


def test_reading_needs_no_engine(tmp_path):
    write(tmp_path / "x.pt", batch_of(sample()))
    code = f"""
import sys
for name in ("vllm", "ray", "megatron", "transformers"):
    sys.modules[name] = None
from vime.record import RecordedRollouts
assert len(RecordedRollouts({str(tmp_path / "x.pt")!r}).produce(0)) == 1
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
