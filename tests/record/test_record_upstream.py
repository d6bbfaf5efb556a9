"""Upstream's dumps: case P16."""

import enum

import numpy as np
import pytest
import torch

from vime.errors import UsageError
from vime.record import read
from vime.types import Status


def row(**changes):
    base = {
        "group_index": 0, "index": 0, "prompt": "2+2?", "tokens": [5, 6, 7, 8], "response": "4!", "response_length": 2,
        "label": "4", "reward": 1.0, "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -1.0], "status": "completed",
        "metadata": {"k": 1}, "weight_versions": ["3", "4"],
    }  # fmt: skip
    return {**base, **changes}


def dump(path, *rows, **top):
    torch.save({"rollout_id": 3, "samples": list(rows), **top}, path)
    return path


def test_fields_are_mapped(tmp_path):
    batch = read(dump(tmp_path / "d.pt", row(), row(index=1, reward=None, label=7), row(group_index=1, index=2)))
    assert batch.rollout_id == 3
    assert batch.group_ids_N.tolist() == [0, 0, 1]
    assert batch.indices_N.tolist() == [0, 1, 0]
    first, second, _ = batch.samples()
    assert first.prompt_len == 2
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.rollout_log_probs.tolist() == [0.0, 0.0, -0.5, -1.0]
    assert (first.text, first.prompt_text, first.label, first.reward) == ("4!", "2+2?", "4", 1.0)
    assert (first.weight_version_min, first.weight_version_max) == (3, 4)
    assert first.metadata == {"k": 1}
    assert (second.reward, second.label) == (None, "7")


def test_lists_tensors_and_arrays_are_normalised(tmp_path):
    batch = read(
        dump(
            tmp_path / "d.pt",
            row(tokens=torch.tensor([5, 6, 7, 8]), rollout_log_probs=torch.tensor([-0.5, -1.0]).bfloat16()),
            row(tokens=np.array([5, 6, 7, 8]), loss_mask=None, rollout_log_probs=np.array([-0.5, -1.0])),
            row(tokens=np.array([5, 6, 7, 8], dtype=np.int32), reward=np.float64(0.25), loss_mask=np.array([1, 0])),
        )
    )
    assert batch.token_ids_T.reshape(3, 4).tolist() == [[5, 6, 7, 8]] * 3
    assert batch.rewards_N.tolist() == [1.0, 1.0, 0.25]
    assert batch.loss_mask_T.reshape(3, 4)[:, 2:].tolist() == [[True, True], [True, True], [True, False]]


def test_reward_dict_takes_its_score_and_keeps_the_others(tmp_path):
    rows = [row(reward={"score": 0.5, "acc": 1}), row(reward={"score": np.float32(1)}, metadata=None)]
    batch = read(dump(tmp_path / "d.pt", *rows, row(reward={"score": True, "x": 2}, metadata={"reward": "mine"})))
    assert batch.rewards_N.tolist() == [0.5, 1.0, 1.0]
    assert [r["metadata"] for r in batch.rows] == [{"k": 1, "reward": {"acc": 1}}, {}, {"reward": "mine"}]


def test_numbers_in_any_wrapping(tmp_path):
    """Case P16: tensors and arrays without dimensions, booleans, versions as text."""
    rows = [
        row(group_index=torch.tensor(4), response_length=np.int64(2), reward=torch.tensor(0.5), label=np.int64(7)),
        row(group_index=np.int32(4), loss_mask=(True, False), weight_versions=None, remove_sample=np.bool_(False)),
        row(group_index=4, loss_mask=torch.tensor([True, True]), weight_versions=torch.tensor([9, 8])),
    ]
    batch = read(dump(tmp_path / "d.pt", *rows))
    assert (batch.group_ids_N.tolist(), batch.indices_N.tolist()) == ([4, 4, 4], [0, 1, 2])
    assert [r["label"] for r in batch.rows] == ["7", "4", "4"]
    assert batch.loss_mask_T.reshape(3, 4)[:, 2:].tolist() == [[True, True], [True, False], [True, True]]
    assert [(r["weight_version_min"], r["weight_version_max"]) for r in batch.rows] == [(3, 4), (0, 0), (8, 9)]


