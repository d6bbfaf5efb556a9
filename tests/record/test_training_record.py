"""The training record: what goes in comes out, and nothing damaged or foreign gets through."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from test_record_file import batch_of, sample

from vime.errors import UsageError
from vime.record import RecordWriter, list_ids, read, training_template, write
from vime.record.training import (
    TrainingHeader,
    TrainingRecord,
    TrainingStep,
    read_training,
    rollout_digest,
    write_training,
)


def record(lengths=(3, 1), has_reference=True, steps=1, **header):
    total = sum(lengths)
    values = np.linspace(-4, 0, total, dtype=np.float32)
    return TrainingRecord(
        rollout_id=5,
        header=TrainingHeader(**header),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        log_probs_T=values,
        ref_log_probs_T=values - 1 if has_reference else np.empty(0, np.float32),
        advantages_T=values + 2,
        sample_losses_N=np.arange(len(lengths), dtype=np.float64),
        dp_ranks_N=np.zeros(len(lengths), np.int32),
        steps=[TrainingStep(0.5, 1.25, 1e-3, total)] * steps,
        weights={"model.norm.weight": "ab" * 32},
    )


def same(a, b):
    arrays = [n for n in TrainingRecord.__slots__ if isinstance(getattr(a, n), np.ndarray)]
    is_same = all(getattr(a, n).tobytes() == getattr(b, n).tobytes() for n in arrays)
    return is_same and asdict(a.header) == asdict(b.header) and (a.steps, a.weights) == (b.steps, b.weights)


numbers = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | numbers | st.text(), lambda t: st.lists(t, max_size=3)
)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    has_reference=st.booleans(),
    steps=st.integers(0, 3),
    layout=st.dictionaries(st.text(), plain, max_size=4),
)
def test_what_is_written_is_read(tmp_path_factory, lengths, has_reference, steps, layout):
    path = tmp_path_factory.mktemp("r") / "x.train.pt"
    made = record(lengths * max(steps, 1), has_reference, steps, layout=layout, rollout_digest="ab")
    write_training(path, made)
    assert same(read_training(path), made)


def test_opens_with_plain_torch_load(tmp_path):
    write_training(tmp_path / "x.pt", record())
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (content["format"], content["schema_version"], content["rollout_id"]) == ("vime-training", 1, 5)
    assert content["arrays"]["log_probs_T"].dtype == torch.float32
    assert content["steps"] == [asdict(TrainingStep(0.5, 1.25, 1e-3, 4))]


def test_the_name_stands_beside_the_record_and_is_no_record_itself(tmp_path):
    assert training_template("a/data_{rollout_id}.pt") == "a/data_{rollout_id}.train.pt"
    assert training_template("a.b/data_{rollout_id:05d}") == "a.b/data_{rollout_id:05d}.train"
    assert training_template("run.{rollout_id}") == "run.{rollout_id}.train"
    template = str(tmp_path / "data_{rollout_id}.pt")
    write_training(training_template(template).format(rollout_id=1), record())
    assert list_ids(template) == []
    assert list_ids(training_template(template)) == [1]


def test_an_existing_file_is_kept_unless_it_may_go(tmp_path):
    write_training(tmp_path / "x.pt", record())
    with pytest.raises(UsageError, match="exists already"):
        write_training(tmp_path / "x.pt", record())
    write_training(tmp_path / "x.pt", record(steps=2), overwrite=True)
    assert len(read_training(tmp_path / "x.pt").steps) == 2


def test_the_writer_of_records_writes_them_beside_the_run(tmp_path):
    with RecordWriter(str(tmp_path / "r_{rollout_id}.train.pt"), write=write_training) as writer:
        writer.save(record())
    assert same(read_training(tmp_path / "r_5.train.pt"), record())


def damage(content, what):
    match what:
        case "array":
            content["arrays"]["log_probs_T"][0] += 1
        case "step":
            content["steps"][0]["loss"] = 0.25
        case "weights":
            content["weights"]["model.norm.weight"] = "cd" * 32
        case "newer":
            content["schema_version"] = 2
        case "foreign":
            content["format"] = "something"
        case "missing":
            del content["arrays"]["advantages_T"]
        case "kind":
            content["steps"] = {}
        case "array type":
            content["arrays"]["dp_ranks_N"] = content["arrays"]["dp_ranks_N"].long()
        case "step type":
            content["steps"][0]["grad_norm"] = "large"
        case "header type":
            content["header"]["settings"] = []
        case "weights type":
            content["weights"]["model.norm.weight"] = 1
        case "no step":
            content["steps"] = [{"loss": 1.0}]
        case "header":
            content["header"]["extra"] = 1
    return content


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("array", "changed or damaged"),
        ("step", "changed or damaged"),
        ("weights", "changed or damaged"),
        ("newer", "has schema version 2, this vime reads up to 1"),
        ("foreign", "is not a training record"),
        ("missing", "differs in 'advantages_T'"),
        ("kind", "steps is dict, expected list"),
        ("array type", "arrays.dp_ranks_N is not a 1-d int32 tensor"),
        ("step type", r"steps\[0\].grad_norm is str, expected float"),
        ("header type", "header.settings is list, expected dict"),
        ("weights type", "weights.model.norm.weight is int, expected str"),
        ("no step", "differs in"),
        ("header", "header differs in 'extra'"),
    ],
)
def test_a_file_that_is_not_as_written_is_one_clear_line(tmp_path, what, message):
    path = tmp_path / "x.pt"
    write_training(path, record())
    torch.save(damage(torch.load(path, weights_only=True), what), path)
    with pytest.raises(UsageError, match=message) as caught:
        read_training(path)
    assert "\n" not in caught.value.message


def test_samples_that_make_no_steps_of_one_size_are_refused(tmp_path):
    """Whoever changes a record may mend its checksum too."""
    write_training(tmp_path / "x.pt", record(lengths=(1, 1, 1), steps=2))
    with pytest.raises(UsageError, match="3 samples do not make 2 steps of one size"):
        read_training(tmp_path / "x.pt")
    write_training(tmp_path / "empty.pt", record(lengths=(), has_reference=False, steps=1))
    with pytest.raises(UsageError, match=r"arrays.offsets must rise from 0"):
        read_training(tmp_path / "empty.pt")


def test_a_reader_written_from_the_page_alone(tmp_path):
    """docs/formats.md, "Training record": torch.load and blake3 are all that it takes."""
    made = record(layout={"parallel.tp": 2}, settings={"train.lr": 1.0}, rollout_digest="ab")
    write_training(tmp_path / "x.pt", made)
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(content) == documented("key")
    assert sorted(content["arrays"]) == sorted(documented("`arrays`"))
    assert sorted(content["header"]) == sorted(documented("`header`"))
    digest = blake3()
    plain = {key: content[key] for key in documented("key")[:6]}
    digest.update(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("ascii"))
    for name, tensor in sorted(content["arrays"].items()):
        array = tensor.numpy()
        digest.update(f"\n{name} {array.dtype} {len(array)}\n".encode("ascii") + array.tobytes())
    assert digest.hexdigest() == content["checksum"]
    arrays = content["arrays"]
    second = slice(*arrays["offsets"][1:3].tolist())
    assert arrays["log_probs_T"][second].tolist() == made.log_probs_T[3:4].tolist()
    assert content["steps"][0] == {"loss": 0.5, "grad_norm": 1.25, "lr": 1e-3, "num_tokens": 4, "is_skipped": False}


def documented(head):
    """First column of the table of the training record whose first heading is ``head``."""
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    section = page.partition("## Training record")[2].partition("\n## ")[0]
    rows = section.partition(f"\n\n| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.split("`")[1] for row in rows]


def test_cut_short_and_records_are_refused(tmp_path):
    write_training(tmp_path / "x.pt", record())
    whole = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cut short"):
        read_training(tmp_path / "cut.pt")
    write(tmp_path / "rollout.pt", batch_of(sample()))
    with pytest.raises(UsageError, match="is not a training record"):
        read_training(tmp_path / "rollout.pt")
    with pytest.raises(UsageError, match=r"x\.pt is not a rollout record \(it says that it is vime-training\)"):
        read(tmp_path / "x.pt")
    shutil.copy(tmp_path / "x.pt", tmp_path / "copy.pt")
    assert same(read_training(tmp_path / "copy.pt"), record())


def test_the_digest_is_of_what_a_rollout_gives_to_its_training():
    one = batch_of(sample(reward=1.0), sample(index=1, reward=0.0))
    assert rollout_digest(one) == rollout_digest(batch_of(sample(reward=1.0, text="x"), sample(index=1, reward=0.0)))
    for other in (sample(reward=0.5), sample(tokens=(1, 2, 4), reward=1.0), sample(prompt_len=2, reward=1.0)):
        assert rollout_digest(batch_of(other, sample(index=1, reward=0.0))) != rollout_digest(one)
