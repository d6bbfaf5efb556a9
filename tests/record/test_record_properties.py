"""Writing and reading are symmetrical: whatever the types allow comes back, field by field and bit by bit."""

import json
import re
import struct
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_record_file import batch_of, sample

from vime.errors import VimeError
from vime.record import read, write
from vime.types import RolloutBatch, RolloutHeader, Sample, Status

FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"

int64 = st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
text = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too
number = st.integers(-(2**63), 2**64 - 1) | st.floats()
plain = st.recursive(
    st.none() | st.booleans() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
metadata = st.dictionaries(text, plain, max_size=3) | st.builds(
    lambda rewards, rest: {**rest, "reward": rewards},
    st.dictionaries(text, number, max_size=3),
    st.dictionaries(text, plain, max_size=2),
)


@st.composite
def samples(draw):
    prompt_len, response_len = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    total = prompt_len + response_len
    status = draw(st.sampled_from(Status))
    mask = [False] * prompt_len + draw(st.lists(st.booleans(), min_size=response_len, max_size=response_len))
    log_prob = st.floats(width=32, allow_nan=not status.is_trainable, allow_infinity=not status.is_trainable)
    log_probs = np.array(draw(st.lists(log_prob, min_size=total, max_size=total)), dtype=np.float32)
    return Sample(
        group_id=draw(int64),
        index=draw(int32),
        token_ids=np.array(draw(st.lists(draw(token_kinds), min_size=total, max_size=total))),
        prompt_len=prompt_len,
        loss_mask=np.array(mask),
        rollout_log_probs=log_probs if draw(st.booleans()) else np.where(mask, log_probs, np.float32(0)),
        text=draw(text),
        prompt_text=draw(text),
        label=draw(st.none() | text),
        reward=draw(st.none() | st.floats()),
        status=status,
        seed=draw(int64),
        weight_version_min=draw(int64),
        weight_version_max=draw(int64),
        metadata=draw(metadata),
    )


token_kinds = st.sampled_from([st.integers(0, 60_000), st.integers(0, 200_000), st.integers(0, 2**31 - 1), int32])
headers = st.builds(
    RolloutHeader,
    vime_version=text,
    config_digest=text,
    model=st.dictionaries(text, text, max_size=3),
    weight_version=int64,
    manifest_digest=text,
    sampling=st.dictionaries(text, plain, max_size=3),
    sampling_origin=st.dictionaries(text, text, max_size=3),
    stop_token_ids=st.lists(int32, max_size=3),
    seed=int64,
    library_versions=st.dictionaries(text, text, max_size=3),
    counts=st.dictionaries(text, st.integers(0, 2**40), max_size=3),
)


def bits(value):
    """A value whose equality is identity of type and bits: 0.0 is not -0.0, 1 is not 1.0 nor True, NaN is NaN."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(bits(k), bits(v)) for k, v in value.items()]
    if isinstance(value, list):
        return [bits(v) for v in value]
    if isinstance(value, float):
        return "nan" if value != value else struct.pack("<d", value)
    return type(value), value


def all_bits(batch: RolloutBatch):
    columns = {f.name: bits(getattr(batch, f.name)) for f in fields(RolloutBatch) if f.name != "header"}
    return {**columns, "header": bits(asdict(batch.header))}


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(samples(), max_size=4), header=headers, rollout_id=st.integers(0, 2**40))
@example(rows=[], header=RolloutHeader(), rollout_id=0)
@example(rows=[sample(tokens=(0,), prompt_len=1)], header=RolloutHeader(), rollout_id=0)
@example(rows=[sample(text="\ud83d\ude00", prompt_text="\udc00", label="\ud800")], header=RolloutHeader(), rollout_id=0)
def test_round_trip_of_any_samples(tmp_path_factory, rows, header, rollout_id):
    path = tmp_path_factory.mktemp("r") / "x.pt"
    batch = RolloutBatch.from_samples(rollout_id, rows, header)
    write(path, batch)
    found = read(path)
    assert all_bits(found) == all_bits(batch)
    for ours, theirs in zip(found.samples(), batch.samples(), strict=True):
        for f in fields(Sample):
            assert bits(getattr(ours, f.name)) == bits(getattr(theirs, f.name))
    once = path.read_bytes()
    write(path, found, overwrite=True)
    assert path.read_bytes() == once  # deterministic, and what was read is what was written


def test_the_bits_of_a_reward_that_is_not_a_number_are_kept(tmp_path):
    batch = batch_of(sample(), sample(index=1))
    batch.rewards_N.view(np.uint64)[:] = (0x7FF8000000000001, 0xFFF8000000000000)
    write(tmp_path / "x.pt", batch)
    assert read(tmp_path / "x.pt").rewards_N.tobytes() == batch.rewards_N.tobytes()


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return {"x": value}


def test_huge_and_deep_metadata(tmp_path):
    huge = {"blob": "x" * 3_000_000, "numbers": list(range(200_000)), "reward": {str(i): i / 7 for i in range(10_000)}}
    batch = batch_of(sample(metadata=huge), sample(index=1, metadata=nested(64)))
    write(tmp_path / "x.pt", batch)
    assert all_bits(read(tmp_path / "x.pt")) == all_bits(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": nested(65)}, r"sample 3/1 metadata.*nested more than 64 levels deep"),
        ({"metadata": {"a": {1: 2}}}, r"sample 3/1 metadata\.a: key 1 is a int, only str can be a key"),
        ({"metadata": {"a": 2**64}}, r"sample 3/1 metadata\.a: the integer .* does not fit 64 bits"),
        ({"metadata": {"a": {1, 2}}}, r"sample 3/1 metadata\.a: set is not plain data"),
        ({"seed": 2**63}, r"sample 3/1 seed: .* does not fit 64 bits"),
        ({"seed": 0.5}, r"sample 3/1 seed: float, expected int"),
        ({"label": 7}, r"sample 3/1 label: int, expected str"),
        ({"text": None}, r"sample 3/1 text: NoneType, expected str"),
    ],
)
def test_what_cannot_be_written_is_named_and_no_file_is_left(tmp_path, changes, message):
    with pytest.raises(VimeError, match=message):
        write(tmp_path / "x.pt", batch_of(sample(), sample(3, 1, **changes)))
    assert list(tmp_path.iterdir()) == []


def test_reading_as_the_format_page_says(tmp_path):
    """The page's own code, on what it describes."""
    blocks = re.findall(r"```python\n(.*?)```", FORMATS.read_text(encoding="utf-8"), re.DOTALL)
    batch = batch_of(sample(tokens=(5, 151_643, 7), text="日本", metadata={"a": 1}), sample(1, tokens=(1, 2)))
    write(tmp_path / "data_0.pt", batch)
    names = {"torch": torch, "numpy": np, "json": json}
    exec(blocks[0].replace("data_0.pt", str(tmp_path / "data_0.pt")), names)
    exec(blocks[1], names)
    assert names["token_ids"].tolist() == batch.token_ids_T.tolist()
    assert names["loss_mask"].tolist() == batch.loss_mask_T.tolist()
    assert (names["answer"], names["metadata"]) == ("日本", [{"a": 1}, {}])


def test_a_record_of_schema_1_is_read():
    """Case P01: the file was written by the version that had schema 1."""
    batch = read(Path(__file__).parent / "schema1.pt")
    assert (batch.rollout_id, batch.header.schema_version, batch.header.sampling) == (3, 1, {"temperature": 1.0})
    first, second = batch.samples()
    assert first.token_ids.tolist() == [5, 6, 151643]
    assert first.loss_mask.tolist() == [False, False, True]
    assert first.rollout_log_probs.tolist() == [0.0, 0.0, -1.0]
    assert (first.text, first.prompt_text, first.label, first.reward) == ("日本 4", "2+2?", "4", 1.0)
    assert (first.seed, first.weight_version_min, first.weight_version_max) == (11, 1, 2)
    assert first.metadata == {"reward": {"acc": 0.5}, "tags": ["a", None]}
    assert (second.name, second.status, second.response_len, second.reward) == ("sample 7/1", Status.ABORTED, 0, None)


def test_tokens_masks_and_log_probs_take_no_more_room_than_they_need(tmp_path):
    """7 bytes a sampled token of a vocabulary over 65,536, 5 below; 3 or 2 for one of a prompt; and its bit."""
    for top, per_token in ((151_000, 3), (60_000, 2)):
        tokens = np.arange(top - 8000, top)
        write(tmp_path / "x.pt", batch_of(sample(tokens=tokens, prompt_len=4000)), overwrite=True)
        size = (tmp_path / "x.pt").stat().st_size
        assert 8000 * per_token + 4000 * 4 + 1000 < size < 8000 * per_token + 4000 * 4 + 1000 + 8000
