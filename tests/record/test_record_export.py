"""Exports hold what the record holds; a file is whole or not there."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.errors import UsageError, VimeError
from vime.files import check_new, whole_file
from vime.record.export import write_jsonl, write_parquet
from vime.types import RolloutBatch, Sample, Status


def sample(group_id, index, response_len, **changes):
    """Two prompt tokens; token i has the id 10 x i and, if sampled, the log-prob -i / 7; every third is a tool's."""
    n = 2 + response_len
    mask = [i >= 2 and i % 3 != 0 for i in range(n)]
    log_probs = [-i / 7 * m for i, m in enumerate(mask)]
    return Sample(group_id, index, np.arange(n) * 10, 2, np.array(mask), np.array(log_probs), **changes)


SAMPLES = [
    sample(4, 0, 3, reward=0.25, text="日本\n</script>", label="7", seed=2**53 - 1, metadata={"a": [1, {"b": None}]}),
    sample(4, 1, 0, status=Status.FAILED, weight_version_min=1, weight_version_max=2),
    sample(9, 0, 5, reward=-1.0, status=Status.TRUNCATED, prompt_text="<s>2+5="),
]
BATCH = RolloutBatch.from_samples(3, SAMPLES)


def as_sample(row):
    """A sample again, from a row of an export."""
    metadata = row["metadata"] if isinstance(row["metadata"], dict) else json.loads(row["metadata"])
    row = {**row, "metadata": metadata}
    return Sample(**{name: value for name, value in row.items() if name != "rollout_id"})


def same(a, b):
    a, b = RolloutBatch.from_samples(0, a), RolloutBatch.from_samples(0, b)
    arrays = [n for n in RolloutBatch.__slots__ if isinstance(getattr(a, n), np.ndarray)]
    return a.rows == b.rows and all(getattr(a, n).tobytes() == getattr(b, n).tobytes() for n in arrays)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def read_parquet(path):
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


WRITERS = {"jsonl": (write_jsonl, read_jsonl), "parquet": (write_parquet, read_parquet)}


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_are_the_samples_bit_by_bit(tmp_path, kind):
    write, read = WRITERS[kind]
    path = tmp_path / f"x.{kind}"
    assert write(path, [(BATCH, [0, 1, 2]), (BATCH, [2])]) == 4
    rows = read(path)
    assert same([as_sample(row) for row in rows], [*SAMPLES, SAMPLES[2]])
    assert [row["rollout_id"] for row in rows] == [3] * 4
    assert rows[0]["token_ids"] == [0, 10, 20, 30, 40]
    assert rows[0]["loss_mask"] == [False, False, True, False, True]
    assert rows[1]["reward"] is None
    assert [path.name for path in tmp_path.iterdir()] == [f"x.{kind}"]


numbers = st.floats(-60, 0, width=32)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(numbers, max_size=4), st.none() | st.floats(-1e300, 1e300), st.text(max_size=6)), max_size=4
    ),
    kind=st.sampled_from([*WRITERS]),
)
def test_round_trip_of_any_samples(tmp_path_factory, rows, kind):
    samples = [
        Sample(
            i,
            0,
            np.arange(1 + len(lp)),
            1,
            np.array([False] + [True] * len(lp)),
            np.array([0.0, *lp]),
            text=t,
            reward=r,
        )
        for i, (lp, r, t) in enumerate(rows)
    ]
    write, read = WRITERS[kind]
    path = tmp_path_factory.mktemp("x") / f"x.{kind}"
    write(path, [(RolloutBatch.from_samples(0, samples), range(len(samples)))])
    assert same([as_sample(row) for row in read(path)], samples)


def test_what_json_has_no_number_for_is_a_string(tmp_path):
    failed = sample(0, 0, 2, status=Status.ABORTED, metadata={"score": float("inf")})
    failed.rollout_log_probs[2] = np.nan
    write_jsonl(tmp_path / "x.jsonl", [(RolloutBatch.from_samples(0, [failed]), [0])])
    (row,) = read_jsonl(tmp_path / "x.jsonl")
    assert row["rollout_log_probs"][2] == "nan"
    assert row["metadata"] == {"score": "inf"}


def test_half_a_surrogate_pair_goes_into_json_and_is_refused_for_parquet(tmp_path):
    batch = RolloutBatch.from_samples(0, [sample(3, 1, 1, text="a\ud800")])
    write_jsonl(tmp_path / "x.jsonl", [(batch, [0])])
    assert read_jsonl(tmp_path / "x.jsonl")[0]["text"] == "a\ud800"
    with pytest.raises(UsageError, match="sample 3/1: text holds half a surrogate pair"):
        write_parquet(tmp_path / "x.parquet", [(batch, [0])])
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_a_file_is_there_when_it_is_whole(tmp_path):
    def cut_short():
        yield BATCH, [0, 1]
        raise UsageError("the next record is damaged")

    with pytest.raises(UsageError, match="damaged"):
        write_jsonl(tmp_path / "x.jsonl", cut_short())
    assert [*tmp_path.iterdir()] == []
    for refused in (tmp_path / "none" / "x", tmp_path / ("x" * 255)):  # the second cannot be removed either
        with pytest.raises(VimeError, match="cannot be written"), whole_file(refused):
            pass


def test_what_exists_is_not_replaced(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(UsageError, match="exists already"):
        check_new(tmp_path / "x", "--out")
    with pytest.raises(UsageError, match="there is no folder"):
        check_new(tmp_path / "none" / "x", "--out")
    check_new(tmp_path / "y", "--out")