def test_numbers_that_are_none_are_refused_not_guessed(tmp_path):
    """Case P16: numpy would make a number, or a missing one, of each of these."""
    faults = {
        "tokens": (["5", "6", "7", "8"], "holds something that is not a number"),
        "rollout_log_probs": ([None, -1.0], "holds something that is not a number"),
        "loss_mask": ([0.5, 1], "holds numbers other than 0 and 1"),
        "weight_versions": ("12", "expected a list of whole numbers"),
        "group_index": (2**70, "int, expected int"),
        "response_length": (2.0, "2.0, expected int"),
        "reward": (10**400, "int, expected a finite number"),
        "label": ([1], "list, expected str, number or None"),
        "status": (["completed"], "list, expected one of"),
        "metadata": ({"a": b"x"}, "bytes is not plain data"),
    }
    rows = [row(**{key: value}) for key, (value, _) in faults.items()]
    rows.append(row(tokens=[5, 6, 7, 2**40]))
    with pytest.raises(UsageError) as caught:
        read(dump(tmp_path / "d.pt", *rows))
    lines = caught.value.message.splitlines()[1:]
    assert len(lines) == len(rows)
    for i, (line, (key, (_, message))) in enumerate(zip(lines, faults.items(), strict=False)):
        assert line.startswith(f"samples[{i}].{key}")
        assert message in line
    assert lines[-1] == "samples[10].tokens: holds numbers that are not integers of 32 bits"


def test_messages_as_prompt_removed_samples_and_empty_answers(tmp_path):
    rows = (
        row(prompt=[{"role": "user", "content": "hi"}], remove_sample=True, status="truncated"),
        row(tokens=[5], response_length=0, loss_mask=None, rollout_log_probs=None, response="", status="aborted"),
    )
    first, second = read(dump(tmp_path / "d.pt", *rows)).samples()
    assert first.prompt_text == '[{"role": "user", "content": "hi"}]'
    assert not first.loss_mask.any()
    assert (second.response_len, second.status) == (0, Status.ABORTED)


def test_all_problems_are_listed_with_key_path(tmp_path):
    rows = [
        row(rollout_log_probs=None),
        row(reward={"acc": 1}),
        row(loss_mask=[1]),
        row(tokens="5 6 7"),
        row(status="pending"),
        row(response_length=9),
        row(group_index=None),
        row(rollout_log_probs=[-0.5, float("nan")]),
        row(reward=float("nan")),
        row(metadata=[1]),
    ]
    with pytest.raises(UsageError) as caught:
        read(dump(tmp_path / "d.pt", *rows))
    lines = caught.value.message.splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [
        "samples[0].rollout_log_probs", "samples[1].reward", "samples[2].loss_mask", "samples[3].tokens",
        "samples[4].status", "samples[5].response_length", "samples[6].group_index", "samples[7]",
        "samples[8].reward", "samples[9].metadata",
    ]  # fmt: skip
    assert "expected a number or a key 'score'" in lines[1]
    assert "1 entries for a response of 2 tokens" in lines[2]


def test_many_problems_are_capped_and_counted(tmp_path):
    with pytest.raises(UsageError, match=r"and 30 more \(50 in all\)"):
        read(dump(tmp_path / "d.pt", *[row(reward="good")] * 50))


class StatusLike(enum.Enum):
    COMPLETED = "completed"


def test_python_objects_in_a_dump_are_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"holds the Python object .*StatusLike"):
        read(dump(tmp_path / "d.pt", row(status=StatusLike.COMPLETED)))


def test_unused_fields_are_named_not_lost_silently(tmp_path):
    batch = read(dump(tmp_path / "d.pt", row(spec_info={"a": 1}, session_id=None)))
    assert batch.header.model["ignored_fields"] == "spec_info"
